"""The sound that networks are fitted to, and its fits as files."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
import separation
import torch
from scipy.io import wavfile
from separation_study import audio, frame
from separation_study.claims import OPEN
from separation_study.networks import Course

TINY = audio.Sizes(Course(3, 16, (0.01,), 1), 1)
FEW = 400  # samples of a second, where networks are trained
TONE = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a tiny audio experiment on WAV files of tmp_path/in: exit status, and its errors."""
    tiny = replace(audio.AUDIO, sizes={"quick": TINY})
    monkeypatch.setattr(audio, "AUDIO", tiny)
    monkeypatch.setattr(audio, "RATE", FEW)
    monkeypatch.setattr(separation, "EXPERIMENTS", {"audio": tiny})

    def run(**recordings):
        for name, content in recordings.items():
            (tmp_path / "in").mkdir(exist_ok=True)
            (tmp_path / "in" / f"{name}.wav").write_bytes(content)
        folders = ["--audio", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
        return separation.main(["--experiment", "audio", "--jobs", "1", *folders]), capsys.readouterr().err

    return run


def wav(samples, rate=16000):
    content = io.BytesIO()
    wavfile.write(content, rate, samples)
    return content.getvalue()


def test_recording_is_mixed_cropped_to_its_middle_second_and_resampled(tmp_path):
    quiet = np.zeros(16000)
    left, right = (np.concatenate([quiet, one, quiet]) for one in (1.5 * TONE, 0.5 * TONE))
    (tmp_path / "one.wav").write_bytes(wav((10000 * np.stack([left, right], 1)).astype(np.int16)))
    found = audio.read(tmp_path / "one.wav")
    expected = 10000 * np.sin(2 * np.pi * 440 * np.arange(8000) / 8000)
    assert found.shape == (8000,)
    np.testing.assert_allclose(found[100:-100], expected[100:-100], atol=30)  # the ends ring


@pytest.mark.parametrize("encoding", audio.ENCODINGS)
def test_parts_of_the_samples_are_disjoint_and_the_best_constant_is_at_1(encoding):
    task = audio.as_task(3 * TONE + 7, encoding, seed=1)
    assert task.x.shape == (16000, 1 if encoding == "plain" else 2 * audio.OCTAVES)
    assert torch.equal(torch.cat(list(task.parts.values())).sort().values, torch.arange(16000))
    for name, error in task.errors(lambda x: torch.zeros(len(x))).items():
        assert error == pytest.approx(1, rel=0.1), name
    x, y = replace(task, drawn="validation").batch(torch.Generator().manual_seed(0), 500)
    drawn = (task.x[task.parts["validation"]][:, None] == x).all(2)
    assert drawn.any(0).all()
    assert float((y**2).mean()) == pytest.approx(1, rel=0.2)


def test_fits_lie_beside_the_record_and_have_its_errors(run, tmp_path):
    assert run(tone=wav(TONE[::-1].copy()), other=wav(TONE))[0] == 0
    folder = tmp_path / "out" / "quick"
    unit = frame.Unit("tone-fourier", 0)
    experiment = audio.recorded(tmp_path / "in")
    found = frame.load(frame.path_of(folder, experiment, unit), experiment, experiment.sizes["quick"]).result
    task = audio.as_task(audio.read(tmp_path / "in" / "tone.wav"), "fourier", 0)
    peak = float(task.y.abs().max())
    for trained in found.networks:
        path = folder / "audio" / f"{unit}-{trained.name}.wav"
        assert path.read_bytes() == found.sounds[f"{trained.name}.wav"]
        rate, samples = wavfile.read(path)
        errors = task.errors(lambda _, fit=samples: torch.from_numpy(fit / 32767 * peak))
        assert rate == FEW
        assert errors == pytest.approx({name: trained.error(name) for name in audio.SHARES}, rel=1e-3)
    report = (folder / "report.md").read_text()
    assert report.count(f"| {OPEN} |") == 4
    assert (folder / "figures" / "audio.png").exists()

    status, told = run(tone=wav(2 * TONE))  # another sound of that name
    assert status == 1 and "other sizes" in told


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "there must be a WAV file"),
        (b"RIFF", "cannot be read as a WAV file"),
        (wav(TONE)[:20], "cannot be read as a WAV file"),
        (wav(TONE[:9000]), "at least a second"),
        (wav(np.full(16000, np.nan)), "finite"),
        (wav(np.ones(16000)), "silent"),
    ],
)
def test_sound_that_cannot_be_fitted_is_an_error_before_any_work(content, told, run, tmp_path, monkeypatch):
    monkeypatch.setattr(frame, "measure", lambda *_: pytest.fail("a unit is measured"))
    status, error = run(**({} if content is None else {"sound": content}))
    assert status == 1 and str(tmp_path / "in") in error and told in error


def test_without_recordings_a_chirp_is_fitted_and_the_report_says_so(monkeypatch):
    monkeypatch.setattr(audio, "RATE", FEW)
    results = {unit: audio.measure(None, TINY, unit) for unit in audio.units(TINY)}
    assert [unit.task for unit in results] == ["chirp-plain", "chirp-fourier"]
    assert "chirp (drawn)" in audio.section(TINY, results).text

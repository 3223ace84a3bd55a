"""The sound that networks fit, and its fits as files; Grad-CAM, its measures and its control."""

import io
import pickle
from dataclasses import replace

import numpy as np
import pytest
import separation
import torch
from scipy.io import wavfile
from separation_study import audio, frame, saliency
from separation_study.claims import OPEN
from separation_study.networks import Course

TINY = audio.Sizes(Course(2, 16, (0.01,), 1), 1)
RATE = 16000
TONE = np.sin(2 * np.pi * 40 * np.arange(RATE) / RATE)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, in_this_process):
    """Run a tiny audio experiment on WAV files of tmp_path/in: exit status, and its errors."""
    tiny = replace(audio.AUDIO, sizes={"quick": TINY})
    monkeypatch.setattr(audio, "AUDIO", tiny)
    monkeypatch.setattr(audio, "RATE", 400)
    monkeypatch.setattr(separation, "EXPERIMENTS", {"audio": tiny})

    def run(**recordings):
        for name, content in recordings.items():
            (tmp_path / "in").mkdir(exist_ok=True)
            (tmp_path / "in" / f"{name}.wav").write_bytes(content)
        folders = ["--audio", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
        return separation.main(["--experiment", "audio", "--jobs", "1", *folders]), capsys.readouterr().err

    return run


def wav(samples):
    content = io.BytesIO()
    wavfile.write(content, RATE, samples)
    return content.getvalue()


def test_recording_is_mixed_cropped_to_its_loudest_second_and_resampled(tmp_path):
    left, right = (np.concatenate([np.zeros(RATE // 2), tone, np.zeros(RATE)]) for tone in (1.5 * TONE, 0.5 * TONE))
    (tmp_path / "one.wav").write_bytes(wav((10000 * np.stack([left, right], 1)).astype(np.int16)))
    sound = audio.read(tmp_path / "one.wav")
    expected = 10000 * np.sin(2 * np.pi * 40 * np.arange(8000) / 8000)
    assert sound.shape == (8000,)
    np.testing.assert_allclose(sound[100:-100], expected[100:-100], atol=30)  # the ends ring


@pytest.mark.parametrize("encoding", audio.ENCODINGS)
def test_parts_of_the_samples_are_disjoint_and_the_best_constant_is_at_1(encoding):
    task = audio.as_task(3 * TONE + 7, encoding, seed=1)
    assert torch.equal(torch.cat(list(task.parts.values())).sort().values, torch.arange(RATE))
    assert task.errors(lambda x: torch.zeros(len(x))) == pytest.approx(dict.fromkeys(audio.SHARES, 1), rel=0.1)
    x, _ = replace(task, drawn="validation").batch(torch.Generator().manual_seed(0), 100)
    assert (task.x[task.parts["validation"]][:, None] == x).all(2).any(0).all()


def test_fits_lie_next_to_the_record_and_have_its_errors(run, tmp_path):
    assert run(tone=wav(TONE[::-1].copy()), other=wav(TONE))[0] == 0
    experiment, unit = audio.recorded(tmp_path / "in"), frame.Unit("tone-fourier", 0)
    job = frame.Job(tmp_path / "out" / "quick", experiment, "quick", unit)
    task = audio.as_task(audio.read(tmp_path / "in" / "tone.wav"), "fourier", 0)
    for trained in job.record.result.networks:
        rate, samples = wavfile.read(job.path.with_name(f"{unit}-{trained.name}.wav"))
        fit = torch.from_numpy(samples / 32767 * float(task.y.abs().max()))
        assert rate == audio.RATE
        errors = {part: trained.error(part) for part in audio.SHARES}
        assert task.errors(lambda _, fit=fit: fit) == pytest.approx(errors, rel=1e-3)
    assert (tmp_path / "out" / "quick" / "report.md").read_text().count(f"| {OPEN} |") == 4

    assert pickle.loads(pickle.dumps(experiment)).units(TINY) == experiment.units(TINY)  # as other processes get it

    status, errors = run(tone=wav(2 * TONE))  # another sound of that name
    assert status == 1 and "was begun with recordings" in errors


SMALL = saliency.Sizes(images=20, seeds=1, epochs=1, per_class=2)


def test_entropy_and_half_mass_of_known_maps():
    point = torch.zeros(4, 4)
    point[1, 2] = 5.0
    maps = torch.stack([torch.full((4, 4), 0.3), point, torch.tensor([[4.0, 2, 1, 1]] + [[0.0] * 4] * 3)])
    assert [saliency.spread(each[None])["entropy"] for each in maps] == pytest.approx([4, 0, 1.75])
    assert [saliency.spread(each[None])["half"] for each in maps] == [8, 1, 1]
    spread = saliency.spread(torch.cat([maps, torch.zeros(1, 4, 4)]))
    assert spread == pytest.approx({"entropy": 5.75 / 3, "half": 10 / 3, "empty": 0.25})
    assert saliency.spread(torch.zeros(2, 4, 4)) == {"entropy": None, "half": None, "empty": 1.0}


@pytest.mark.parametrize("arm", ["explicit", "deq-implicit"])
def test_maps_are_grad_cams_and_the_control_changes_them_and_keeps_the_trunk(arm):
    network, settings = saliency.train_small(arm, SMALL, 0)
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    maps, classes = saliency.explain(network, images)
    torch.testing.assert_close(classes, network(images).logits.argmax(1))
    features = network.last(network.trunk(network.stem(images))).detach().requires_grad_()
    logits = network.classifier(features.mean((2, 3))).gather(1, classes[:, None])
    (gradient,) = torch.autograd.grad(logits.sum(), features)
    torch.testing.assert_close(maps, (gradient.mean((2, 3), keepdim=True) * features).sum(1).relu().detach())
    other = saliency.randomised(network, settings)
    control, same = saliency.explain(other, images, classes)
    assert maps.shape == (3, 4, 4) and torch.equal(same, classes)
    assert not torch.allclose(control, maps, rtol=0.1, atol=0.1 * float(maps.max()))
    torch.testing.assert_close(other.trunk(other.stem(images)), network.trunk(network.stem(images)))

"""The run's folder: atomic files, checkpoints and their predecessors, damage, full disks, a second process."""

from __future__ import annotations

import json
import os
import resource

import pytest
import torch
from nc_study.config import StudyError, settings_from
from nc_study.record import FORMAT, Failure
from nc_study.rundir import RunDirectory, check_space, prepare_out, write_atomically
from study_helpers import full_disk, made_up_epoch, made_up_settings, python


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    return directory


def settings(**given):
    return settings_from("cifar_lt", device="cpu", dataset="shapes", **given)


def restored(run):
    states = []
    epoch = run.restore("deq", states.append)
    return epoch, states[0]["weight"] if states else None


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    full_disk(monkeypatch)
    with pytest.raises(StudyError, match="file: No space left on device; what was saved before is intact"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_real_limit_on_file_size_is_an_error_in_a_line(tmp_path):
    program = (
        "from pathlib import Path; from nc_study.rundir import write_atomically\n"
        f"write_atomically(Path({str(tmp_path)!r}) / 'file', b'x' * 100_000)"
    )

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    done = python("-c", program, preexec_fn=limit)
    assert "file: File too large" in done.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_the_last_checkpoint_comes_back_and_the_one_before_is_kept(run):
    assert restored(run) == (0, None)
    for epoch in (1, 2, 3):
        run.save("deq", {"epoch": epoch, "weight": torch.full((100,), float(epoch))})
    epoch, weight = restored(run)
    assert epoch == 3 and (weight == 3).all()
    (run.path / "deq.ckpt").unlink()
    assert restored(run)[0] == 2


def test_a_full_disk_while_saving_loses_nothing(run, monkeypatch):
    run.save("deq", {"epoch": 1, "weight": torch.ones(5)})
    with monkeypatch.context() as patch:
        full_disk(patch)
        for _ in range(2):
            with pytest.raises(StudyError, match="deq.ckpt: No space left"):
                run.save("deq", {"epoch": 2, "weight": torch.zeros(5)})
            assert restored(run)[0] == 1
    run.save("deq", {"epoch": 2, "weight": torch.zeros(5)})
    assert restored(run)[0] == 2


class Harm:
    """Code that loading would run."""

    def __reduce__(self):
        return (os.system, ("true",))


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other", "code"])
def test_a_damaged_checkpoint_is_an_error_that_says_what_to_do(run, damage):
    for epoch in (1, 2):
        run.save("deq", {"epoch": epoch, "weight": torch.ones(1000)})
    path = run.path / "deq.ckpt"
    content = path.read_bytes()
    middle = content.index(torch.ones(4).numpy().tobytes()) + 400
    flipped = content[:middle] + b"\xff" + content[middle + 1 :]
    torch.save({"epoch": 1, "weight": Harm()}, path)
    damaged = {
        "flip": flipped,
        "cut": content[:middle],
        "empty": b"",
        "other": b"hello" * 99,
        "code": path.read_bytes(),
    }
    path.write_bytes(damaged[damage])
    message = "deq.ckpt is damaged .* delete it, and --resume goes on from deq.previous.ckpt"
    with pytest.raises(StudyError, match=message):
        restored(run)
    path.unlink()
    assert restored(run)[0] == 1
    (run.path / "deq.previous.ckpt").write_bytes(b"")
    with pytest.raises(StudyError, match="--resume trains deq from the start"):
        restored(run)


def test_lines_after_the_checkpoint_are_dropped(run):
    lines = [made_up_epoch(number, made_up_settings(), deq=True) for number in (1, 2, 3)]
    for line in lines:
        run.append("deq", line)
    with open(run.path / "deq.jsonl", "a") as file:
        file.write('{"epoch": 4, "te')
    assert run.epochs("deq") == lines and run.count_epochs("deq") == 3
    run.cut("deq", 2)
    with pytest.raises(StudyError, match="deq.jsonl lacks lines of the 3 epochs that are done"):
        run.cut("deq", 3)
    run.append("deq", lines[2])
    assert run.epochs("deq") == lines and len((run.path / "deq.jsonl").read_text().splitlines()) == 3


def test_a_run_with_epochs_is_not_overwritten(run):
    run.start(settings())
    run.start(settings(lr=0.3))  # nothing has been trained yet
    run.save("deq", {"epoch": 1})
    with pytest.raises(StudyError, match="holds an unfinished run of this kind: --resume goes on"):
        run.start(settings(lr=0.3))
    run.start(settings(lr=0.3, resume=True))
    (run.path / "result.json").write_text("{}")
    with pytest.raises(StudyError, match="holds a finished run"):
        run.start(settings(lr=0.3))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "settings.json",
            json.dumps({"format": FORMAT - 1}),
            "written by an older version of this project: .* another --out",
        ),
        (
            "result.json",
            json.dumps({"format": FORMAT - 1}),
            "written by an older version of this project: .* another --out",
        ),
        ("settings.json", "{", "settings.json cannot be read"),
        ("settings.json", None, "settings.json is missing"),
    ],
)
def test_a_run_that_cannot_be_read_is_not_gone_on_with(run, file, content, message):
    run.start(settings())
    run.save("deq", {"epoch": 1})
    (run.path / file).unlink() if content is None else (run.path / file).write_text(content)
    with pytest.raises(StudyError, match=message):
        run.start(settings(resume=True))


def test_why_a_run_failed_is_kept_until_it_is_tried_again(run):
    assert run.failure is None
    run.fail(failure := Failure("no", "python x.py", "2026-01-01T00:00:00+00:00"))
    assert run.failure == failure
    run.fail(None)
    assert run.failure is None


def test_another_setting_is_named_on_resume(run):
    run.start(settings(lr=0.3))
    run.save("deq", {"epoch": 1})
    with pytest.raises(StudyError, match="was begun with --lr 0.3, not 0.1"):
        run.start(settings(lr=0.1, resume=True))
    run.start(settings(lr=0.3, resume=True, out="elsewhere", data_root="elsewhere"))


def test_a_second_process_is_kept_out(tmp_path):
    with (
        RunDirectory(tmp_path / "run").locked(),
        pytest.raises(StudyError, match="another process"),
        RunDirectory(tmp_path / "run").locked(),
    ):
        pass
    with RunDirectory(tmp_path / "run").locked():
        pass


def test_an_unwritable_out_is_found_before_any_work(tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "runs", "/proc/runs"):
        with pytest.raises(StudyError, match="cannot write there"):
            prepare_out(type(tmp_path)(out))
    prepare_out(tmp_path / "new" / "runs")
    assert not list((tmp_path / "new" / "runs").iterdir())


def test_too_small_a_disk_is_found_before_any_work(tmp_path):
    check_space(tmp_path, 1)
    with pytest.raises(StudyError, match="MB free, and the checkpoints take 1000000000 MB"):
        check_space(tmp_path, 10**15)

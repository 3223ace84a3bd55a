"""The run's folder: atomic files, checkpoints, damage, full disks, a second process."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from nc_study.rundir import RunDirectory
from runs.files import locked, read_arrays
from runs.options import StudyError
from study_helpers import made_up_epoch, made_up_settings


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    return directory


class Harm:
    """Code that loading would run."""

    def __reduce__(self):
        return (os.system, ("true",))


@pytest.mark.parametrize("damage", ["flip", "cut", "code"])
def test_a_damaged_checkpoint_is_an_error_that_says_what_to_do(run, damage):
    run.save({"epoch": 1, "weight": torch.ones(1000)})
    path = run.path / "last.ckpt"
    content = path.read_bytes()
    middle = content.index(torch.ones(4).numpy().tobytes()) + 400
    if damage == "code":
        torch.save({"epoch": 1, "weight": Harm()}, path)
    else:
        path.write_bytes(content[:middle] + (b"\xff" + content[middle + 1 :] if damage == "flip" else b""))
    with pytest.raises(StudyError, match="last.ckpt cannot be read .* delete it, and --resume trains from the start"):
        run.restore()


def test_what_was_saved_after_the_checkpoint_is_dropped(run):
    """Lines, and the moments that are measured in every second epoch."""
    lines = [made_up_epoch(number, made_up_settings()) for number in range(1, 5)]
    saved = {line.epoch: {"means": np.full((10, 3), line.epoch, np.float32)} for line in lines if line.nc}
    for line in lines[:3]:
        run.append(line, saved.get(line.epoch))
    with open(run.path / "epochs.jsonl", "a") as file:
        file.write('{"epoch": 4, "te')
    assert run.epochs == lines[:3]
    run.cut(2)
    with pytest.raises(StudyError, match="epochs.jsonl lacks lines of the 3 finished epochs"):
        run.cut(3)
    run.append(lines[2])
    assert run.epochs == lines[:3] and len((run.path / "epochs.jsonl").read_text().splitlines()) == 3
    run.append(lines[3], saved[4])
    kept = read_arrays(run.moments)
    assert kept["epoch"].tolist() == [2, 4] and kept["means"][:, 0, 0].tolist() == [2, 4]
    run.cut(3)
    assert read_arrays(run.moments)["epoch"].tolist() == [2]
    run.append(lines[3])
    with pytest.raises(StudyError, match="moments.npz lacks measurements of these epochs: start again"):
        run.cut(4)
    run.cut(1)
    assert not run.moments.exists()


def test_a_run_is_neither_overwritten_nor_gone_on_with_under_other_settings(run):
    run.start(made_up_settings())
    run.start(made_up_settings(lr=0.3))  # nothing has been trained yet
    run.save({"epoch": 1})
    with pytest.raises(StudyError, match="holds a run of these settings: --resume continues it"):
        run.start(made_up_settings(lr=0.3))
    run.start(made_up_settings(lr=0.3, resume=True, out="elsewhere", data_root="elsewhere", threads=2))
    with pytest.raises(StudyError, match="was begun with --lr 0.3, not 0.1"):
        run.start(made_up_settings(lr=0.1, resume=True))
    with pytest.raises(StudyError, match="was begun with --kernel auto, not torch"):  # no advice that fails
        run.start(made_up_settings(lr=0.3, kernel="torch"))


@pytest.mark.parametrize(
    ("content", "message"), [("{", "settings.json cannot be read"), (None, "settings.json is missing")]
)
def test_a_run_that_cannot_be_read_is_not_gone_on_with(run, content, message):
    run.start(made_up_settings())
    run.save({"epoch": 1})
    begun = run.path / "settings.json"
    begun.unlink() if content is None else begun.write_text(content)
    with pytest.raises(StudyError, match=message):
        run.start(made_up_settings(resume=True))


def test_a_second_process_is_kept_out(run):
    with locked(run.path), pytest.raises(StudyError, match="another process"), locked(run.path):
        pass
    with locked(run.path):
        pass

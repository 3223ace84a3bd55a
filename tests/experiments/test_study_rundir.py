"""The run's folder: atomic files, checkpoints, damage, full disks, a second process."""

from __future__ import annotations

import numpy as np
import pytest
from nc_study.rundir import RunDirectory
from runs.files import locked, read_arrays
from runs.options import StudyError
from study_helpers import made_up_epoch, made_up_settings


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    return directory


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


def test_a_second_process_is_kept_out(run):
    with locked(run.path), pytest.raises(StudyError, match="another process"), locked(run.path):
        pass
    with locked(run.path):
        pass

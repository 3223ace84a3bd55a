"""restoration.py: tiny runs, and input that it refuses."""

import numpy as np
import pytest
import restoration
import torch
from PIL import Image
from runs import Run, StudyError

OPTIONS = restoration.Restoration(pretraining=2, steps=2, batch=1, patch=16, width=4)


@pytest.mark.parametrize("task", ["deblur", "inpaint"])
def test_the_measurement_and_its_adjoint(task):
    torch.manual_seed(0)
    known = restoration.measure(task, torch.rand(2, 1, 16, 18))
    x, y = torch.randn(2, 2, 1, 16, 18, dtype=torch.float64)
    known = restoration.Measurement(known.y.double(), known.transfer.to(torch.complex128), known.mask.double())
    assert torch.isclose((known.forward(x) * y).sum(), (x * known.adjoint(y)).sum())


@pytest.mark.parametrize("arm", restoration.ARMS)
def test_an_arm_trains(tmp_path, arm):
    outcome = restoration.train(Run(OPTIONS, tmp_path, arm, seed=0))
    assert outcome.scores["PSNR"] > 5 and ("converged" in outcome.scores) == (arm == "deq")
    assert len(outcome.shown["traces"]) == (2 if arm == "deq" else 0)


def test_folders_of_images_are_read_and_checked(tmp_path):
    def load(patch=16):
        return restoration.load(restoration.Restoration(data_root=str(tmp_path), patch=patch))

    with pytest.raises(StudyError, match="Train400"):
        load()
    for name in restoration.FOLDERS.values():
        (tmp_path / name).mkdir()
        Image.fromarray(np.zeros((20, 24), np.uint8)).save(tmp_path / name / "a.png")
    name, data = load()
    assert name == "Train400 (1), Set12 (1), BSD68 (1)" and data["train"][0].shape == (20, 24)
    with pytest.raises(StudyError, match="--patch 21: at most 20"):
        load(21)
    (tmp_path / "Set12/a.png").write_bytes(b"no image")
    with pytest.raises(StudyError, match="Set12/a.png"):
        load()

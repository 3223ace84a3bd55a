"""images.py: tiny runs, and input that it refuses."""

import images
import pytest
import torch
from runs import Run, StudyError


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    monkeypatch.setattr(images, "SHAPES", {"train": 40, "test": 20})


OPTIONS = images.Images(epochs=2, images=16, batch=8, width=4)


@pytest.mark.parametrize("arm", images.ARMS)
def test_an_arm_trains(tmp_path, arm):
    outcome = images.train(Run(OPTIONS, tmp_path, arm, seed=0))
    assert 0 <= outcome.scores["accuracy"] <= 100 and len(outcome.shown["log"]) == 2
    assert ("spectral radius" in outcome.scores) == arm.startswith("deq")


def test_the_twin_has_as_many_parameters():
    deq = images.Classifier("deq", images.Images(width=16))
    assert images.count(images.ResNet(deq)) == pytest.approx(images.count(deq), rel=0.1)


@pytest.mark.parametrize("scales", [1, 2, 3])
def test_first_solves_converge(scales):
    torch.manual_seed(0)
    found = images.Classifier("deq", images.Images(scales=scales, max_iter=30))(torch.randn(4, 3, 32, 32))
    assert found.logits.shape == (4, 10) and len(found.z) == scales and found.solution.converged.all()


def test_augmentation_moves_and_mirrors_images_by_themselves():
    torch.manual_seed(0)
    given = torch.arange(3 * 32 * 32.0).reshape(1, 3, 32, 32).repeat(20, 1, 1, 1) + 1
    moved = images.augment(given)
    assert moved.shape == given.shape and len(moved.flatten(1).unique(dim=0)) > 10
    assert bool(((moved == 0) | torch.isin(moved, given)).all())


def test_data_that_are_not_there(tmp_path):
    with pytest.raises(StudyError, match="cifar-10-batches-py"):
        images.load(images.Images(data_root=str(tmp_path)))
    with pytest.raises(StudyError, match="--images 37: there are 36"):
        images.load(images.Images(images=37))

"""Grad-CAM and its measures compared with known answers, its control, and finished runs."""

from __future__ import annotations

import pytest
import torch
from separation_study import saliency

TINY = saliency.Sizes(images=20, seeds=1, epochs=1, per_class=2)


def test_entropy_and_half_mass_of_known_maps():
    one_hot = torch.zeros(4, 4)
    one_hot[1, 2] = 5.0
    maps = torch.stack([torch.full((4, 4), 0.3), one_hot, torch.tensor([[4.0, 2, 1, 1]] + [[0.0] * 4] * 3)])
    assert [saliency.spread(one[None])["entropy"] for one in maps] == pytest.approx([4, 0, 1.75])
    assert [saliency.spread(one[None])["half"] for one in maps] == [8, 1, 1]
    found = saliency.spread(torch.cat([maps, torch.zeros(1, 4, 4)]))
    assert found == pytest.approx({"entropy": 5.75 / 3, "half": 10 / 3, "empty": 0.25})
    assert saliency.spread(torch.zeros(2, 4, 4)) == {"entropy": None, "half": None, "empty": 1.0}


@pytest.mark.parametrize("arm", ["explicit", "deq-implicit"])
def test_maps_are_grad_cams_and_the_control_changes_them_and_keeps_the_trunk(arm):
    network, settings = saliency.train_small(arm, TINY, 0)
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

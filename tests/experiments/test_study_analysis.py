"""What is measured of a trained network: the images shown, and the Jacobian's spectral radius."""

from __future__ import annotations

import pytest
import torch
from nc_study.analysis import analyse, first_images, spectral_radius
from nc_study.config import StudyError, settings_from
from nc_study.models import build
from nc_study.rundir import read_arrays, write_arrays
from study_helpers import shapes_data

TINY = {"dataset": "shapes", "device": "cpu", "kernel": "torch", "width": 1, "n_majority": 80, "ratio": 8}
SETTINGS = settings_from("cifar_lt", test_images=20, **TINY)


@pytest.fixture(scope="module")
def data():
    return shapes_data(SETTINGS)


def test_every_class_is_shown_equally_often_where_it_has_the_images(data):
    counts = torch.bincount(data.train_labels[first_images(data, 200)])
    assert counts.tolist() == [20] * 3 + [10] * 7
    assert torch.bincount(data.train_labels[first_images(data, 3)]).tolist() == [1] * 10


def test_the_spectral_radius_is_that_of_the_whole_jacobian(data):
    network = build("deq", SETTINGS).double().eval()
    images = data.normalise(data.train_images[:3]).double()
    found = spectral_radius(network, images)
    with torch.no_grad():
        x = network.trunk(network.stem(images))
        z = network.last(x)
    for i in range(3):
        one, at = x[i : i + 1], z[i : i + 1]
        flat = torch.autograd.functional.jacobian(lambda v, one=one: network.last.cell(v, one), at)
        exact = torch.linalg.eigvals(flat.reshape(z[i].numel(), -1)).abs().max()
        assert found[i].item() == pytest.approx(exact.item(), rel=0.05)


def test_an_explicit_network_has_features_and_no_radius(data, tmp_path):
    radius, arrays = analyse(build("explicit", SETTINGS), data)
    assert radius is None
    assert arrays["features"].shape == (3 * 50 + 7 * 10, 8) and arrays["labels"].shape == (220,)
    write_arrays(tmp_path / "features.npz", {"explicit": arrays})
    back = read_arrays(tmp_path / "features.npz")
    assert (back["explicit"]["features"] == arrays["features"]).all() and list(back) == ["explicit"]
    (tmp_path / "features.npz").write_bytes(b"half")
    with pytest.raises(StudyError, match="features.npz cannot be read"):
        read_arrays(tmp_path / "features.npz")

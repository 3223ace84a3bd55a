"""Where the class means are decomposed, shown by tensors without data that stand for those of a GPU."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from deqfast.metrics.statistics import ClassMeans, between_classes, svd_device


class DevicesOfSvd(TorchDispatchMode):
    """Where singular values are computed."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == "_linalg_svd":
            self.found.append(args[0].device.type)
        return func(*args, **(kwargs or {}))


def test_small_matrices_are_decomposed_on_the_host():
    """What comes back is on the GPU."""
    gpu, host = torch.device("cuda"), torch.device("cpu")
    for shape, place in (((10, 512), host), ((512, 10), host), ((100, 2048), gpu), ((100, 512), gpu)):
        assert svd_device(torch.Size(shape), gpu) == place and svd_device(torch.Size(shape), host) == host
        with FakeTensorMode(), DevicesOfSvd() as devices:
            counts = torch.ones(shape[0], dtype=torch.float64, device=gpu)
            local = torch.ones(shape, dtype=torch.float64, device=gpu)
            between = between_classes(ClassMeans(counts, local, local[0]), "class-means", 0.0)
            assert all(part.device.type == "cuda" for part in between)
            assert between.whitening.shape == (shape[1], min(shape[0] - 1, shape[1]))
        assert devices.found == [place.type]

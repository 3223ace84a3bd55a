"""Properties of the Triton kernels of the solver steps only; tests/test_steps.py has those of all kernels."""

from __future__ import annotations

import pytest
import torch
from correctness.states import Case, check_step

from deqfast.ops import Kernel, backends

if not (available := backends()["triton"]):
    pytest.skip(available.reason, allow_module_level=True)

from deqfast.kernels import config


def test_programs_share_long_samples_where_the_batch_leaves_multiprocessors_idle(monkeypatch):
    monkeypatch.setattr(config, "multiprocessors", lambda device: 132)
    device, long = torch.device("cuda"), 65536
    assert [config.programs_per_sample(batch, long, device) for batch in (1, 32, 88, 89, 500)] == [16, 8, 3, 1, 1]
    assert [config.programs_per_sample(1, size, device) for size in (1, 8192, 12288, 2**24)] == [1, 1, 3, 64]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("method", [None, "good", "and2"], ids=str)
def test_a_device_that_is_not_current(method):
    step = Kernel("triton").op("multisecant_step" if method else "picard_step")
    check_step(step, Case(method, size=31, k=3), "cuda:1")
    assert torch.cuda.current_device() == 0

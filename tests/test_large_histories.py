"""Histories of more than 2^31 elements: one sample is running, and the memory of the others is never touched."""

from __future__ import annotations

import pytest
import torch
from correctness.states import METHODS, Case, make_state, same_bits

HISTORY = 32


def last_of_many(state, batch, device):
    """The state of one sample as the last of `batch`, of which no other is running."""
    many = {}
    for name, tensor in state.items():
        if name == "active":
            many[name] = tensor.clone().to(device)
        elif name in ("residual", "progress"):
            many[name] = torch.zeros(len(tensor), batch, dtype=tensor.dtype, device=device)
            many[name][:, -1] = tensor[:, 0]
        else:
            many[name] = torch.empty(batch, *tensor.shape[1:], dtype=tensor.dtype, device=device)
            if name in ("status", "iterations"):
                many[name].fill_(1)
            many[name][-1] = tensor[0]
    return many


@pytest.mark.covering(0)
@pytest.mark.parametrize("method", METHODS)
def test_the_last_sample(method, implementation, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # which touches all of it
    step, device, size = implementation.op("multisecant_step"), implementation.device, 4096
    if implementation.name == "triton":  # few samples, since the interpreter runs their programs one by one
        from deqfast.kernels import multisecant_step, picard_step

        size = 65536
        for module in (multisecant_step, picard_step):
            monkeypatch.setattr(module, "programs_per_sample", lambda batch, size, device: 1)
    case = Case(method, batch=1, size=size, history=HISTORY, k=2, history_dtype=torch.bfloat16)
    alone = make_state(case, device)
    try:
        many = last_of_many(alone, 2**31 // (HISTORY * size) + 1, device)
    except RuntimeError as error:
        pytest.skip(f"not enough memory: {error}")
    case.call(step, alone)
    case.call(step, many)
    assert many["active"].item() == alone["active"].item()
    for name in ("z", "best", "status", "iterations", "left", "df", "gram"):
        assert same_bits(many[name][-1], alone[name][0]), name
    for name in ("residual", "progress"):
        assert same_bits(many[name][:, -1], alone[name][:, 0]), name

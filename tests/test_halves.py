"""The halves of a step, for rows that are parts of samples: sums, and the step by sums and verdicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from correctness import assert_close
from correctness.states import METHODS, Case, StepsCase, make_state
from deqfast.kernels.constants import ADVANCES, BROKEN, IMPROVED
from op_calls import share_rows

from deqfast.ops import Kernel
from deqfast.ops.registry import OPS

TORCH = Kernel("torch")
CASES = {
    "picard": Case(None, batch=6, damping=0.7, dtype=torch.float64),
    **{name: Case(name, batch=6, beta=0.8, alpha=0.9, dtype=torch.float64) for name in METHODS},
    "steps": StepsCase(batch=6, dtype=torch.float64),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("k", [0, 3, 9])  # before the first pair, and with a window that is not full, and that is
@pytest.mark.parametrize("size", [1, 63, 777, 8192 + 4])
@pytest.mark.parametrize("name", CASES)
def test_halves_are_those_of_the_reference(implementation, name, size, k, monkeypatch, large_device):
    history = 12 if name == "steps" else min(4, size)  # more pairs than columns: a singular system
    case = replace(CASES[name], size=size, k=k, history=history)
    first = {"picard": "picard", "steps": "broyden"}.get(name, "multisecant")
    if first == "broyden" and implementation.name != "cpp":
        pytest.skip("this kernel has no such halves")
    given: dict[str, Any] = {key: torch.nan_to_num(value) for key, value in make_state(case, "cpu").items()}
    given |= {key: getattr(case, key) for key in ("damping", "alpha", "beta", "ridge")}
    given["method"] = METHODS.get(case.method)
    width = {"picard": 2, "broyden": 2 + 2 * k}.get(first) or 4 + min(k, history) * (
        3 if name in ("good", "and1") else 2
    )
    given |= {"k": k, "sums": torch.full((6, width), 7.0, dtype=torch.float64)}
    given["status"] = torch.tensor([0, 0, 1, 0, 0, 2], dtype=torch.int8)
    verdicts = IMPROVED | ADVANCES, ADVANCES, 0, IMPROVED, BROKEN, ADVANCES
    given["verdict"] = torch.tensor(verdicts, dtype=torch.int8)
    if implementation.name == "triton":
        share_rows(monkeypatch, programs=3 if size > 63 else 1, block=128)  # so each has some of 777 columns
    for op in (f"{first}_sums", f"{first}_apply"):
        if k == 0 and op in ("multisecant_sums", "broyden_sums"):
            continue
        names = list(OPS[op].arguments.__dataclass_fields__)
        expected = [value.clone() if torch.is_tensor(value := given[key]) else value for key in names]
        moved = [value.to(implementation.device, copy=True) if torch.is_tensor(value) else value for value in expected]
        TORCH.op(op)(*expected)
        implementation.op(op)(*moved)
        for key, value, right in zip(names, moved, expected, strict=True):
            if torch.is_tensor(right):
                assert_close(value.cpu(), right, 1e-11, f"{op}: {key}")
        given |= dict(zip(names, expected, strict=True))
    assert torch.equal(given["z"][2], make_state(case, "cpu")["z"][2])  # the verdict 0 leaves a row as it is

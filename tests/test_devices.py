"""Tensors on two devices raise an error that names both. The second one is meta, which torch itself often accepts."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from op_calls import LOOPS, good, good_loop
from torch import Tensor, nn

import deqfast
from deqfast import DEQBlock, FCCell, LinearCell, MonotoneCell, ResidualCell, SubhomogeneousCell
from deqfast.ops.registry import OPS

CALLED = [*OPS, *(f"{op}_triton" for op in OPS if OPS[op].triton), *LOOPS, "loop_end"]
CELLS = {
    "linear": lambda: LinearCell(8),
    "fc": lambda: FCCell(8, 8),
    "monotone": lambda: MonotoneCell(8, 8),
    "monotone in one launch": lambda: MonotoneCell(8, 8, "forward-backward"),
    "subhomogeneous": lambda: SubhomogeneousCell(8, 8),
    "subhomogeneous convolution": lambda: SubhomogeneousCell(8, 8, kernel_size=3),
    "residual": lambda: ResidualCell(8, 4),
    "residual in torch": lambda: ResidualCell(8, 4, kernel="torch"),
}
WEIGHTS = [(name, weight) for name, make in CELLS.items() for weight, _ in make().named_parameters()]


def names_both(call) -> None:
    with pytest.raises((ValueError, RuntimeError)) as error:
        call()
    assert re.search(r"\bcpu\b", str(error.value)) and re.search(r"\bmeta\b", str(error.value)), error.value


def arguments(op: str) -> dict[str, Any]:
    return good_loop(op) if op in (*LOOPS, "loop_end") else good(op.removesuffix("_triton"))


@pytest.mark.usefixtures("cpp_kernels")
@pytest.mark.parametrize("op", CALLED)
def test_each_tensor_of_an_op_in_turn_and_all_of_them(op):
    values = arguments(op)
    names = [name for name, value in values.items() if isinstance(value, Tensor)]
    before = {name: values[name].clone() for name in names}
    run = getattr(torch.ops.deqfast, op)
    for name in names:
        names_both(lambda name=name: run(*(values | {name: values[name].to("meta")}).values()))
        assert all(torch.equal(values[key].nan_to_num(), tensor.nan_to_num()) for key, tensor in before.items())
    results = run(*(values | {name: values[name].to("meta") for name in names}).values())
    results = [results] if isinstance(results, Tensor) else results or []
    assert all(result.is_meta for result in results)


class TestCells:
    """A block refuses each tensor. A cell by itself is refused by torch or by an op, but torch.nn.functional.linear and
    conv2d accept a weight on meta."""

    @staticmethod
    def inputs(name: str) -> Tensor:
        return torch.rand(2, 8, 4, 4) if "residual" in name or "convolution" in name else torch.rand(2, 8)

    @pytest.mark.parametrize("name", CELLS)
    def test_arguments(self, name):
        cell, x = CELLS[name](), self.inputs(name)
        names_both(lambda: cell(x.to("meta"), x))
        names_both(lambda: cell(x, x.to("meta")))
        for solver in ("picard", "anderson"):
            names_both(lambda solver=solver: DEQBlock(cell, solver)(x.to("meta"), z0=x))

    @pytest.mark.parametrize(("name", "weight"), WEIGHTS)
    @pytest.mark.parametrize("training", [True, False])
    def test_weights(self, name, weight, training):
        cell, x = CELLS[name](), self.inputs(name)
        *path, last = weight.split(".")
        module = cell.get_submodule(".".join(path))
        setattr(module, last, nn.Parameter(getattr(module, last).to("meta")))
        names_both(lambda: DEQBlock(cell, "picard").train(training)(x))
        names_both(lambda: DEQBlock(cell).train(training).trajectory(x, at=[1]))


@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden", "auto"])
@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_the_value_of_f(solver, kernel):
    pair = {"a": torch.ones(3, 4), "b": torch.ones(3, 2)}
    for z0, f in (
        (torch.ones(3, 4), lambda z: z.to("meta")),
        (torch.ones(3, 4, 2), lambda z: z.to("meta")),
        (pair, lambda z: z | {"b": z["b"].to("meta")}),
    ):
        names_both(lambda f=f, z0=z0: deqfast.solve(f, z0, solver, kernel))
    names_both(lambda: deqfast.fixed_point(lambda z: z.to("meta"), torch.ones(3, 4), solver=solver))

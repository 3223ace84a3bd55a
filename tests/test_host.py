"""Load of a solve on the host: operations and launches per step, and waits for the device, counted."""

from __future__ import annotations

import math
import os
import sys

import emulate
import pytest
import torch
from op_calls import Operations
from solutions import SOLVERS, every_solver, some_solvers

import deqfast
from deqfast.engine.loop import LateWatch, Watch
from deqfast.ops import Kernel

solve_module = sys.modules["deqfast.engine.solve"]  # the package has a function of that name


class Trace(Operations):
    """The names of the operations that ran, "f" standing for all of those in f."""

    inside_f = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.inside_f:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def wrap(self, f):
        def traced(z):
            self.names.append("f")
            self.inside_f = True
            value = f(z)
            self.inside_f = False
            return value

        return traced

    def steps(self):
        """The operations after each call of f."""
        text = "|".join(self.names).split("|f|")[1:]
        return [[name for name in part.split("|") if name] for part in text]


def slow(z):
    """A map that no solver is done with in 20 evaluations at a tolerance of 1e-30."""
    return torch.linspace(-0.95, 0.97, z.shape[1], device=z.device) * z + 1


VIEWS = ("view", "permute")
LOOK = "_local_scalar_dense"


@some_solvers
@pytest.mark.parametrize("kernel", ["cpp", "triton", "cuda"], indirect=True)
def test_a_step_is_a_single_operation(name, kernel, device, monkeypatch):
    """Next to f, between two looks: one op; where pairs are kept also a first copy, in case f reuses its buffer."""
    solver = SOLVERS[name](rtol=1e-30, max_iter=8)  # Anderson's window of 6 slides too
    for watch in (Watch, LateWatch):
        monkeypatch.setattr(watch, "every", 100)
    with Trace() as trace:
        deqfast.solve(trace.wrap(slow), torch.zeros(2, 16, device=device), solver, kernel)
    steps = [[op for op in step if op not in VIEWS] for step in trace.steps()]
    assert len(steps) == 8
    op = {"picard": "picard_step", "broyden": "broyden_step"}.get(name, "multisecant_step")
    if kernel != "cpp" and op == "broyden_step":
        op = "multisecant_step"
    first_copy = ["clone"] if op == "multisecant_step" else []
    op += "_triton" if kernel == "triton" else ""
    assert steps[0] == [op, *first_copy]
    # After the last step the results are read.
    assert all(step == [op] for step in steps[1:-1]) and steps[-1][0] == op


class FakeEvent:
    """An event of a device that has always arrived."""

    waits = 0

    def record(self, stream):
        pass

    def synchronize(self):
        FakeEvent.waits += 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts events that a GPU would have")
@every_solver
def test_a_late_look_never_waits_for_the_step_before_it(name, monkeypatch):
    """Solves on the CPU look at the count as they do on a GPU."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(solve_module, "watch_of", LateWatch)
    monkeypatch.setattr(FakeEvent, "waits", 0)
    f, z0, solver = (lambda z: 0.5 * z + 1), torch.zeros(2, 16), SOLVERS[name](rtol=1e-3)
    with Trace() as trace:
        solution = deqfast.solve(f, z0, solver, "cpp")
    needed = max(solution.iterations.tolist())
    assert solution.evaluations == min(20, (math.ceil(needed / 2) + 1) * 2)
    assert trace.names.count(LOOK) == 1  # z0 is finite
    looks = min(math.ceil(solution.evaluations / 2), 20 // 2 - 1)
    assert FakeEvent.waits == looks - 1
    assert bool(solution.converged.all())


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="counts launches of the interpreter")
@some_solvers
def test_launches_of_the_triton_kernels(name, monkeypatch):
    from triton.runtime import interpreter

    begun, launched = [], []
    call = interpreter.GridExecutor.__call__
    monkeypatch.setattr(
        interpreter.GridExecutor, "__call__", lambda *args, **kwargs: launched.append(1) or call(*args, **kwargs)
    )

    def f(z):
        begun.append(len(launched))
        return slow(z)

    deqfast.solve(f, torch.zeros(1, 16), SOLVERS[name](rtol=1e-30, max_iter=12), "triton")
    for k, (before, after) in enumerate(zip(begun, [*begun[1:], len(launched)], strict=True)):
        window = 0 if name == "picard" else min(k, 6 if name.startswith("anderson") else 12)
        assert 1 <= after - before <= (1 if name == "picard" else 2 if window <= 8 else 3), (k, begun)


@pytest.mark.skipif(emulate.COMPILER is None, reason="no g++ was found")
@every_solver
@pytest.mark.parametrize("batch", [1, 4])
def test_launches_of_the_emulated_cuda_kernels(name, batch, monkeypatch):
    """One, or two where several blocks share a sample."""
    for op in ("picard_step", "multisecant_step"):
        emulate.load(op)
    monkeypatch.setattr(Kernel, "op", lambda kernel, op: getattr(torch.ops.deqfast_emulated, op))
    monkeypatch.setattr("deqfast.engine.solve.choose_kernel", lambda kernel, device, **halves: Kernel("cuda"))
    before, z0 = emulate.launches(), torch.zeros(batch, 8192)
    solution = deqfast.solve(slow, z0, SOLVERS[name](rtol=1e-30, max_iter=5))
    per_step = 2 if batch == 1 else 1
    assert emulate.launches() - before == per_step * solution.evaluations

"""Cases of single ops: one call, in place where the op works in place, by every kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from deqfast.ops import ACTIVATIONS, Kernel
from deqfast.testing import norm_states, relative_error, states

from . import traffic
from .counters import count
from .entry import (
    KERNELS,
    Case,
    Contender,
    Skipped,
    Wrong,
    check,
    check_results,
    kernel_of,
    on,
    require_fc_kernel,
    short,
)
from .maps import FC_RADIUS, NEVER
from .record import Row
from .timing import Copy

TORCH = Kernel("torch")
# Damping of a step that leaves z where it is.
STILL = 2.0**-20
BF16 = torch.bfloat16
ROWS = 8  # samples whose state is made by the reference, and compared with it; the others are copies of them
COLLAPSE_ERROR = {"torch": 1e-12, "cpp": 1e-12, "triton": 1e-5, "cuda": 1e-5}  # those of a GPU compute in float32


@dataclass(frozen=True, kw_only=True)
class OpCase(Case):
    section = "ops"
    providers: ClassVar[tuple[str, ...]] = KERNELS
    peers = ("torch",)
    op: str

    def finish(self, op: Any, arguments: Sequence[Any], facts: Row) -> Contender:
        """A contender that calls ``op(*arguments)``, with what one call asks of torch."""

        def another() -> Any:
            return partial(op, *[a.clone() if isinstance(a, Tensor) else a for a in arguments])

        call = partial(op, *arguments)
        return self.contending(call, facts, another)

    def contending(self, call: Any, facts: Row, another: Any, **more: Any) -> Contender:
        """A contender with what one call asks of torch; what waits for the host no graph can hold."""
        counters = count(lambda f: call(), lambda: None)
        facts |= {"launches": counters.operations, "peak_bytes": counters.peak_bytes}
        return Contender(call, facts, another=None if counters.host_waits else another, **more)


@dataclass(frozen=True, kw_only=True)
class StepCase(OpCase):
    """A step of Picard (method None) or of a multisecant method whose window of `history` pairs is full.

    improving: every sample finds its best iterate yet, which is copied, as in most steps of a solve; else none does.
    """

    op: str = "multisecant_step"
    batch: int
    dim: int
    method: str | None = None
    history: int = 1
    history_dtype: torch.dtype | None = None
    improving: bool = False

    @property
    def name(self) -> str:
        kind = "picard-step" if self.method is None else f"{LABELS[self.method]}{self.history}"
        kind += "-bf16" if self.history_dtype else ""
        kind += "-transposed" if self.op == "multisecant_transposed" else "-step" if self.method else ""
        kind += "-improving" if self.improving else ""
        return f"{kind}-{self.batch}x{self.dim}"

    def size(self) -> Row:
        return {"batch": self.batch, "dim": self.dim, "dtype": "fp32"} | (
            {"history_dtype": short(self.history_dtype)} if self.history_dtype else {}
        )

    def bytes(self) -> int:
        wide = traffic.width(self.history_dtype)
        if self.method is None:
            passes: float = traffic.PICARD_PASSES
        elif self.op == "multisecant_transposed":
            passes = traffic.transposed_passes(self.history, wide)
        else:
            passes = traffic.multisecant_passes(self.history, wide)
        return round((passes + self.improving) * self.batch * self.dim * 4)

    def state(self) -> tuple[Any, states.State]:
        """The step of a few samples, and their state before it."""
        case = states.Case(
            self.method,
            min(self.batch, ROWS),
            self.dim,
            self.history,
            k=self.history,
            history_dtype=self.history_dtype,
            damping=0.5 if self.method is None else 1.0,
            tol=0.0,
            wobble=0.5,
        )
        return case, states.make_state(case)

    def still(self, case: Any, state: states.State) -> Any:
        """The step that is timed: it leaves z where it is, so that it finds the same work every time."""
        return replace(case, damping=STILL, alpha=STILL)

    def contender(self, provider: str, device: str) -> Contender:
        op = kernel_of(provider, device).op(self.op)
        case, few = self.state()
        state = {name: repeated(name, tensor, self.batch).to(device) for name, tensor in few.items()}
        if self.op == "multisecant_transposed":
            return self._transposed(op, case, few, state)
        facts = self._check(op, case, few, state)
        still = self.still(case, state)
        for record in ("residual", "gain"):
            state[record].zero_()  # no iterate is better, so that none is copied to `best`

        def forget(of: states.State = state) -> None:
            of["residual"].fill_(math.inf)

        def step(of: states.State = state) -> None:
            if self.improving:
                forget(of)
            still.call(op, of)

        def verify() -> None:
            if state["status"].any() or not state["z"].isfinite().all():
                raise Wrong("samples ended while the step was timed: the time is no time of a full step")
            before = state["z"].clone()
            step()
            if torch.equal(state["best"], before) != self.improving:
                raise Wrong("the best iterate is copied in every improving step, and in no other")

        def another() -> Any:
            return partial(step, states.clone(state))

        reset = forget if self.improving else None
        return self.contending(step, facts | {"bytes": self.bytes()}, another, f=reset, verify=verify)

    def _check(self, op: Any, case: Any, few: states.State, state: states.State) -> Row:
        """One step of all samples against the reference in float64."""
        after, plain, exact = states.clone(state), states.clone(few), states.clone(few, torch.float64)
        case.call(op, after)
        case.call(case.reference, plain)
        case.call(case.reference, exact)
        return check_results([after["z"].cpu()], *[[repeated("z", s["z"], self.batch)] for s in (plain, exact)])

    def _transposed(self, op: Any, case: Any, few: states.State, state: states.State) -> Contender:
        method, alpha, beta, ridge = case.scalars()[-4:]

        def arguments(of: states.State) -> list[Any]:
            batch, device = len(of["z"]), of["z"].device
            newest = torch.full((batch,), self.history - 2, dtype=torch.int32, device=device)
            count_of_pairs = torch.full_like(newest, self.history - 1)  # the pair of the last step has no df yet
            window = [of[name] for name in ("left", "df", "gram")]
            return [of["z"], *window, newest, count_of_pairs, method, alpha, beta, ridge]

        plain, exact = (
            repeated("z", TORCH.op("multisecant_transposed")(*arguments(s)), self.batch)
            for s in (few, states.clone(few, torch.float64))
        )
        facts = check_results([op(*arguments(state)).cpu()], [plain], [exact])
        return self.finish(op, arguments(state), facts | {"bytes": self.bytes()})


@dataclass(frozen=True, kw_only=True)
class BroydenStepCase(StepCase):
    """The last step of a solve of `history` evaluations by Broyden's method, which has the steps before it alone."""

    op: str = "broyden_step"
    history: int = 20

    @property
    def name(self) -> str:
        return f"broyden-steps{self.history - 1}-step-{self.batch}x{self.dim}"

    def bytes(self) -> int:
        return traffic.steps_passes(self.history - 1) * self.batch * self.dim * 4

    def state(self) -> tuple[Any, states.State]:
        case = states.StepsCase(
            None, min(self.batch, ROWS), self.dim, self.history, k=self.history - 1, tol=0.0, wobble=0.5
        )
        few = states.start_steps(case)
        states.run_to(case, few)
        return case, few

    def still(self, case: Any, state: states.State) -> Any:
        """With the newest step made short: c_{k-1} grows as 1 / |s_{k-1}|, so that the next step is as short."""
        state["steps"][:, case.k - 1] = STILL * (state["fz"] - state["z"])
        return case

    def contender(self, provider: str, device: str) -> Contender:
        if not kernel_of(provider, device).has_broyden_step:
            raise Skipped(f"{provider} has no broyden_step: its solves keep pairs")
        return super().contender(provider, device)


LABELS = {"and2": "anderson-m", "good": "broyden-n"}


def repeated(name: str, tensor: Tensor, batch: int) -> Tensor:
    """The tensor `name` of a solver's state for `batch` samples, which take turns with those it holds."""
    if name == "active":
        return torch.tensor([batch], dtype=tensor.dtype)
    dim = 1 if name in ("residual", "gain") else 0
    return tensor.index_select(dim, torch.arange(batch) % tensor.shape[dim])


@dataclass(frozen=True, kw_only=True)
class RateCase(OpCase):
    """What the machine itself can do: a large copy ("copy", by its bytes) or a bfloat16 product of matrices ("mm")."""

    section = "rates"
    providers = ("torch",)
    size_of: int  # elements of the copy in float32; rows and columns of the matrices

    @property
    def name(self) -> str:
        return f"{self.op}-{self.size_of}"

    def size(self) -> Row:
        return {"dim": self.size_of, "dtype": "fp32" if self.op == "copy" else "bf16"}

    def contender(self, provider: str, device: str) -> Contender:
        if self.op == "copy":
            copy = Copy(device, self.size_of)
            return Contender(copy, {"bytes": 2 * copy.source.nbytes}, another=lambda: copy)
        a, b, out = (torch.ones(self.size_of, self.size_of, dtype=BF16, device=device) for _ in range(3))
        call = partial(torch.mm, a, b, out=out)
        return Contender(call, {"flop": 2 * self.size_of**3}, another=lambda: call)


@dataclass(frozen=True, kw_only=True)
class NormOpCase(OpCase):
    """What surrounds the convolutions of the residual cell, channels_last. dtypes: of ``norm_states.NORM_DTYPES``."""

    shape: tuple[int, int, int, int]
    dtypes: str = "fp32"

    @property
    def name(self) -> str:
        return "-".join([self.op, "x".join(map(str, self.shape)), self.dtypes.replace(" beside ", "-")])

    def size(self) -> Row:
        batch, *image = self.shape
        return {"batch": batch, "dim": image[0] * image[1] * image[2], "dtype": self.dtypes}

    def contender(self, provider: str, device: str) -> Contender:
        op = kernel_of(provider, device).op(self.op)
        case = norm_states.NormCase(self.op, self.shape, 8, self.dtypes)
        arguments = case.arguments()
        given = on(device, arguments.values())
        exact = case.reference(*norm_states.exactly(arguments))
        facts = check_results([a.cpu() for a in op(*given)], case.reference(*arguments.values()), exact)
        y, z = norm_states.NORM_DTYPES[self.dtypes]
        facts["bytes"] = traffic.norm_bytes(self.op, arguments["y"].numel(), y.itemsize, z.itemsize)
        return self.finish(op, given, facts)


@dataclass(frozen=True, kw_only=True)
class FCOpCase(OpCase):
    """``fc_fixed_point``, `iterations` of z <- tanh(W z + c) in one call, which arithmetic bounds and not bytes; or
    ``fc_vjp``."""

    batch: int
    dim: int
    weight_dtype: torch.dtype = torch.float32
    iterations: int = 30

    @property
    def name(self) -> str:
        kind = f"-{short(self.weight_dtype)}" if self.op == "fc_fixed_point" else ""
        return f"{self.op}-{self.batch}x{self.dim}{kind}"

    def size(self) -> Row:
        return {"batch": self.batch, "dim": self.dim, "dtype": short(self.weight_dtype)}

    def contender(self, provider: str, device: str) -> Contender:
        kernel = kernel_of(provider, device)
        generator = torch.Generator().manual_seed(self.dim)
        more: list[Any] = [ACTIVATIONS.index("tanh")]
        first, second = (torch.randn(self.batch, self.dim, generator=generator) for _ in range(2))
        if self.op == "fc_vjp":
            arguments = [first, second]
        else:
            weight = FC_RADIUS * torch.randn(self.dim, self.dim, generator=generator) / self.dim**0.5
            arguments = [weight.to(self.weight_dtype), first, torch.zeros_like(first)]
            more += [NEVER, False, self.iterations, 0.0]
            require_fc_kernel(kernel, arguments[0].to(device), first.dtype)
        op, given = kernel.op(self.op), [*on(device, arguments), *more]
        plain, exact = (
            first_of(TORCH.op(self.op)(*given, *more))
            for given in (arguments, [tensor.double() for tensor in arguments])
        )
        facts = check_results([first_of(op(*given)).cpu()], [plain], [exact])
        if self.op == "fc_vjp":
            facts["bytes"] = traffic.fc_vjp_bytes(self.batch, self.dim)
        return self.finish(op, given, facts)


def first_of(results: Tensor | tuple[Tensor, ...]) -> Tensor:
    return results if isinstance(results, Tensor) else results[0]


@dataclass(frozen=True, kw_only=True)
class CollapseOpCase(OpCase):
    """A pass of neural collapse over features (N, D) of K classes."""

    samples: int
    dim: int
    classes: int

    @property
    def name(self) -> str:
        return f"{self.op}-{self.samples}x{self.dim}-K{self.classes}"

    def size(self) -> Row:
        return {"batch": self.samples, "dim": self.dim, "classes": self.classes, "dtype": "fp32"}

    def contender(self, provider: str, device: str) -> Contender:
        kernel = kernel_of(provider, device)
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(self.samples, self.dim, generator=generator)
        rows = (torch.arange(self.samples) % self.classes).argsort(stable=True)
        counts = torch.bincount(torch.arange(self.samples) % self.classes, minlength=self.classes)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        arguments = [features, rows, offsets]
        if self.op == "within_class_scatter":
            local, shift = TORCH.op("class_means")(*arguments)
            directions = torch.randn(self.dim, self.classes - 1, generator=generator, dtype=torch.float64)
            arguments += [local + shift, directions]
            moved = traffic.scatter_bytes(self.samples, self.dim, self.classes, self.classes - 1, 4)
        else:
            moved = traffic.class_means_bytes(self.samples, self.dim, self.classes, 4)
        op, given = kernel.op(self.op), on(device, arguments)
        exact = [tensor.double() for tensor in arguments[:1]] + arguments[1:]
        error = worst_error(op(*given), TORCH.op(self.op)(*exact))
        allowed = COLLAPSE_ERROR[provider]
        check("relative error", error, allowed)
        return self.finish(op, given, {"error": error, "allowed": allowed, "bytes": moved})


def worst_error(actual: Any, exact: Any) -> float:
    """Of a tensor or of several, relative to the largest exact entry."""
    pairs = [(actual, exact)] if isinstance(exact, Tensor) else zip(actual, exact, strict=True)
    return max(relative_error(a, e) for a, e in pairs)

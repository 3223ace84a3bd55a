"""Cases of single ops: one call, in place where the op works in place, by every kernel."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from deqfast.ops import ACTIVATIONS, Kernel
from deqfast.testing import norm_states, states

from . import traffic
from .counters import count
from .entry import KERNELS, Case, Contender, Skipped, Wrong, check_results, kernel_of, on, short
from .record import Row

TORCH = Kernel("torch")
STILL = 2.0**-20  # damping of a step that leaves z where it is, so that every call finds the same work
LABELS = {None: "picard", "and2": "anderson-m", "good": "broyden-n"}


@dataclass(frozen=True, kw_only=True)
class OpCase(Case):
    """An op, whose results are compared with the reference in float64."""

    section = "ops"
    providers: ClassVar[tuple[str, ...]] = KERNELS
    peers: ClassVar[tuple[str, ...]] = ("torch",)
    op: str

    @abstractmethod
    def bytes(self) -> int:
        """What a call must move."""

    def counted(self, call: Any, facts: Row, another: Any, **more: Any) -> Contender:
        """A contender with what one call asks of torch; what waits for the host no graph can hold."""
        counters = count(lambda f: call(), lambda: None)
        facts |= {"bytes": self.bytes(), "launches": counters.operations, "peak_bytes": counters.peak_bytes}
        return Contender(call, facts, another=None if counters.host_waits else another, **more)


@dataclass(frozen=True, kw_only=True)
class FunctionCase(OpCase):
    """An op that returns its results and changes none of its arguments."""

    @abstractmethod
    def arguments(self, device: str) -> list[Any]:
        """The arguments of the op, the same for every kernel."""

    def contender(self, provider: str, device: str) -> Contender:
        op, reference, given = kernel_of(provider, device).op(self.op), TORCH.op(self.op), self.arguments(device)
        wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in given]
        results = [r if isinstance(r, tuple) else (r,) for r in (op(*given), reference(*given), reference(*wide))]

        def another() -> Callable[[], Any]:
            return partial(op, *[a.clone() if isinstance(a, Tensor) else a for a in given])

        return self.counted(partial(op, *given), check_results(*results), another)


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
        kind = LABELS[self.method] + (str(self.history) if self.method else "")
        kind += "-bf16-step" if self.history_dtype else "-step"
        return f"{kind}{'-improving' if self.improving else ''}-{self.batch}x{self.dim}"

    def size(self) -> Row:
        history = {"history_dtype": short(self.history_dtype)} if self.history_dtype else {}
        return {"batch": self.batch, "dim": self.dim, "dtype": "fp32"} | history

    def bytes(self) -> int:
        passes: float = traffic.PICARD_PASSES
        if self.method is not None:
            passes = traffic.multisecant_passes(self.history, traffic.width(self.history_dtype))
        return round((passes + self.improving) * self.batch * self.dim * 4)

    def state(self, device: str) -> tuple[Any, states.State]:
        """A step at its full window, and the state before it."""
        case = states.Case(
            self.method,
            self.batch,
            self.dim,
            self.history,
            k=self.history,
            history_dtype=self.history_dtype,
            damping=0.5 if self.method is None else 1.0,
            tol=0.0,
            wobble=0.5,
        )
        return case, states.make_state(case, device)

    def still(self, case: Any, state: states.State) -> Any:
        """The step that is timed: it leaves z where it is."""
        return replace(case, damping=STILL, alpha=STILL)

    def contender(self, provider: str, device: str) -> Contender:
        op = kernel_of(provider, device).op(self.op)
        case, state = self.state(device)
        after, plain, exact = (states.clone(state, dtype) for dtype in (None, None, torch.float64))
        for step_of, of in ((op, after), (case.reference, plain), (case.reference, exact)):
            case.call(step_of, of)
        facts = check_results(*([of["z"]] for of in (after, plain, exact)))
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

        def another() -> Callable[[], Any]:
            return partial(step, states.clone(state))

        return self.counted(step, facts, another, f=forget if self.improving else None, verify=verify)


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

    def state(self, device: str) -> tuple[Any, states.State]:
        case = states.StepsCase(None, self.batch, self.dim, self.history, k=self.history - 1, tol=0.0, wobble=0.5)
        return case, states.make_state(case, device)

    def still(self, case: Any, state: states.State) -> Any:
        """The step, its newest predecessor made short: c_{k-1} grows as 1 / |s_{k-1}|, so that the next is as short."""
        state["steps"][:, case.k - 1] = STILL * (state["fz"] - state["z"])
        return case

    def contender(self, provider: str, device: str) -> Contender:
        if not kernel_of(provider, device).has_broyden_step:
            raise Skipped(f"{provider} has no broyden_step: its solves keep pairs")
        return super().contender(provider, device)


@dataclass(frozen=True, kw_only=True)
class TransposedCase(FunctionCase):
    """The product of v with the transposed inverse of Broyden's method: the start of SHINE's backward pass."""

    op: str = "multisecant_transposed"
    batch: int
    dim: int
    history: int = 20

    @property
    def name(self) -> str:
        return f"broyden-n{self.history}-transposed-{self.batch}x{self.dim}"

    def size(self) -> Row:
        return {"batch": self.batch, "dim": self.dim, "dtype": "fp32"}

    def bytes(self) -> int:
        return round(traffic.transposed_passes(self.history, 1.0) * self.batch * self.dim * 4)

    def arguments(self, device: str) -> list[Any]:
        case, state = StepCase(method="good", batch=self.batch, dim=self.dim, history=self.history).state(device)
        newest = torch.full((self.batch,), self.history - 2, dtype=torch.int32, device=device)
        pairs = torch.full_like(newest, self.history - 1)  # the pair of the last step has no df yet
        return [*(state[name] for name in ("z", "left", "df", "gram")), newest, pairs, *case.scalars()[-4:]]


@dataclass(frozen=True, kw_only=True)
class NormOpCase(FunctionCase):
    """What surrounds the convolutions of the residual cell, channels_last. dtypes: of ``norm_states.NORM_DTYPES``."""

    shape: tuple[int, int, int, int]
    dtypes: str = "fp32"

    @property
    def name(self) -> str:
        return "-".join([self.op, "x".join(map(str, self.shape)), self.dtypes.replace(" beside ", "-")])

    def size(self) -> Row:
        batch, *image = self.shape
        return {"batch": batch, "dim": math.prod(image), "dtype": self.dtypes}

    def bytes(self) -> int:
        y, z = norm_states.NORM_DTYPES[self.dtypes]
        return traffic.norm_bytes(self.op, math.prod(self.shape), y.itemsize, z.itemsize)

    def arguments(self, device: str) -> list[Any]:
        return on(device, norm_states.NormCase(self.op, self.shape, 8, self.dtypes).arguments().values())


@dataclass(frozen=True, kw_only=True)
class FCVjpCase(FunctionCase):
    """The gradient of tanh(W z + c) before the products with W."""

    op: str = "fc_vjp"
    batch: int
    dim: int

    @property
    def name(self) -> str:
        return f"fc_vjp-{self.batch}x{self.dim}"

    def size(self) -> Row:
        return {"batch": self.batch, "dim": self.dim, "dtype": "fp32"}

    def bytes(self) -> int:
        return traffic.fc_vjp_bytes(self.batch, self.dim)

    def arguments(self, device: str) -> list[Any]:
        generator = torch.Generator().manual_seed(self.dim)
        tensors = [torch.randn(self.batch, self.dim, generator=generator) for _ in range(2)]
        return [*on(device, tensors), ACTIVATIONS.index("tanh")]

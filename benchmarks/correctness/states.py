"""Random states of the solver-step ops, and the comparison of one step of an implementation with the reference.

An implementation takes what the op ``picard_step`` or ``multisecant_step`` takes. One step from a state is compared
with the reference run in float64 on the same numbers. For rounded values, the bound is twice the error of the reference
in the state's own dtype, plus a few eps. That error is the worst of three orders of summation. Values that are copied,
counted or must stay untouched are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from deqfast.kernels.constants import ANDERSON_I, ANDERSON_II, BROYDEN_BAD, BROYDEN_GOOD, STALL_ITERATIONS
from torch import Tensor

from deqfast.ops import Kernel
from deqfast.ops.steps import PROGRESS, StopRule

TORCH = Kernel("torch")
State = dict[str, Tensor]
METHODS = {"good": BROYDEN_GOOD, "bad": BROYDEN_BAD, "and1": ANDERSON_I, "and2": ANDERSON_II}
MONITOR = ("z", "fz", "best", "status", "iterations", "residual", "progress", "active")
WINDOW = ("f_prev", "left", "df", "gram")
COLUMNS = ("z", "fz", "best", "f_prev", "left", "df", "steps")  # tensors with the state's last dimension
RULES = {"rel": {}, "abs": {"absolute": True}, "max": {"maximum": True, "offset": 0.5}}  # of a case
SLACK = 16  # eps of the state's dtype, relative to the length of what is compared


@dataclass(frozen=True)
class Case:
    """A step to compare: method None is Picard; `rows` lists what happens to the first samples, see ``strike``."""

    method: str | None = None
    batch: int = 2
    size: int = 63
    history: int = 4
    k: int = 0
    dtype: torch.dtype = torch.float32
    history_dtype: torch.dtype | None = None
    damping: float = 1.0
    alpha: float = 1.0
    beta: float = 1.0
    ridge: float = 2.0**-20  # a power of two is the same number in every dtype
    tol: float = 1e-12
    absolute: bool = False
    stall_floor: float = 0.0
    offset: float = 0.0
    maximum: bool = False
    last: bool = False
    rows: tuple[str, ...] = ()
    wobble: float = 0.0  # how much f changes from iteration to iteration, to keep the pairs of a long window apart
    # Error allowed in addition to the reference's, relative to steps and dots. Triton's interpreter needs it: it does
    # not round a bfloat16 history to nearest.
    history_slack: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        return MONITOR if self.method is None else MONITOR + WINDOW

    @property
    def reference(self) -> Callable[..., None]:
        return TORCH.op("picard_step" if self.method is None else "multisecant_step")

    def scalars(self) -> tuple[Any, ...]:
        if self.method is None:
            return (*self.evaluation(), self.damping)
        return (*self.evaluation(), METHODS[self.method], self.alpha, self.beta, self.ridge)

    def evaluation(self) -> tuple[Any, ...]:
        rule = StopRule(self.tol, self.absolute, self.stall_floor, self.offset, maximum=self.maximum)
        return self.k, self.last, *rule

    def call(self, step: Callable[..., None], state: State) -> None:
        step(*(state[name] for name in self.names), *self.scalars())


def value_of_f(z: Tensor, k: int = 0, wobble: float = 0.0) -> Tensor:
    """A map with a fixed point that treats samples independently; its Jacobian is neither normal nor symmetric."""
    wave = torch.linspace(0.3, 2.3, z.shape[1], dtype=z.dtype, device=z.device)
    return torch.tanh(0.6 * z.roll(1, dims=1) - 0.5 * wave.cos() * z + wave) + 0.1 * z + wobble * (9 * k * wave).cos()


def start_state(case: Case, device: str = "cpu") -> State:
    """State before the first iteration. Entries that are not written yet hold NaN."""
    batch, size, history, dtype = case.batch, case.size, case.history, case.dtype
    z = torch.randn(batch, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64).to(dtype)
    records = torch.full((2 + len(PROGRESS), batch), float("inf"), dtype=dtype)
    pairs = torch.full((batch, history, size), float("nan"), dtype=case.history_dtype or dtype)
    state = {
        "z": z,
        "fz": value_of_f(z),
        "best": z.clone(),
        "status": torch.zeros(batch, dtype=torch.int8),
        "iterations": torch.zeros(batch, dtype=torch.int32),
        "residual": records[:2],
        "progress": records[2:],
        "active": torch.tensor([batch], dtype=torch.int32),
        "f_prev": torch.full_like(z, float("nan")),
        "left": pairs,
        "df": pairs.clone(),
        "gram": torch.full((batch, history + 2, history), float("nan"), dtype=dtype),
    }
    return {name: tensor.to(device) for name, tensor in state.items()}


@dataclass(frozen=True)
class StepsCase(Case):
    """A broyden_step to compare; `history` is the number of steps that fit."""

    @property
    def names(self) -> tuple[str, ...]:
        return (*MONITOR, "steps", "gram", "first")

    @property
    def reference(self) -> Callable[..., None]:
        return TORCH.op("broyden_step")

    def scalars(self) -> tuple[Any, ...]:
        return self.evaluation()


def start_steps(case: StepsCase, device: str = "cpu") -> State:
    """``start_state`` of ``broyden_step``."""
    state = start_state(case, device)
    del state["df"]
    state["steps"] = state.pop("left")
    state["gram"] = torch.full_like(state["gram"][:, : case.history], float("nan"))
    state["first"] = torch.zeros_like(state["iterations"])
    return state


def advance(case: Case, step: Callable[..., None], state: State) -> None:
    """Iteration case.k with `step`, then f at the new iterates."""
    case.call(step, state)
    state["f_prev"] = state["fz"]
    state["fz"] = value_of_f(state["z"], case.k + 1, case.wobble)


def make_state(case: Case, device: str = "cpu") -> State:
    """State at iteration case.k: after the reference's earlier iterations, and with `case.rows` struck."""
    state = start_steps(case, device) if isinstance(case, StepsCase) else start_state(case, device)
    run_to(case, state)
    for row, event in enumerate(case.rows):
        strike(state, row, event, case)
    return state


def run_to(case: Case, state: State) -> None:
    """Run the reference from the start to iteration case.k."""
    for k in range(case.k):
        advance(replace(case, k=k, last=False, tol=0.0, stall_floor=0.0), case.reference, state)


def strike(state: State, row: int, event: str, case: Case) -> None:
    z, fz = state["z"][row], state["fz"][row]
    if event == "done":
        for name in case.names:
            if state[name].is_floating_point() and name not in ("residual", "progress"):
                state[name][row] = float("nan")
        state["status"][row] = 1 + row % 3
    elif event == "nan":
        fz[case.size // 2] = float("nan")
    elif event == "inf":
        fz[-1] = float("inf")
    elif event == "overflow":  # finite, but not its square
        fz[0] = 16 * torch.finfo(case.dtype).max ** 0.5
    elif event == "tiny":  # as are its squares: 0 in the dtype of the state
        small = torch.finfo(case.dtype).tiny ** 0.75
        z.mul_(small)
        fz.mul_(small)
    elif event == "converged":
        fz.copy_(z)
    elif event == "zero":
        z.zero_()
        fz.zero_()
    elif event == "stalled":
        state["residual"][:, row] = state["progress"][0, row] = 1e-6
        state["progress"][1, row] = case.k - STALL_ITERATIONS
    elif event in ("runaway", "fallen"):  # f(z) = z, longer than the start; the first residual was 0, or very long
        fz.copy_(z)
        state["progress"][2, row] = 0 if event == "runaway" else torch.finfo(case.dtype).max
        state["progress"][3, row] = 0
    elif event == "degenerate" and isinstance(case, StepsCase):  # the newest step is 0
        state["steps"][row, case.k - 1] = 0
    elif event == "degenerate":  # the newest pair is s = y = 0
        fz.copy_(state["f_prev"][row])
        state["left"][row, (case.k - 1) % case.history] = 0
    elif event == "singular":  # a history of the newest step only, and g equal to it: 1 - c = 0, without rounding
        step = (torch.arange(case.size) % 5 - 2).to(z)
        state["steps"][row, case.k - 1] = step
        state["first"][row] = case.k - 1
        z.copy_(3 * step)
        fz.copy_(4 * step)
    elif event == "forgotten":
        state["first"][row] = case.k // 2
    else:
        assert event == "run", event


def clone(state: State, dtype: torch.dtype | None = None, flip: int = 0) -> State:
    """A copy; floating tensors in `dtype` if given; columns in another order (1: reversed, 2: rotated by a third)."""
    copy = {}
    for name, tensor in state.items():
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        copy[name] = reorder(tensor, flip) if name in COLUMNS else tensor.clone()
    return copy


def reorder(tensor: Tensor, flip: int) -> Tensor:
    """The columns in the order of ``clone``; the negative of a number undoes it."""
    if abs(flip) == 1:
        return tensor.flip(-1)
    return tensor.roll(tensor.shape[-1] // 3 * (flip // 2), dims=-1)


def jitter(state: State, seed: int) -> State:
    """A copy whose floating tensors are changed by up to a rounding, at random."""
    generator, copy = torch.Generator().manual_seed(seed), clone(state)
    for tensor in filter(Tensor.is_floating_point, copy.values()):
        factor = 2 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 1
        tensor.mul_(1 + torch.finfo(tensor.dtype).eps * factor.to(tensor.device))
    return copy


def restore(state: State, flip: int) -> State:
    return {name: reorder(tensor, -flip) if name in COLUMNS else tensor for name, tensor in state.items()}


def same_bits(a: Tensor, b: Tensor) -> bool:
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and torch.equal(*(tensor.flatten().contiguous().view(torch.uint8) for tensor in (a, b)))


def assert_same_bits(name: str, a: Tensor, b: Tensor) -> None:
    assert same_bits(a, b), f"{name}: {a} is not {b}"


def check_step(impl: Callable[..., None], case: Case, device: str = "cpu") -> State:
    """Compare one step of `impl` with the reference; return the state after the step."""
    return compare_step(impl, case, make_state(case, device))


def check_run(impl: Callable[..., None], case: Case, device: str = "cpu") -> State:
    """Compare the steps 0 .. case.k of one run of `impl`, through the filling of the window and evictions."""
    state = make_state(replace(case, k=0), device)
    for k in range(case.k + 1):
        here = replace(case, k=k)
        state = compare_step(impl, here, state)
        state["f_prev"], state["fz"] = state["fz"], value_of_f(state["z"], k + 1, case.wobble)
    return state


def compare_step(impl: Callable[..., None], case: Case, before: State) -> State:
    states = outcomes(impl, case, before)
    after = states[0]
    stepped = check_iterates(case, before, states)
    if isinstance(case, StepsCase):
        check_steps(case, stepped, before, states)
    elif case.method is not None and stepped.any():
        check_untouched_history(case, before, after, stepped)
        # Differences of z and of f: their rounding errors are relative to z and f.
        size = length(before["z"][stepped]).maximum(length(before["fz"][stepped]))
        for name in ("left", "df"):
            for slot in written_slots(case, name):
                check_close(f"{name}[:, {slot}]", case, [state[name][stepped, slot] for state in states], size)
        if case.k:
            check_gram(case, stepped, states)
    return after


def outcomes(impl: Callable[..., None], case: Case, before: State) -> list[State]:
    """The states after a step of `impl`, of the reference in float64, and of it in three orders of columns.

    The checks take them in this order. A float64 reference is itself rounded. The last states then show how much a
    rounding of its arguments changes.
    """
    after = clone(before)
    case.call(impl, after)
    exact = clone(before, torch.float64)
    case.call(case.reference, exact)
    rounded = [clone(before, flip=flip) for flip in range(3)]
    jittered = [jitter(before, seed) for seed in range(4)] if case.dtype == torch.float64 else []
    for state in (*rounded, *jittered):
        case.call(case.reference, state)
    return [after, exact, *(restore(state, flip) for flip, state in enumerate(rounded)), *jittered]


def check_iterates(case: Case, before: State, states: list[State]) -> Tensor:
    """Check the iterates and their records; return the mask (B,) of the samples that took a step."""
    after, exact, same, *_ = states
    check_copies(case, before, after, same)
    ran = before["status"] == 0
    for name in ("residual", "progress"):
        check_close(name, case, [state[name][:, ran].mT for state in states], length(exact[name][:, ran].mT))
    stepped = (after["status"] == 0) & (not case.last)
    if stepped.any():
        check_close("z", case, [state["z"][stepped] for state in states], length(exact["z"][stepped]))
    return stepped


def check_copies(case: Case, before: State, after: State, same: State) -> None:
    """Check that counted or copied values equal the reference, and that finished samples and inputs do not change."""
    for name in ("status", "iterations", "active", "best"):
        assert_same_bits(name, after[name], same[name])
    for name in ("fz", "f_prev"):
        assert_same_bits(name, after[name], before[name])
    held = (after["status"] != 0) | torch.tensor(case.last, device=after["status"].device)
    assert_same_bits("z of samples that stop", after["z"][held], same["z"][held])
    done = before["status"] != 0
    for name in case.names:
        if name not in ("residual", "progress", "active"):
            assert_same_bits(f"{name} of finished samples", after[name][done], before[name][done])
    for name in ("residual", "progress"):
        assert_same_bits(f"{name} of finished samples", after[name][:, done], before[name][:, done])
    if case.last and case.method is not None:
        for name in ("left", "df", "gram"):
            assert_same_bits(f"{name} in the last step", after[name], before[name])


def written_slots(case: Case, name: str) -> list[int]:
    newest = [(case.k - 1) % case.history] if case.k else []
    if name == "df":
        return newest
    y_stored = newest if case.method in ("bad", "and2") else []
    return sorted({*y_stored, case.k % case.history})


def written_gram(case: Case) -> Tensor:
    """Mask (M + 2, M) of the entries of the window matrix that the step writes."""
    history, n, newest, slot = case.history, min(case.k, case.history), (case.k - 1) % case.history, case.k
    mask = torch.zeros(history + 2, history, dtype=torch.bool)
    if n == 0:
        return mask
    mask[:n, newest] = mask[history:, newest] = True
    if case.method != "good":
        mask[newest, :n] = True
    if case.method in ("good", "and1"):
        mask[slot % history, :n] = True
    return mask


def check_untouched_history(case: Case, before: State, after: State, stepped: Tensor) -> None:
    for name in ("left", "df"):
        rest = [slot for slot in range(case.history) if slot not in written_slots(case, name)]
        assert_same_bits(f"{name} elsewhere", after[name][stepped][:, rest], before[name][stepped][:, rest])
    unwritten = ~written_gram(case)
    assert_same_bits("gram elsewhere", after["gram"][stepped][:, unwritten], before["gram"][stepped][:, unwritten])


def check_steps(case: Case, stepped: Tensor, before: State, states: list[State]) -> None:
    """The step that was taken and its dots; nothing else is written but `first`."""
    after, exact, *_ = states
    for same in states[1:3]:
        assert_same_bits("first", after["first"], same["first"])
    steps_written, gram_written = (torch.zeros_like(before[name], dtype=torch.bool) for name in ("steps", "gram"))
    steps_written[stepped, case.k : case.k + 1] = True
    gram_written[stepped, max(case.k - 1, 0), : case.k] = True
    for name, written in (("steps", steps_written), ("gram", gram_written)):
        assert_same_bits(f"{name} elsewhere", after[name][~written], before[name][~written])
    if not stepped.any():
        return
    # A step is made of differences of f and z: its rounding errors are relative to them.
    size = length(before["z"][stepped]).maximum(length(before["fz"][stepped]))
    check_close("steps", case, [state["steps"][stepped, case.k] for state in states], size)
    if case.k:
        norms = torch.linalg.vector_norm(exact["steps"][stepped, : case.k], dim=-1)
        scale = norms * norms[:, -1:]
        scale = torch.where(scale > 0, scale, 1)
        dots = [state["gram"][stepped, case.k - 1, : case.k].double() / scale for state in states]
        check_close("gram", case, dots, 1.0)


def check_gram(case: Case, stepped: Tensor, states: list[State]) -> None:
    """Every written dot product, relative to the product of the lengths of its two vectors."""
    mask = written_gram(case)
    scale = gram_scale(case, {name: states[1][name][stepped] for name in ("z", "left", "df", "gram")})
    check_close("gram", case, [(state["gram"][stepped].double() / scale)[:, mask] for state in states], 1.0)


def gram_scale(case: Case, exact: State) -> Tensor:
    history, n, slot = case.history, min(case.k, case.history), case.k % case.history
    z, left, df = (torch.linalg.vector_norm(exact[name], dim=-1) for name in ("z", "left", "df"))
    left_norm, y_norm = exact["gram"][:, history:].sqrt().unbind(dim=1)
    # ANDERSON_I computes S^T Y as a difference of dots with DF and S, which can be longer than Y. A step is a
    # difference of two z, and has their rounding errors.
    right = torch.stack([y_norm, df, left]).amax(dim=0) / case.beta if case.method == "and1" else y_norm
    scale = left_norm[:, :, None] * right[:, None, :]
    scale = torch.cat([scale, (left_norm**2)[:, None], (y_norm**2)[:, None]], dim=1)
    if case.method in ("good", "and1"):
        scale[:, slot, :n] = z[:, None] * df[:, :n]
    return torch.where(scale > 0, scale, 1)


def check_close(name: str, case: Case, values: list[Tensor], size: Tensor | float) -> None:
    """Per sample (dimension 0), in the largest norm: |actual - exact| <= 2 max |rounded - exact| + slack size.

    values: those of ``outcomes``.
    """
    actual, exact, *rounded = values
    error = distance(actual, exact)
    allowed = torch.stack([distance(tensor, exact) for tensor in rounded]).amax(dim=0)
    bound = 2 * allowed + (SLACK * torch.finfo(case.dtype).eps + case.history_slack) * size
    assert (error <= bound).all(), f"{name}: error {error.tolist()} exceeds {bound.tolist()} in {case}"


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Largest difference per sample; equal infinities do not differ, NaN differs from everything."""
    a, b = a.double(), b.double()
    return torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=float("inf")).flatten(1).amax(dim=1)


def length(a: Tensor) -> Tensor:
    return a.double().abs().nan_to_num(posinf=0.0).flatten(1).amax(dim=1)

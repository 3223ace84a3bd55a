"""Steps of the solvers for loops in compiled code, on the CPU; and the beginning of an eager solve in one op.

``state_begin`` makes the tensors of an eager solve from z (B, D), apart from z: the best iterate, status, iterations,
residual, progress and the number of running samples, see ``ops.steps``.

``loop_begin`` makes the tensors that all steps work on, and ``loop_end`` copies the results out of them. Between the
two, only the steps read or write them. The exception is the iterate, the first B D elements of `values`:

- values: z, best, residual and progress, then the tensors that PARTS names; in the dtype of the state.
- counts: the evaluations so far, the running samples, iterations, then the tensors that PARTS names; int32.
- status: int8 (B,).
- history: the tensors that PARTS names, each (B, M, D), one after the other; (0,) without any.

A step takes f(z), `max_iter` and the numbers of the stop rule and of the solver. It returns whether another evaluation
follows, () bool. Compiled code calls each op by its C function, at a fraction of the dispatcher's cost.

``loop_begin`` takes `solve`: 0 to begin only if z0 is finite, else a number unique to a solve that always begins. The
number keeps torch from merging the loops of two solves from one z0. The op's tag keeps torch from computing its tensors
once for all calls.

The schemas do not declare what the ops write to. Before 2.14, torch puts no op with declared writes into a loop, and
2.14.1 fails on such a loop if the state is complex. The data flow still fixes the order: a step takes f of the previous
step's iterate, and ``loop_end`` takes the truth value that the last step returned.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..registry import check_devices, library


@dataclass(frozen=True)
class Parts:
    """Further tensors of a step in `values`, `counts` and `history`, in this order, after the tensors of all steps."""

    values: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    history: tuple[str, ...] = ()


# Rows of `progress`: the relative residual and the iteration of the last gain of 5 %; |g| of the first evaluation; the
# size of the start, max(|f(z0)|, |f(z0) - z0|); |f(z)| of `best`; the least residual that tol was compared with.
PROGRESS = ("gain", "gain_iteration", "first", "start", "best_size", "least")
PARTS = {
    "picard_step": Parts(),
    "multisecant_step": Parts(values=("f_prev", "gram"), history=("left", "df")),
    "broyden_step": Parts(values=("gram",), counts=("first",), history=("steps",)),
}
STEPS = [name.replace("step", "loop") for name in PARTS]

library.define(
    "state_begin(Tensor z) -> (Tensor best, Tensor status, Tensor iterations, Tensor residual, Tensor progress, "
    "Tensor active)"
)
library.define(
    "loop_begin(Tensor z0, SymInt elements, SymInt integers, int solve) "
    "-> (Tensor values, Tensor counts, Tensor status, Tensor running)",
    tags=torch.Tag.nondeterministic_seeded,
)
library.define(
    "loop_end(Tensor values, Tensor counts, Tensor status, Tensor running, SymInt batch, SymInt dim) "
    "-> (Tensor value, Tensor status, Tensor iterations, Tensor relative, Tensor absolute, Tensor evaluations)"
)


@functools.partial(torch.library.register_fake, "deqfast::state_begin", lib=library)
def state_begin(z: Tensor) -> tuple[Tensor, ...]:
    """The op ``state_begin`` in plain torch."""
    batch, device = z.shape[0], z.device
    return (
        z.clone(),
        torch.zeros(batch, dtype=torch.int8, device=device),
        torch.zeros(batch, dtype=torch.int32, device=device),
        *(torch.full((rows, batch), math.inf, dtype=z.dtype, device=device) for rows in (2, len(PROGRESS))),
        torch.full((1,), batch, dtype=torch.int32, device=device),
    )


@functools.partial(torch.library.register_fake, "deqfast::loop_begin", lib=library)
def _begun(z0: Tensor, elements: int, integers: int, solve: int) -> tuple[Tensor, ...]:
    status, running = z0.new_empty(z0.shape[0], dtype=torch.int8), z0.new_empty((), dtype=torch.bool)
    return z0.new_empty(elements), z0.new_empty(integers, dtype=torch.int32), status, running


@functools.partial(torch.library.register_fake, "deqfast::loop_end", lib=library)
def _ended(values: Tensor, counts: Tensor, status: Tensor, running: Tensor, batch: int, dim: int) -> tuple[Tensor, ...]:
    check_devices("loop_end", {"values": values, "counts": counts, "status": status, "running": running})
    value, residuals = values.new_empty(batch, dim), [values.new_empty(batch) for _ in range(2)]
    return value, status.new_empty(batch), counts.new_empty(batch), *residuals, counts.new_empty((), dtype=torch.int64)


def _running(op: str, values: Tensor, counts: Tensor, status: Tensor, history: Tensor, fz: Tensor, *_: Any) -> Tensor:
    check_devices(op, {"values": values, "counts": counts, "status": status, "history": history, "fz": fz})
    return values.new_empty((), dtype=torch.bool)


for _name in STEPS:
    library.define(
        f"{_name}(Tensor values, Tensor counts, Tensor status, Tensor history, Tensor fz, int max_iter, "
        "float[] numbers) -> Tensor running"
    )
    torch.library.register_fake(f"deqfast::{_name}", functools.partial(_running, _name), lib=library)

_C_TYPES = {
    "Tensor": "AtenTensorHandle",
    "int": "int64_t",
    "SymInt": "int64_t",
    "List[float]": "const double*, int64_t",
}


def _declaration(op: Any) -> str:
    kinds = [_C_TYPES[str(argument.type)] for argument in op._schema.arguments]
    kinds += ["AtenTensorHandle*"] * len(op._schema.returns)
    return f"AOTITorchError aoti_torch_cpu_{op._schema.name.split('::')[1]}({', '.join(kinds)})"


@functools.cache
def c_functions() -> dict[Any, list[str]]:
    """Ops, with the declarations of their C functions."""
    ops = [getattr(torch.ops.deqfast, name).default for name in ("loop_begin", *STEPS, "loop_end")]
    return {op: [_declaration(op)] for op in ops}

"""Ops of the solvers' steps: ``picard_step``, ``multisecant_step``, ``broyden_step``, ``multisecant_transposed``.

The first three work in place on B samples of D elements, in the dtype of the state. Samples whose status is not 0 are
neither read nor written. The last is the transposed product with a window of pairs. g stands for f(z) - z.

``picard_sums`` and ``picard_apply``, and likewise of the other steps, are the halves of a step whose rows are not whole
samples, see ``split``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...kernels.constants import MAX_GPU_HISTORY, MAX_ITERATIONS
from ..registry import Dtype, Range, Result, Shaped, anchored, register
from .loops import PROGRESS as PROGRESS  # and the schemas of the steps in compiled loops

InOut = partial(Shaped, mutated=True)
STATE = anchored(torch.float32, torch.float64)
HISTORY = Dtype({torch.float32: (torch.float32, torch.bfloat16), torch.float64: (torch.float64,)})
METHOD = Range(0, 3)
MAX_ITER = Range(1, MAX_ITERATIONS)


@dataclass
class _State:
    z: Annotated[Tensor, InOut("B, D", STATE)]  # the iterate; replaced by the next one
    fz: Annotated[Tensor, Shaped("B, D", STATE)]  # f(z)
    best: Annotated[Tensor, InOut("B, D", STATE)]  # the iterate of least |g| + eps |f(z)|; starts as z0
    status: Annotated[Tensor, InOut("B", torch.int8)]  # ``deqfast.Status``
    iterations: Annotated[Tensor, InOut("B", torch.int32)]  # evaluations of f so far
    residual: Annotated[Tensor, InOut("2, B", STATE)]  # relative and absolute, of `best`; starts at infinity
    progress: Annotated[Tensor, InOut("6, B", STATE)]  # see PROGRESS; starts at infinity
    active: Annotated[Tensor, InOut("1", torch.int32)]  # number of running samples; starts at B


class Parts(Protocol):
    """Rows that are parts of samples. The steps of kernel "torch" sum over them between their two halves."""

    def sum(self, numbers: Tensor) -> Tensor:
        """Sums (B, K) over the parts of each row's sample, which may replace `numbers`."""

    def most(self, numbers: Tensor) -> Tensor:
        """Largest numbers (B, K), likewise; infinite for NaN."""


class StopRule(NamedTuple):
    """Numbers of the stop rule, see ``Solver``; `RuleNumbers` in csrc/common/monitor.h has the same order."""

    tol: float  # bound on the relative residual |g| / (|f(z)| + offset) or, if `absolute`, on |g|
    absolute: bool = False
    stall_floor: float = 0.0  # relative residual below which a sample without a gain of 5 % may stall; 0: never
    offset: float = 0.0
    maximum: bool = False  # norms are the largest magnitudes, not the Euclidean ones

    def undecided(self) -> StopRule:
        """Rule by which no sample converges or stalls."""
        return self._replace(tol=-1.0, stall_floor=0.0)


@dataclass
class _Evaluation:
    # Evaluations of f before this one. In a loop on the device it is -max_iter, from the second one on. The running
    # samples then find the number in `iterations`, and compare it with max_iter in place of `last`.
    k: Annotated[int, Range(-MAX_ITERATIONS, MAX_ITERATIONS - 1)]
    last: bool  # no evaluation follows: judge, take no step
    rule: StopRule


@dataclass
class PicardStep(_Evaluation, _State):
    """z <- z + damping g."""

    damping: float


@dataclass
class _Previous:
    f_prev: Annotated[Tensor, Shaped("B, D", STATE)]  # f at the previous iterate; read from k = 1 on


@dataclass
class _Pairs:
    left: Annotated[Tensor, InOut("B, M, D", HISTORY)]  # L; pair i is in slot i mod M
    df: Annotated[Tensor, InOut("B, M, D", HISTORY)]  # DF, likewise
    gram: Annotated[Tensor, InOut("B, M + 2, M", STATE)]  # N and, in its last two rows, the squared lengths of pairs


@dataclass
class _Method:
    method: Annotated[int, METHOD]  # Broyden good, Broyden bad, Anderson I, Anderson II
    alpha: float  # length of the step
    beta: float  # mixing
    ridge: float  # Anderson: added to the diagonal of the equilibrated N


@dataclass
class MultisecantStep(_Method, _Evaluation, _Pairs, _Previous, _State):
    """z <- z + alpha (beta g - DF gamma) with N gamma = L^T g."""


@dataclass(frozen=True)
class MultisecantTransposed:
    """Return alpha (beta v - L gamma) with N^T gamma = DF^T v.

    If the step is z <- z - H g, this is -H^T v: for alpha = 1 an estimate of (I - J^T)^-1 v, J the Jacobian of f. On a
    GPU several blocks share a long sample; how many depends on D only.
    """

    v: Annotated[Tensor, Shaped("B, D", STATE)]
    left: Annotated[Tensor, Shaped("B, M, D", HISTORY)]
    df: Annotated[Tensor, Shaped("B, M, D", HISTORY)]
    gram: Annotated[Tensor, Shaped("B, M + 2, M", STATE)]
    newest: Annotated[Tensor, Shaped("B", torch.int32)]  # number of the newest pair in each sample's window
    count: Annotated[Tensor, Shaped("B", torch.int32)]  # pairs in that window
    method: Annotated[int, METHOD]
    alpha: float
    beta: float
    ridge: float


@dataclass
class _Steps:
    steps: Annotated[Tensor, InOut("B, M, D", STATE)]  # all steps so far; k < M, or k <= M and `last`
    gram: Annotated[Tensor, InOut("B, M, M", STATE)]  # dots of the steps; row j is written when step j is the newest
    first: Annotated[Tensor, InOut("B", torch.int32)]  # the step with which a sample's history begins; starts at 0


@dataclass
class BroydenStep(_Evaluation, _Steps, _State):
    """Broyden's good method with full steps, computed from the steps only. It has no GPU kernels.

    c_j = (s_j . g + sum_{i<j} s_j . s_{i+1} c_i) / |s_j|^2 and s_k = (g + sum_{i<k-1} c_i s_{i+1}) / (1 - c_{k-1})
    (Kelley, Iterative Methods for Linear and Nonlinear Equations, SIAM 1995, section 7.3). In exact arithmetic it
    equals multisecant_step's method 0 with every pair in the window, and takes half the memory. A step of length zero
    has c_j = 0. A sample takes a Picard step and restarts its history if 1 - c_{k-1} vanishes, a c_j is not finite, or
    the square of the newest step overflows or underflows.
    """


@dataclass
class _Rows:
    z: Annotated[Tensor, Shaped("B, D", STATE)]
    fz: Annotated[Tensor, Shaped("B, D", STATE)]
    status: Annotated[Tensor, Shaped("B", torch.int8)]


@dataclass
class PicardSums(_Rows):
    """Sums over the elements of each row whose status is 0; those of the others stay."""

    sums: Annotated[Tensor, InOut("B, 2", STATE)]  # |g|^2 and |f(z)|^2


@dataclass
class MultisecantSums(_Pairs, _Previous, _Rows):
    """Likewise, and complete the newest pair, as the step does; N is only read."""

    # |g|^2, |f(z)|^2; L^T g and L^T y by slot, n = min(k, M) each; |l|^2 and |y|^2 of the newest pair, and if L holds
    # steps, its row of N (n).
    sums: Annotated[Tensor, InOut("B, K", STATE)]
    k: Annotated[int, Range(1, MAX_ITERATIONS - 1)]
    method: Annotated[int, METHOD]
    beta: float


@dataclass
class BroydenSums(_Rows):
    """Likewise."""

    steps: Annotated[Tensor, Shaped("B, M, D", STATE)]
    sums: Annotated[Tensor, InOut("B, K", STATE)]  # |g|^2, |f(z)|^2, and dots of the newest step and of g with k steps
    k: Annotated[int, Range(1, MAX_ITERATIONS - 1)]


@dataclass
class _Judged:
    z: Annotated[Tensor, InOut("B, D", STATE)]
    fz: Annotated[Tensor, Shaped("B, D", STATE)]
    best: Annotated[Tensor, InOut("B, D", STATE)]
    verdict: Annotated[Tensor, Shaped("B", torch.int8)]  # bits IMPROVED, BROKEN and ADVANCES; 0: the row stays


@dataclass
class PicardApply(_Judged):
    """The step of rows with ADVANCES; rows with IMPROVED or BROKEN keep or restore their best iterate."""

    damping: float


@dataclass
class _Joined:
    sums: Annotated[Tensor, Shaped("B, K", STATE)]  # over all parts of each sample; not read if k = 0
    k: Annotated[int, Range(0, MAX_ITERATIONS - 1)]


@dataclass
class MultisecantApply(_Method, _Joined, _Pairs, _Judged):
    """Likewise, with the sums of ``MultisecantSums``; DF is only read."""


@dataclass
class BroydenApply(_Joined, _Steps, _Judged):
    """Likewise, with the sums of ``BroydenSums``."""


register("picard_step", PicardStep, "z", triton="picard_step", binds=True)
register("picard_sums", PicardSums, "z", triton="picard_step")
register("picard_apply", PicardApply, "z", triton="picard_step")
register("broyden_step", BroydenStep, "z", binds=True)
register("broyden_sums", BroydenSums, "z")
register("broyden_apply", BroydenApply, "z")
_pairs: Any = {"limits": {"M": Range(1, MAX_GPU_HISTORY)}, "triton": "multisecant_step"}
register("multisecant_step", MultisecantStep, "z", **_pairs)
register("multisecant_sums", MultisecantSums, "z", **_pairs)
register("multisecant_apply", MultisecantApply, "z", **_pairs)
register("multisecant_transposed", MultisecantTransposed, "v", Result("out", STATE, like="v"), **_pairs)

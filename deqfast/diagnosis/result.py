"""Result of a diagnosis: a readable report, a dictionary and a figure."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from .._checks import matplotlib_figure
from ..gradients import Adjoint
from ..solution import Status
from ..solvers import Picard, Solver
from .advice import advise, largest, median, rounded, spelled
from .measure import BUDGET, TOLERANCES, GradientError, Remedy, Run

_WIDTH = 100
_KINDS = ("measured", "estimated")  # errors of gradients


@dataclass(frozen=True)
class Diagnosis:
    """Findings of ``deqfast.diagnose``. ``str`` gives the report.

    There are B samples. Distances are relative to the longer of the two states. NaN means not measured.

    Attributes:
        cell: name of its class or function.
        solver, adjoint: of the block.
        statuses: number of samples of each ``Status`` in the block's own solve.
        evaluations_as_it_is, residual_as_it_is: evaluations of that solve, and its largest relative residual.
        runs: trials of the solvers, with more evaluations and a tighter tolerance.
        settled: (B,) bool, samples with a fixed point, at which all that follows is measured, else at the best iterate.
        radius, norm: (B,) spectral radius of the Jacobian in z, and its norm, estimated from below.
        spread: (answers, B) distances of z* from the answers of the other solvers, then from random starts.
        moved: (B,) distance of z* from z0.
        step: (B,) distance of f(z) from a random z, which needs no fixed point.
        dependence: (B,) distance of z* from the z* of another sample, which has another x.
        gradients: errors of the gradients by each approximate adjoint.
        changing: modules that change between calls.
        difference: largest distance of two values at one state; None if it was not measured.
        alone: distance of a sample's value from its value without the other samples; None if it was not measured.
        sizes: tree like z of the typical sizes of its tensors' numbers.
        scaled: whether the block has a `scale`.
        remedy: change of the cell with which it converges, searched for if no solve converged.
        evaluations: of the cell in the whole diagnosis.
    """

    cell: str
    solver: Solver
    adjoint: Adjoint
    statuses: dict[str, int]
    evaluations_as_it_is: int
    residual_as_it_is: float
    runs: list[Run]
    settled: Tensor
    radius: Tensor
    norm: Tensor
    spread: Tensor
    moved: Tensor
    step: Tensor
    dependence: Tensor
    gradients: dict[str, GradientError]
    changing: list[str]
    difference: float | None
    alone: float | None
    sizes: Any
    scaled: bool
    remedy: Remedy | None
    evaluations: int

    @property
    def converged(self) -> bool:
        """Whether the block's own solve converges for all samples."""
        return set(self.statuses) <= {Status.CONVERGED.name}

    @property
    def advice(self) -> list[str]:
        """Sentences, each of which names what to change."""
        return advise(self)

    def to_dict(self) -> dict[str, Any]:
        """All findings and the advice as numbers, strings, lists and dictionaries that JSON takes; None for NaN."""
        return _plain(self) | {"advice": self.advice}

    def __str__(self) -> str:
        lines = [f"{self.cell}: batch of {len(self.settled)}, diagnosed by {self.evaluations} evaluations"]
        for title, texts in self._sections():
            lines += ["", title, *(line for text in texts for line in _wrapped(text))]
        advice = self.advice or ["Nothing: no finding asks for a change."]
        lines += ["", "What to change", *(line for text in advice for line in _wrapped(text, "- "))]
        return "\n".join(lines)

    __repr__ = __str__

    def _sections(self) -> list[tuple[str, list[str]]]:
        return [
            ("As it is", self._as_it_is()),
            (f"Evaluations until all samples converge to a relative residual (-: not in {BUDGET})", self._table()),
            ("Contraction", self._contraction()),
            ("Starts and input", self._collapse()),
            ("Gradients: relative error, measured by an exact solve, and estimated from the norm", self._gradients()),
            ("The cell", self._cell()),
        ]

    def _as_it_is(self) -> list[str]:
        ended = ", ".join(f"{number} {status}" for status, number in self.statuses.items())
        solver = spelled(self.solver, ("rtol", "max_iter"))
        return [
            f"{solver}: {ended} after {self.evaluations_as_it_is} evaluations; relative residual "
            f"{self.residual_as_it_is:.1e}.",
            f"{int(self.settled.sum())} of {len(self.settled)} samples have a fixed point by this or a solver below.",
        ]

    def _table(self) -> list[str]:
        lines = [f"{'':12}" + "".join(f"{tol:>9.0e}" for tol in TOLERANCES) + "    |f(z)| first, longest, last"]
        for run in self.runs:
            needed = "".join(f"{'-' if run.needs[tol] is None else run.needs[tol]:>9}" for tol in TOLERANCES)
            lengths = ", ".join(f"{each:.2g}" for each in (run.length[0], max(run.length), run.length[-1]))
            lines.append(f"{type(run.solver).__name__:12}{needed}    {lengths}")
        return lines

    def _contraction(self) -> list[str]:
        any_settled = bool(self.settled.any())
        where = "at z*" if any_settled else "at the best iterate, which is not a fixed point"
        rows = self.settled if any_settled else slice(None)
        radius, norm = self.radius[rows], self.norm[rows]
        plain = next(run for run in self.runs if isinstance(run.solver, Picard))
        failed = any_settled and largest(radius) < 1 and all(needed is None for needed in plain.needs.values())
        but = f", but not within {len(plain.residual)} evaluations from z0" if failed else ""
        return [
            f"Spectral radius of the Jacobian {where}: {_spread(radius)}. Below 1 plain iteration converges from "
            f"near z*{but}.",
            f"Its norm: {_spread(norm)}. Below 1 each step comes nearer, and the errors below have a bound.",
        ]

    def _collapse(self) -> list[str]:
        step = f"Distance of f(z) from a random z: {_spread(self.step)}. Near 0 the cell is the identity."
        if not bool(self.settled.any()):
            return [step]
        answers = int((~self.spread.isnan()).sum())
        return [
            f"Distance of z* from z0: {_spread(self.moved)}.",
            step,
            f"Distance of z* from answers of other solvers and from random starts: {_spread(self.spread)}. Near 0 "
            f"there is one fixed point. {answers} of {self.spread.numel()} of these answers have converged.",
            f"Distance of z* between samples: {_spread(self.dependence)}. Near 0 the cell ignores x.",
        ]

    def _gradients(self) -> list[str]:
        if not self.gradients:
            return ["Not measured without a fixed point."]
        lines = [f"{'':36}" + "".join(f"{title:>12}" for title in ("median", "largest", "estimated"))]
        for name, gradient in self.gradients.items():
            numbers = median(gradient.measured), largest(gradient.measured), median(gradient.estimated)
            lines.append(f"{name:36}" + "".join(f"{number:>12.2g}" for number in numbers))
        return lines

    def _cell(self) -> list[str]:
        change, alone = ("not measured" if value is None else f"{value:.1g}" for value in (self.difference, self.alone))
        return [
            f"Distance of two values at one state: {change}. More than 0 is randomness.",
            f"Distance of a sample's value from that without the others: {alone}. More than rounding couples them.",
            f"Typical size of the numbers of z: {rounded(self.sizes)}.",
        ]

    def figure(self) -> Any:
        """Matplotlib figure of the trials' residuals and lengths, and of the gradients' errors if they were measured.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure = matplotlib_figure("Diagnosis.figure", 11, 3.4)
        residual, length, *gradient = figure.subplots(1, 3 if self.gradients else 2)
        for run in self.runs:
            steps = range(1, len(run.residual) + 1)
            residual.semilogy(steps, run.residual, label=type(run.solver).__name__)
            length.semilogy(steps, run.length)
        residual.legend(fontsize="small")
        residual.set(xlabel="evaluation", ylabel="relative residual, worst sample")
        length.set(xlabel="evaluation", ylabel="|f(z)|, longest sample")
        low, high = length.get_ylim()
        length.set_ylim(low / 2, 2 * high)  # without this, rounding would fill the axis
        if gradient:
            self._show_errors(*gradient)
        return figure

    def _show_errors(self, axes: Any) -> None:
        heights = {kind: [median(getattr(gradient, kind)) for gradient in self.gradients.values()] for kind in _KINDS}
        for shift, (kind, errors) in zip((-0.2, 0.2), heights.items(), strict=True):
            axes.bar([i + shift for i in range(len(errors))], errors, 0.4, label=kind)
        names = [name.partition("(")[0] for name in self.gradients]
        axes.set(xticks=range(len(names)), xticklabels=names, ylabel="relative error of the gradient, median")
        if any(height > 0 for errors in heights.values() for height in errors):
            axes.set_yscale("log")
            axes.legend(fontsize="small")


def _wrapped(text: str, bullet: str = "  ") -> list[str]:
    wrap = textwrap.wrap(text, _WIDTH, initial_indent=bullet, subsequent_indent="  ", drop_whitespace=True)
    return wrap if "   " not in text else [bullet + text]  # a line of a table stays unchanged


def _spread(numbers: Tensor) -> str:
    """Median and largest of the numbers that were measured."""
    if bool(numbers.isnan().all()):
        return "not measured"
    middle, most = f"{median(numbers):.2g}", f"{largest(numbers):.2g}"
    return middle if middle == most else f"median {middle}, largest {most}"


def _plain(value: Any) -> Any:
    """Value in a form that JSON takes."""
    if isinstance(value, (Solver, Adjoint)):
        return repr(value)
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {f"{key:g}" if isinstance(key, float) else str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)

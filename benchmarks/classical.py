"""Solvers on 23 classical systems of equations: the evaluations that each needs, or why it fails.

    python benchmarks/classical.py [--out FILE] [--only WORD] [--solver WORD]

Prints a Markdown table of ``SOLVERS`` and the solvers of torchdeq and scipy, with an absolute tolerance of 1e-8 and at
most 1,000 evaluations. F(x) = 0 is solved as the fixed point of z + F(z) and of z - F(z), and the better result counts.
harness/classical.py says where the systems come from.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness.classical import EQUATIONS, Classical, Map
from harness.peers import torchdeq_method
from harness.races import finite
from harness.record import Row, write_record
from harness.tables import Table
from torch import Tensor

import deqfast

ROOT = 1e-4  # largest |F_i| of a root
TOL, MOST = 1e-8, 1000

# Name -> a solver from (rtol, max_iter, atol=...). Each entry is a column.
SOLVERS: dict[str, Callable[..., Any]] = {
    "Picard": deqfast.Picard,
    "Picard 0.1": partial(deqfast.Picard, relaxation=0.1),
    "Anderson": deqfast.Anderson,
    "Anderson 0.1": partial(deqfast.Anderson, relaxation=0.1),
    "Anderson 0.5": partial(deqfast.Anderson, relaxation=0.5),
    "Broyden": deqfast.Broyden,
    "Broyden 0.1": partial(deqfast.Broyden, relaxation=0.1, history_size=50),
    "Auto": deqfast.Auto,
}
Answer = tuple[Tensor, str, int]  # value (1, n), status, evaluations
Attempt = Callable[[Map, Tensor], Answer]  # (f, z0)


class Exhausted(Exception):
    """Raised when f was called the allowed number of times."""


@dataclass
class Counted:
    """f, which counts its calls and keeps the argument of least |f(z) - z|."""

    f: Map
    best: Tensor
    calls: int = 0
    least: float = math.inf

    def __call__(self, z: Tensor) -> Tensor:
        if self.calls == MOST:
            raise Exhausted
        self.calls += 1
        value = self.f(z)
        if (gap := float((value - z).norm())) < self.least:
            self.least, self.best = gap, z.clone()
        return value


def by_deqfast(make: Callable[..., Any]) -> Attempt:
    def attempt(f: Map, z0: Tensor) -> Answer:
        solution = deqfast.solve(f, z0, make(0.0, MOST, atol=TOL))
        return solution.value, deqfast.Status(int(solution.status)).name, int(solution.iterations)

    return attempt


def by_torchdeq(kind: Callable[..., Any]) -> Attempt:
    def attempt(f: Map, z0: Tensor) -> Answer:
        run, max_iter = torchdeq_method(kind(0.0, MOST, atol=TOL))
        counted = Counted(f, z0)
        run.keywords.pop("LBFGS_thres", None)  # its default keeps all pairs
        try:
            value, _, info = run(counted, z0, max_iter=max_iter, tol=TOL, stop_mode="abs")
            status = "CONVERGED" if info["abs_lowest"].item() < TOL else "MAX_ITER"
        except (Exhausted, RuntimeError):  # the latter for a singular matrix
            value, status = counted.best, "ERROR"
        return value, status, counted.calls

    return attempt


def by_scipy(method: str) -> Attempt:
    """Attempt by scipy.optimize.root; its best argument if it gives up."""
    from scipy.optimize import root

    def attempt(f: Map, z0: Tensor) -> Answer:
        counted = Counted(f, z0)

        def gap(x: Any) -> Any:
            z = torch.from_numpy(x)[None]
            return (counted(z) - z)[0].numpy()

        options = {"xtol": TOL, "maxfev": MOST} if method == "hybr" else {"fatol": TOL, "maxiter": MOST}
        try:
            with warnings.catch_warnings():  # ill-conditioned matrices, divisions by zero
                warnings.simplefilter("ignore")
                result = root(gap, z0[0].numpy(), method=method, options=options)
            value, status = torch.from_numpy(result.x).reshape(z0.shape), "CONVERGED" if result.success else "STOPPED"
        except Exhausted:
            value, status = counted.best, "MAX_ITER"
        except (ValueError, ArithmeticError):  # numbers that are not finite, a singular Jacobian
            value, status = counted.best, "ERROR"
        return value, status, counted.calls

    return attempt


def attempts() -> dict[str, Attempt]:
    """Columns of the table: ``SOLVERS`` and the installed peers."""
    columns = {name: by_deqfast(make) for name, make in SOLVERS.items()}
    if importlib.util.find_spec("torchdeq"):
        columns |= {f"torchdeq {kind.__name__}": by_torchdeq(kind) for kind in (deqfast.Broyden, deqfast.Anderson)}
    if importlib.util.find_spec("scipy"):
        columns |= {f"scipy {name}": by_scipy(name) for name in ("broyden1", "anderson", "hybr")}
    return columns


def solve_equations(problem: Classical, attempt: Attempt) -> Row:
    """The better result of both signs, and the false claims of both."""

    def outcome(sign: int) -> Row:
        value, status, evaluations = attempt(lambda z: z + sign * problem.map(z), problem.start[None])
        residual = float(problem.map(value).abs().max())
        missed = not residual <= ROOT
        row = {"sign": sign, "status": status, "evaluations": evaluations, "residual": finite(residual)}
        return row | {"missed": int(missed), "false": int(missed and status == "CONVERGED")}

    rows = [outcome(1), outcome(-1)]
    reached = [row for row in rows if not row["missed"]]
    best = min(reached or rows, key=lambda row: row["evaluations"] if reached else row["residual"] or math.inf)
    return best | {"false": sum(row["false"] for row in rows)}


def cell(row: Row) -> str:
    """Text of a cell: the evaluations, or why a problem is not solved."""
    if not row["missed"]:
        return str(row["evaluations"])
    return f"{row['status']}, false" if row["false"] else row["status"]


def table(rows: list[Row]) -> str:
    """Markdown table of problems and solvers, then the numbers of false claims and of solved problems."""
    lines: dict[str, dict[str, str]] = {}
    false, missed = Counter[str](), Counter[str]()
    for row in rows:
        lines.setdefault(row["case"], {"problem": row["case"]})[row["provider"]] = cell(row)
        false[row["provider"]] += row["false"]
        missed[row["provider"]] += row["missed"]
    claims = {"problem": "falsely CONVERGED"} | {name: str(count) for name, count in false.items()}
    solved = {"problem": f"solved, of {len(lines)}"} | {name: str(len(lines) - missed[name]) for name in false}
    return "\n".join(Table("", [*lines.values(), claims, solved]).lines())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON of all rows, with machine and commit")
    parser.add_argument("--only", default="", metavar="WORD", help="problems with this in their name")
    parser.add_argument("--solver", default="", metavar="WORD", help="solvers with this in their name")
    options = parser.parse_args()
    if options.out and not options.out.resolve().parent.is_dir():
        parser.error(f"{options.out.resolve().parent} is not a folder")
    torch.set_num_threads(1)
    solvers = {name: attempt for name, attempt in attempts().items() if options.solver in name}
    rows: list[Row] = []
    for number, problem in enumerate(EQUATIONS, 1):
        for name, attempt in solvers.items() if options.only in problem.name else ():
            print(f"{problem.name}, {name}", file=sys.stderr)
            about = {"section": "classical", "case": f"{number} {problem.name}", "provider": name}
            rows.append(about | solve_equations(problem, attempt))
    if rows:
        print(table(rows))
    if options.out:
        write_record(options.out, rows)
    return 0 if rows else 2


if __name__ == "__main__":
    sys.exit(main())

"""benchmarks/RESULTS.md: every section says what is measured, or that nothing is and which command would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from .files import File, Results, Row
from .pictures import FIGURES, drawn
from .sources import sources
from .study import COMMAND as STUDY_COMMAND
from .study import share_table, step_table
from .tables import Case, cases_of, comparison, counts, folded, long_table, provider_text
from .verdicts import summary, target_table
from .words import link, listed, plural, table

SUITE = "pytest benchmarks --record benchmarks/results/suite_cpu_2.json"
STANDARD = (128, 8192)  # batch and state size of the headline


@dataclass(frozen=True)
class Part:
    """A section made from rows: `names`: what their `section` may be; `key`: the time compared."""

    title: str
    names: tuple[str, ...]
    words: str
    key: str
    figures: tuple[str, ...] = ()


PARTS = (
    Part(
        "Whole solves",
        ("solve",),
        "The whole call, f included, median of the rounds; the same f, number of iterations and start for all.",
        "ms",
    ),
    Part(
        "Operations",
        ("op",),
        "Every kernel by itself, beside the same in plain torch.",
        "ms",
    ),
    Part(
        "Training steps",
        ("training",),
        "Forward and backward of one layer, beside torchdeq's and beside a layer that solves nothing.",
        "ms",
    ),
    Part(
        "A fully connected cell in one launch",
        ("fc",),
        "The whole solve of z = tanh(W z + c) by `deqfast.fc_fixed_point`, beside loops over f.",
        "ms",
    ),
    Part(
        "Neural collapse",
        ("neural collapse",),
        "NC1 to NC4 through the span of the class means, beside the D × D pseudo-inverse.",
        "ms",
    ),
)


def absent(what: str, command: str) -> list[str]:
    return [f"Not measured yet: {what}. `{command}` measures it."]


def page(results: Results) -> str:
    """The whole page."""
    sections: list[tuple[str, Callable[[Results], list[str]]]] = [
        ("In short", summary),
        ("What was measured, and where", sources),
        ("Targets", target_table),
        ("Solver time per iteration", solver_section),
        *((part.title, lambda found, part=part: rows_section(found, part)) for part in PARTS),
        ("A training step of the study", study_section),
        ("Time to a residual", residual_section),
        ("How cost grows", scaling_section),
        ("At the size of the internet: a model", internet_section),
        ("The regression gate", gate_section),
        ("On a GPU", gpu_section),
    ]
    lines = ["# Benchmark results", "", "Written by `python benchmarks/report.py` from the JSON in "
             f"{link('results', 'results')}; no number here is typed by hand."]  # fmt: skip
    for title, section in sections:
        lines += ["", f"## {title}", "", *section(results)]
    return "\n".join(lines) + "\n"

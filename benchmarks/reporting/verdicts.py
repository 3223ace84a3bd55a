"""The targets beside what was measured: met, missed, or not measured and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.targets import FLOP_TARGET, GPU_TARGETS, NC_TARGETS, TARGETS, UNITS, Target

from .files import File, Results
from .solvers import SECTION, solver_text
from .sources import ANCHOR
from .study import COMMAND as STUDY_COMMAND
from .study import size
from .tables import provider_text
from .words import Form, digits, duration, error, link, listed, missing, percent, plural, span, table, times

MET, MISSED, ABSENT, NO_GPU = "met", "missed", "not measured", "not measured: no GPU"
SUITE_COMMAND = "`pytest benchmarks --full`"
GPU_COMMAND = "`bash benchmarks/gpu.sh`"
GPU_UNITS = UNITS | {"us": " µs", "x": "×", "share": " %"}
# Column of a target -> how its numbers are written, and what they are.
COLUMNS: dict[str, tuple[Form, str]] = {
    "gain": (times, "gain over"),
    "floor_x": (times, "time over its byte floor"),
    "peak_bytes": (times, "memory over that of"),
    "error": (error, "relative error"),
    "ms": (duration, "time"),
}


@dataclass(frozen=True)
class Verdict:
    """One target; `bound` and `measured` as text, `state` starts with one of the four above.

    files: the names of those that tell; command: what would measure it where none does, as Markdown.
    """

    what: str
    bound: str
    measured: str
    state: str
    files: tuple[str, ...] = ()
    command: str = ""


def verdicts(results: Results) -> list[Verdict]:
    """Those of the suite, of the study's training step, and of GPUs."""
    return [*(judged(results, target) for target in TARGETS), *study_verdicts(results), *gpu_verdicts(results)]


def judged(results: Results, target: Target) -> Verdict:
    """By the runs on CPUs with the most threads that tell."""
    form, text = COLUMNS.get(target.column, (digits, target.column))
    against = f" {provider_text(target.against)}" if target.against else ""
    case = solver_text(target.case) if target.section == SECTION else target.case
    what = f"{case}, {provider_text(target.provider)}, {text}{against}"
    limit = duration(target.bound) if form is duration else f"{target.bound:g}{'×' if form is times else ''}"
    bound = f"{'at least' if target.at_least else 'at most'} {limit}"
    found = list(values_of(results, target))
    if not found:
        return Verdict(what, bound, "", ABSENT, command=SUITE_COMMAND)
    values, names = [value for _, value in found], dict.fromkeys(file.name for file, _ in found)
    state = state_of([bool(target.met(value)) for value in values])
    return Verdict(what, bound, measured_text(values, target.bound, form, state), state, tuple(names))


def values_of(results: Results, target: Target) -> list[tuple[File, float]]:
    """What each run with the most threads has measured."""
    told = [(file, target.value(rows)) for file in results.files if file.gpu is None for rows in file.repeats()]
    found = [(file, value) for file, value in told if value is not None]
    most = max((file.machine.get("threads") or 0 for file, _ in found), default=0)
    return [(file, value) for file, value in found if (file.machine.get("threads") or 0) == most]


def state_of(met: Sequence[bool]) -> str:
    """Of several runs, all of which have to meet the target."""
    missed = met.count(False)
    if not missed:
        return MET
    return MISSED if missed == len(met) else f"{MISSED} in {missed} of {len(met)} runs"


def measured_text(values: list[float], bound: float, form: Form, state: str) -> str:
    """What misses the bound by however little is told from it."""
    return span(values, form if state == MET else missing(bound, form))


def study_verdicts(results: Results) -> Iterator[Verdict]:
    step, share = "a DEQ's training step over the explicit one's, over the ratio of operations", "NC1-NC4 of an epoch"
    found = [(file, run) for file, run in results.runs() if run["device"] == "cpu"]
    limit, limit_of_share = f"at most {FLOP_TARGET:g}×", f"at most {100 * NC_TARGETS['cpu']:g} %"
    if not found:
        yield Verdict(step, limit, "", ABSENT, command=f"`{STUDY_COMMAND}`")
        yield Verdict(share, limit_of_share, "", ABSENT, command=f"`{STUDY_COMMAND}`")
    for file, run in found:
        met = state_of([run["over_flop"] <= FLOP_TARGET])
        measured = measured_text([run["over_flop"]], FLOP_TARGET, times, met)
        yield Verdict(f"{step}, {size(run)}", limit, measured, met, (file.name,))
        spent = run["metrics"]["nc_share"]
        met = state_of([spent <= NC_TARGETS["cpu"]])
        measured = measured_text([spent], NC_TARGETS["cpu"], percent, met)
        yield Verdict(f"{share}, {size(run)}", limit_of_share, measured, met, (file.name,))


def gpu_verdicts(results: Results) -> Iterator[Verdict]:
    """As gpu.sh has judged them; each by name where it has not."""
    judged = [(file, row, target) for file in results.gpus for row in file.rows for target in row.get("targets", [])]
    if not judged:
        state = ABSENT if results.gpus else NO_GPU
        yield from (
            Verdict(target.what, target.words("at least ", "at most ", GPU_UNITS), "", state, command=GPU_COMMAND)
            for target in GPU_TARGETS.values()
        )
    for file, row, target in judged:
        what = f"{file.gpu}, {row['section']}, {row['case']}, {provider_text(row['provider'])}"
        state = {True: MET, False: MISSED, None: ABSENT}[target["met"]]
        yield Verdict(what, target["target"], "", state, (file.name,))


def bound(case: str, column: str, against: str | None = None) -> float | None:
    """The target of a solve, for a figure."""
    wanted = (SECTION, case, column, against)
    return next((t.bound for t in TARGETS if (t.section, t.case, t.column, t.against) == wanted), None)


def counts_text(found: Sequence[Verdict]) -> str:
    """ "Of 5 targets, 3 are met, 1 is missed and 1 is not measured for want of a GPU."."""
    kinds = Counter(MISSED if verdict.state.startswith(MISSED) else verdict.state for verdict in found)
    endings = {MET: "met", MISSED: "missed", ABSENT: "not measured yet", NO_GPU: "not measured for want of a GPU"}
    parts = [
        f"{kinds[kind]} {'is' if kinds[kind] == 1 else 'are'} {text}" for kind, text in endings.items() if kinds[kind]
    ]
    return f"Of {plural(len(found), 'target')}, {listed(parts)}."


def summary(results: Results, page: str = "") -> list[str]:
    """How many targets are met, and every one that is missed."""
    found = verdicts(results)
    missed = [verdict for verdict in found if verdict.state.startswith(MISSED)]
    lines = [f"{counts_text(found)} {link('All targets', f'{page}#targets')}.{' Missed:' if missed else ''}"]
    if missed:
        lines += ["", *(f"- {missed_text(one)}" for one in missed)]
    return lines


def missed_text(verdict: Verdict) -> str:
    """ "Anderson, gain over torchdeq: 3.88× to 5.12×, target at least 4.5×, missed in 2 of 3 runs"."""
    parts = (verdict.measured, f"target {verdict.bound}", verdict.state)
    return f"{verdict.what}: {', '.join(filter(None, parts))}"


def target_section(results: Results) -> list[str]:
    header = ["what", "target", "measured", "", "files, or what would measure it"]
    body = [
        [one.what, one.bound, one.measured, one.state,
         ", ".join(link(name, f"results/{name}") for name in one.files) or one.command]
        for one in verdicts(results)
    ]  # fmt: skip
    words = (
        "Solves are those at (128, 8192) in fp32, by the runs on a CPU with the most threads; of several runs, all "
        "have to meet a target, and the least and the largest are given. The command of each file stands "
        f"{link('above', ANCHOR)}."
    )
    return [words, "", *table(header, body, text=header)]

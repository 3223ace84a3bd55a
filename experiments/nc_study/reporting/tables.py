"""Tables of the report: the paper's numbers with ours beside them, verdicts, and where the numbers come from."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..config import MODELS, Setting
from ..figures import LABELS
from ..paper import INCONSISTENT, PAPER, QUANTITIES, TABLES, on_cifar
from ..record import COLLAPSE, GROUPS, NetworkResult, Spread
from .document import Source, markdown_table
from .runs import Collection, Group, Run, Theory
from .verdicts import CONFIDENCE, SEEDS_NEEDED, Evidence, Judgement, paper_differences, show

NOT_RUN = "not run"
NOTHING = "–"


def facts(found: Collection) -> list[tuple[str, str]]:
    """Sum up the runs behind a report."""
    runs = [run for group in found.groups for run in group.finished]
    states = Counter(entry.state for entry in found.rejected)
    dates = sorted(run.result.finished for run in runs)

    def listed(of: Callable[[Run], str]) -> str:
        return "; ".join(dict.fromkeys(of(run) for run in runs)) or NOTHING

    return [
        ("finished runs", str(len(runs))),
        ("others", ", ".join(f"{count} {state}" for state, count in states.items()) or "none"),
        ("data", listed(lambda run: run.result.settings.dataset)),
        ("presets", listed(lambda run: run.result.settings.preset)),
        ("seeds", ", ".join(map(str, sorted({run.seed for run in runs}))) or NOTHING),
        ("machines", listed(_machine)),
        ("kernels", listed(lambda run: run.result.kernel.used)),
        (
            "versions",
            listed(lambda run: ", ".join(f"{name} {one}" for name, one in run.result.versions.items() if one)),
        ),
        ("commits", listed(lambda run: (run.result.commit or "unknown")[:12])),
        ("finished", " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else NOTHING),
    ]


def _machine(run: Run) -> str:
    machine = run.result.machine
    where = f"{machine.gpu}, {machine.cpu}" if machine.gpu else machine.cpu
    processes = f", {machine.processes} processes" if machine.processes > 1 else ""
    return f"{where}, {machine.threads} of {machine.cores} cores{processes}"


def name_of(setting: Setting) -> str:
    """Name a setting where its data are known."""
    return (
        "balanced" if setting.majority is None else f"({setting.majority},{10 - setting.majority}) R = {setting.ratio}"
    )


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper with our numbers beside the printed ones."""

    caption: str
    table: Source

    @property
    def marked(self) -> bool:
        """Whether an entry is marked as inconsistent."""
        return "†" in self.table


def paper_tables(group: Group) -> Iterator[PaperTable]:
    """Make tables 1 to 4 of the paper, as far as they are about as many classes, and one of other imbalances."""
    columns = [
        "setting",
        "network",
        "classes",
        "paper",
        "ours, over epochs",
        "ours, over seeds",
        "seeds",
        "ours - paper",
    ]
    known = set()
    for number, imbalances in TABLES.items():
        settings = [Setting(group.dataset, *imbalance) for imbalance in imbalances]
        known |= set(settings)
        rows = [row for setting in settings for row in _accuracy_rows(group, setting)]
        split = "balanced classes" if settings[0].majority is None else f"K_A = {settings[0].majority}"
        yield PaperTable(f"Table {number} of the paper, {split}", markdown_table(columns, rows))
    rows = [row for setting in group.settings if setting not in known for row in _accuracy_rows(group, setting)]
    if rows:
        yield PaperTable("Imbalances that are not in the paper", markdown_table(columns, rows))


def _accuracy_rows(group: Group, setting: Setting) -> list[list[str]]:
    """Make a row for each network and classes; one for each network where the setting was not run."""
    there, rows = on_cifar(setting), []
    for model in MODELS:
        runs = list(group.seeds(setting, model).values())
        for classes in GROUPS if setting.majority is not None and runs else GROUPS[:1]:
            printed = getattr(PAPER[there][model], classes) if there in PAPER else None
            mark = "†" if classes == "overall" and (there, model) in INCONSISTENT else ""
            shown = f"{printed}{mark}" if printed else NOTHING
            rows.append(
                [name_of(setting), LABELS[model], classes, shown, *_measured(group, runs, model, classes, printed)]
            )
    return rows


def _measured(group: Group, runs: list[Run], model: str, classes: str, printed: Spread | None) -> list[str]:
    """Show ours over epochs of the first seed, over seeds, the number of seeds, and the difference from the paper."""
    if not runs:
        return [NOT_RUN, NOT_RUN, "0", NOTHING]
    spreads = [getattr(run.result.networks[model].accuracy, classes) for run in runs]
    ours = Spread.of([spread.mean for spread in spreads])
    if printed is None:
        against = "no entry"
    elif group.drawn:
        against = "not comparable"
    else:
        against = f"{ours.mean - printed.mean:+.2f}{' ‡' if group.differences else ''}"
    over_seeds = str(ours) if len(runs) > 1 else f"{ours.mean:.2f}"
    return [f"{spreads[0]} (seed {runs[0].seed})", over_seeds, str(len(runs)), against]


def variation(group: Group) -> tuple[float, float, int] | None:
    """Compare deviations of overall accuracy over seeds and over epochs of a run: the means over the networks with more
    than one seed, and their number."""
    over_epochs, over_seeds = [], []
    for setting in group.settings:
        for model in MODELS:
            spreads = [network.accuracy.overall for network in group.networks(setting, model)]
            if len(spreads) > 1:
                over_epochs.append(statistics.fmean(spread.std for spread in spreads))
                over_seeds.append(statistics.stdev(spread.mean for spread in spreads))
    return (statistics.fmean(over_seeds), statistics.fmean(over_epochs), len(over_seeds)) if over_seeds else None


def verdict_table(group: Group, judgements: list[Judgement]) -> Source:
    """Make the table of the verdicts, with the numbers they rest on and the paper's own."""
    columns = ["claim of the paper", "verdict", "numbers", "the paper's own numbers", "source"]
    rows = [[one.claim.text, one.verdict, one.numbers, _paper_says(group, one), one.claim.source] for one in judgements]
    return markdown_table(columns, rows)


def _paper_says(group: Group, one: Judgement) -> str:
    found = [] if group.drawn else paper_differences(one.claim, group.dataset)
    if not found:
        return NOTHING
    higher = sum(value > 0 for value in found)
    return f"higher in {higher} of {len(found)}, {statistics.fmean(found):+.2f} points on average"


def evidence_table(judgements: list[Judgement]) -> Source | None:
    """Make the table of paired differences by setting; None without any."""
    level = f"{100 * CONFIDENCE:g} % interval"
    columns = [
        "quantity",
        "setting",
        "seeds",
        "mean of DEQ - explicit",
        level,
        "of each seed",
        "verdict",
    ]
    rows = [_evidence_row(entry) for one in judgements for entry in one.evidence]
    return markdown_table(columns, rows) if rows else None


def _evidence_row(entry: Evidence) -> list[str]:
    claim, found = entry.claim, entry.interval
    quantity = QUANTITIES[claim.quantity] + (" (DEQ / explicit)" if claim.expected == "alike" else "")
    bounds = f"{show(claim, found.low)} to {show(claim, found.high)}" if found else f"needs {SEEDS_NEEDED} seeds"
    each = ", ".join(f"{show(claim, value)} ({seed})" for seed, value in entry.differences.items())
    counted = str(len(entry.differences))
    return [quantity, name_of(entry.setting), counted, show(claim, entry.mean), bounds, each, entry.verdict]


def network_table(group: Group) -> Source:
    """Make the table of every network of every run: what came out at the end."""
    columns = ["setting", "seed", "network", *GROUPS, *(name.upper() for name in COLLAPSE)]
    columns += ["evaluations a sample", "converged %", "left out", "seconds of training"]
    runs = sorted(
        (group.settings.index(setting), seed, MODELS.index(model), run)
        for (setting, model, seed), run in group.runs.items()
    )
    rows = [
        [name_of(run.result.setting), str(seed), LABELS[MODELS[model]], *_outcome(run.result.networks[MODELS[model]])]
        for _, seed, model, run in runs
    ]
    return markdown_table(columns, rows)


def _outcome(network: NetworkResult) -> list[str]:
    solver, collapse = network.solver, [getattr(network.nc, name) for name in COLLAPSE]
    solved = [NOTHING] * 3
    if solver:
        numbers = (solver.iterations, ".1f"), (solver.converged, ".2%"), (solver.skipped, "d")
        solved = [NOTHING if value is None else format(value, how).rstrip("%") for value, how in numbers]
    return [
        *(str(getattr(network.accuracy, classes) or NOTHING) for classes in GROUPS),
        *("undefined" if value is None else f"{value:.4g}" for value in collapse),
        *solved,
        f"{network.seconds.train:.0f}",
    ]


def run_table(groups: list[Group]) -> Source:
    """Make the table of where the numbers of every run come from."""
    columns = ["run", "setting", "seed", "networks", "group", "images a class", "adjoint", "kernel", "seconds in all"]
    rows: list[list[str]] = []
    for group in groups:
        for run in group.finished:
            result = run.result
            counts = dict.fromkeys((result.train_images_per_class[0], result.train_images_per_class[-1]))
            rows.append(
                [
                    *(str(len(rows) + 1), name_of(result.setting), str(run.seed)),
                    *(", ".join(LABELS[model] for model in result.networks), group.name),
                    *(" and ".join(map(str, counts)), result.settings.adjoint, result.kernel.used),
                    *(f"{result.seconds:.0f}", (result.commit or "unknown")[:12], result.finished, str(run.path)),
                ]
            )
    return markdown_table([*columns, "commit", "finished", "folder"], rows)


def theory_table(theory: Theory) -> Source:
    """Count how often each claim came out how over the problems."""
    verdicts = list(dict.fromkeys(one.verdict for one in theory.claims))
    counts = Counter((one.claim, one.source, one.verdict) for one in theory.claims)
    names = dict.fromkeys((one.claim, one.source) for one in theory.claims)
    rows = [[claim, *(str(counts[claim, source, verdict]) for verdict in verdicts), source] for claim, source in names]
    return markdown_table(["claim", *verdicts, "source"], rows)

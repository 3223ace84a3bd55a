"""Tables of the report: the paper's numbers with ours beside them, every network, and where the numbers come from."""

from __future__ import annotations

from itertools import product

from ..config import MODELS, Setting
from ..figures import LABELS
from ..paper import CLAIMS, INCONSISTENT, PAPER, TABLES
from ..record import COLLAPSE, GROUPS, Number, Spread
from .runs import Group, Run
from .verdicts import judge

Row = dict[str, object]
NOTHING = "–"


def verdict_rows(group: Group) -> list[Row]:
    """Judge every claim of the paper, with the numbers that a verdict rests on."""
    return [
        {
            "claim of the paper": claim.text,
            "verdict": verdict,
            "numbers": numbers,
            "source": claim.source,
        }
        for claim, (verdict, numbers) in ((claim, judge(group, claim)) for claim in CLAIMS)
    ]


def result_rows(group: Group) -> list[Row]:
    """Tell of every network in every setting: accuracy over the last epochs beside the paper's, all else at the end,
    each over seeds."""
    return [_result(group, *key) for key in product(group.settings, MODELS) if key in group.runs]


def missing(group: Group) -> list[str]:
    """Name the settings of the paper's tables that were not run."""
    settings = [Setting(group.experiment.dataset, *one) for imbalances in TABLES.values() for one in imbalances]
    return [setting.imbalance for setting in settings if setting not in group.settings]


def _result(group: Group, setting: Setting, model: str) -> Row:
    networks = list(group.networks(setting, model).values())
    printed = None if group.drawn else PAPER.get(setting, {}).get(model)
    row: Row = {"setting, number of seeds": f"{setting.imbalance}, {len(networks)}", "network": LABELS[model]}
    for classes in GROUPS:
        paper = getattr(printed, classes, None)
        mark = "†" if classes == "overall" and (setting, model) in INCONSISTENT else ""
        row[classes] = over_seeds([one.quantity(classes) for one in networks])
        row[f"{classes}, paper"] = f"{paper}{mark}" if paper else NOTHING
    row |= {name.upper(): over_seeds([one.quantity(name) for one in networks]) for name in COLLAPSE}
    centred = ([one.quantity(f"{name}_centered") for one in networks] for name in ("nc2", "nc3"))
    row["NC2, NC3 centred"] = ", ".join(over_seeds(values).split("±")[0] for values in centred)
    solvers = [one.solver for one in networks if one.solver]
    row["evaluations a sample"] = over_seeds([one.iterations for one in solvers])
    shares = [one.converged for one in solvers]
    row["converged, %"] = over_seeds([None if share is None else 100 * share for share in shares])
    radii = [max(one.spectral_radius.values, default=None) for one in networks if one.spectral_radius]
    row["spectral radius of ∂f/∂z at z*, largest"] = over_seeds(radii)
    row["left out"] = str(sum(one.skipped for one in solvers)) if solvers else NOTHING
    return row


def over_seeds(values: list[Number]) -> str:
    """Show the mean of a number of each seed, with the deviation where there are several."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return NOTHING
    spread = Spread.of(known)
    return str(spread) if len(known) > 1 else f"{spread.mean:.2f}"


def provenance(run: Run) -> Row:
    """Tell where the numbers of a run come from."""
    result, machine = run.result, run.result.machine
    return {
        "folder": run.path,
        "kernel": result.kernel.used,
        "machine": f"{machine.gpu or machine.cpu}, {machine.processes} × {machine.threads} threads",
        "versions": ", ".join(f"{name} {one}" for name, one in result.versions.items() if one),
        "commit": (result.commit or "unknown")[:12],
        "finished": result.finished,
    }

"""Tables of the report: the paper's numbers with ours beside them, every network, and where the numbers come from."""

from __future__ import annotations

from ..config import MODELS, Setting
from ..figures import LABELS
from ..paper import CLAIMS, INCONSISTENT, PAPER, TABLES, on_cifar
from ..record import COLLAPSE, GROUPS, Number, Spread
from .runs import Group, Run
from .verdicts import judge, printed

Row = dict[str, object]
NOTHING = "–"


def verdict_rows(group: Group) -> list[Row]:
    """Judge every claim of the paper, with the numbers that a verdict rests on and the paper's own."""
    return [
        {
            "claim of the paper": claim.text,
            "verdict": verdict,
            "numbers": numbers,
            "the paper's own numbers": printed(claim, group.experiment.dataset),
            "source": claim.source,
        }
        for claim, (verdict, numbers) in ((claim, judge(group, claim)) for claim in CLAIMS)
    ]


def result_rows(group: Group) -> list[Row]:
    """Tell of every network in every setting, those of the paper's tables first: accuracy over the last epochs beside
    the paper's, all else at the end, each over seeds."""
    dataset = group.experiment.dataset
    settings = [Setting(dataset, *imbalance) for imbalances in TABLES.values() for imbalance in imbalances]
    settings += [setting for setting in group.settings if setting not in settings]
    return [_result(group, setting, model) for setting in settings for model in MODELS]


def _result(group: Group, setting: Setting, model: str) -> Row:
    networks = list(group.networks(setting, model).values())
    printed = PAPER.get(on_cifar(setting), {}).get(model)
    row: Row = {"setting, number of seeds": f"{setting.imbalance}, {len(networks) or 'not run'}"}
    row["network"] = LABELS[model]
    for classes in GROUPS:
        paper = getattr(printed, classes, None)
        mark = "†" if classes == "overall" and (on_cifar(setting), model) in INCONSISTENT else ""
        row[classes] = over_seeds([one.quantity(classes) for one in networks])
        row[f"{classes}, paper"] = f"{paper}{mark}" if paper else NOTHING
    overall = [one.accuracy.overall for one in networks]
    row["overall, one run over epochs"] = overall[0] if overall else NOTHING
    row["ours - paper"] = NOTHING
    if overall and printed and not group.drawn:
        apart = Spread.of([one.mean for one in overall]).mean - printed.overall.mean
        row["ours - paper"] = f"{apart:+.2f}{' ‡' if group.differences else ''}"
    row |= {name.upper(): over_seeds([one.quantity(name) for one in networks]) for name in COLLAPSE}
    centred = ([one.quantity(f"{name}_centered") for one in networks] for name in ("nc2", "nc3"))
    row["NC2, NC3 centred"] = ", ".join(over_seeds(values).split("±")[0] for values in centred)
    solvers = [one.solver for one in networks if one.solver]
    row["evaluations a sample"] = over_seeds([one.iterations for one in solvers])
    shares = [one.converged for one in solvers]
    row["converged, %"] = over_seeds([None if share is None else 100 * share for share in shares])
    row["left out"] = str(sum(one.skipped for one in solvers)) if solvers else NOTHING
    return row


def over_seeds(values: list[Number]) -> str:
    """Show the mean of a number of each seed, with the deviation where there are several."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return NOTHING
    spread = Spread.of(known)
    return str(spread) if len(known) > 1 else f"{spread.mean:.2f}"


def provenance(group: Group, run: Run) -> Row:
    """Tell where the numbers of a run come from."""
    result, machine = run.result, run.result.machine
    counts = dict.fromkeys((result.train_images_per_class[0], result.train_images_per_class[-1]))
    return {
        "folder": run.path,
        "group": group.name,
        "networks": ", ".join(LABELS[model] for model in result.networks),
        "images a class": " and ".join(map(str, counts)),
        "kernel": result.kernel.used,
        "seconds in all": f"{result.seconds:.0f}",
        "machine": f"{machine.gpu or machine.cpu}, {machine.processes} × {machine.threads} threads",
        "versions": ", ".join(f"{name} {one}" for name, one in result.versions.items() if one),
        "commit": (result.commit or "unknown")[:12],
        "finished": result.finished,
    }

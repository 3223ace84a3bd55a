"""Tables of the report: the paper's numbers with ours beside them, verdicts, and where the numbers come from."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator

from ..config import MODELS, Setting
from ..figures import LABELS
from ..paper import INCONSISTENT, PAPER, TABLES, on_cifar
from ..record import COLLAPSE, GROUPS, Spread
from .document import Source, markdown_table
from .runs import Collection, Group, Run, Theory
from .verdicts import Judgement, paper_differences

NOT_RUN = "not run"
NOTHING = "–"


def facts(found: Collection) -> Source:
    """Sum up the runs behind a report."""
    runs = [run for group in found.groups for run in group.finished]
    states = Counter(entry.state for entry in found.rejected)
    dates = sorted(run.result.finished for run in runs)

    def listed(of: Callable[[Run], str]) -> str:
        return "; ".join(dict.fromkeys(of(run) for run in runs)) or NOTHING

    def versions(run: Run) -> str:
        return ", ".join(f"{name} {one}" for name, one in run.result.versions.items() if one)

    known = {
        "finished runs": len(runs),
        "others": ", ".join(f"{count} {state}" for state, count in states.items()) or "none",
        "data": listed(lambda run: run.result.settings.dataset),
        "presets": listed(lambda run: run.result.settings.preset),
        "seeds": ", ".join(map(str, sorted({run.seed for run in runs}))) or NOTHING,
        "machines": listed(_machine),
        "kernels": listed(lambda run: run.result.kernel.used),
        "versions": listed(versions),
        "commits": listed(lambda run: (run.result.commit or "unknown")[:12]),
        "finished": " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else NOTHING,
    }
    return markdown_table([{"what": name, "which": value} for name, value in known.items()])


def _machine(run: Run) -> str:
    machine = run.result.machine
    where = f"{machine.gpu}, {machine.cpu}" if machine.gpu else machine.cpu
    processes = f", {machine.processes} processes" if machine.processes > 1 else ""
    return f"{where}, {machine.threads} of {machine.cores} cores{processes}"


def name_of(setting: Setting) -> str:
    """Name a setting where its data are known."""
    split = f"({setting.majority},{10 - (setting.majority or 0)}) R = {setting.ratio}"
    return "balanced" if setting.majority is None else split


def paper_tables(group: Group) -> Iterator[tuple[str, Source]]:
    """Make tables 1 to 4 of the paper, with a caption and our numbers beside the printed ones, and one of other
    imbalances."""
    captioned = {}
    for number, imbalances in TABLES.items():
        majority = imbalances[0][0]
        split = "balanced classes" if majority is None else f"K_A = {majority}"
        settings = [Setting(group.dataset, *imbalance) for imbalance in imbalances]
        captioned[f"Table {number} of the paper, {split}"] = settings
    known = [setting for settings in captioned.values() for setting in settings]
    captioned["Imbalances that are not in the paper"] = [one for one in group.settings if one not in known]
    for caption, settings in captioned.items():
        if settings:
            yield caption, markdown_table([row for setting in settings for row in _accuracy_rows(group, setting)])


def _accuracy_rows(group: Group, setting: Setting) -> Iterator[dict[str, object]]:
    """Make a row for each network and classes; one for each network where the setting was not run."""
    there = on_cifar(setting)
    for model in MODELS:
        runs = list(group.seeds(setting, model).values())
        for classes in GROUPS if setting.majority is not None and runs else GROUPS[:1]:
            printed = getattr(PAPER[there][model], classes) if there in PAPER else None
            mark = "†" if classes == "overall" and (there, model) in INCONSISTENT else ""
            spreads = [getattr(run.result.networks[model].accuracy, classes) for run in runs]
            ours = Spread.of([spread.mean for spread in spreads]) if runs else None
            yield {
                "setting": name_of(setting),
                "network": LABELS[model],
                "classes": classes,
                "paper": f"{printed}{mark}" if printed else NOTHING,
                "ours, over epochs": f"{spreads[0]} (seed {runs[0].seed})" if runs else NOT_RUN,
                "ours, over seeds": NOT_RUN if ours is None else str(ours) if len(runs) > 1 else f"{ours.mean:.2f}",
                "seeds": len(runs),
                "ours - paper": NOTHING if ours is None else _against(group, ours, printed),
            }


def _against(group: Group, ours: Spread, printed: Spread | None) -> str:
    if printed is None:
        return "no entry"
    return "not comparable" if group.drawn else f"{ours.mean - printed.mean:+.2f}{' ‡' if group.differences else ''}"


def variation(group: Group) -> dict[str, float]:
    """Compare deviations of overall accuracy over seeds and over epochs of a run: the means over the networks with more
    than one seed, and their number; empty without any."""
    networks = [group.networks(setting, model) for setting in group.settings for model in MODELS]
    spreads = [[network.accuracy.overall for network in seeds] for seeds in networks if len(seeds) > 1]
    if not spreads:
        return {}
    return {
        "over_seeds": statistics.fmean(statistics.stdev(one.mean for one in seeds) for seeds in spreads),
        "over_epochs": statistics.fmean(statistics.fmean(one.std for one in seeds) for seeds in spreads),
        "networks": len(spreads),
    }


def verdict_table(group: Group, judgements: list[Judgement]) -> Source:
    """Make the table of the verdicts, with the numbers they rest on and the paper's own."""

    def paper(one: Judgement) -> str:
        found = [] if group.drawn else paper_differences(one.claim, group.dataset)
        higher = f"higher in {sum(value > 0 for value in found)} of {len(found)}"
        return f"{higher}, {statistics.fmean(found):+.2f} points on average" if found else NOTHING

    return markdown_table(
        [
            {
                "claim of the paper": one.claim.text,
                "verdict": one.verdict,
                "numbers": one.numbers,
                "the paper's own numbers": paper(one),
                "source": one.claim.source,
            }
            for one in judgements
        ]
    )


def network_table(group: Group) -> Source:
    """Make the table of every network of every run: what came out at the end."""
    order = {key: (group.settings.index(key[0]), key[2], MODELS.index(key[1])) for key in group.runs}
    rows = []
    for setting, model, seed in sorted(order, key=order.__getitem__):
        network = group.runs[setting, model, seed].result.networks[model]
        collapse = {name.upper(): getattr(network.nc, name) for name in COLLAPSE}
        row: dict[str, object] = {"setting": name_of(setting), "seed": seed, "network": LABELS[model]}
        row |= {classes: getattr(network.accuracy, classes) or NOTHING for classes in GROUPS}
        row |= {name: "undefined" if value is None else f"{value:.4g}" for name, value in collapse.items()}
        row |= dict.fromkeys(("evaluations a sample", "converged %", "left out"), NOTHING)
        if network.solver:
            evaluations, converged = network.solver.iterations, network.solver.converged
            row["evaluations a sample"] = NOTHING if evaluations is None else f"{evaluations:.1f}"
            row["converged %"] = NOTHING if converged is None else f"{100 * converged:.2f}"
            row["left out"] = network.solver.skipped
        rows.append({**row, "seconds of training": f"{network.seconds.train:.0f}"})
    return markdown_table(rows)


def run_table(groups: list[Group]) -> Source:
    """Make the table of where the numbers of every run come from."""
    rows: list[dict[str, object]] = []
    for group in groups:
        for run in group.finished:
            result = run.result
            counts = dict.fromkeys((result.train_images_per_class[0], result.train_images_per_class[-1]))
            rows.append(
                {
                    "run": len(rows) + 1,
                    "setting": name_of(result.setting),
                    "seed": run.seed,
                    "networks": ", ".join(LABELS[model] for model in result.networks),
                    "group": group.name,
                    "images a class": " and ".join(map(str, counts)),
                    "kernel": result.kernel.used,
                    "seconds in all": f"{result.seconds:.0f}",
                    "commit": (result.commit or "unknown")[:12],
                    "finished": result.finished,
                    "folder": run.path,
                }
            )
    return markdown_table(rows)


def theory_table(theory: Theory) -> Source:
    """Count how often each claim came out how over the problems."""
    verdicts = dict.fromkeys(one.verdict for one in theory.claims)
    counts = Counter((one.claim, one.source, one.verdict) for one in theory.claims)
    names = dict.fromkeys((one.claim, one.source) for one in theory.claims)
    return markdown_table(
        [
            {"claim": claim, **{verdict: counts[claim, source, verdict] for verdict in verdicts}, "source": source}
            for claim, source in names
        ]
    )

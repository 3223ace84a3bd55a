"""The report on a set of runs: what was found, the paper's tables and figures with ours, other recipes, provenance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from runs.files import prepare_out, write_atomically
from runs.style import png

from ..figures import LABELS
from ..paper import PAPER, TABLES
from ..protocol import CLAIMS, PRECISION_POINTS, PRIMARY, RECIPE_B, TRIAL_SETTING, counts, tuning
from ..record import AVERAGED
from . import tables
from .document import TEMPLATES, Source, narrow, render, to_html
from .pictures import pictures
from .runs import Collection, Group, Run, collect, gpu_less_cpu
from .verdicts import ALPHA, OPEN, Part, answer, conclusions, parts, precision_check, progress, shown, verdicts

TITLE = "Deep equilibrium models through neural collapse: what was measured"
DEQ = "deq-implicit"
UNCLAIMED_PAIRS = (("explicit-norm", "explicit"), (DEQ, "explicit"), (DEQ, "explicit-norm"), (DEQ, "once"))
PART_TITLES = {
    "mechanism": "Why: eight arms in three settings",
    "settings": "All twenty settings, width 16",
    "size": "Width 64, five settings",
}
SOLVED = 0.95  # of the samples: with fewer an arm is not at a fixed point


def show(runs: list[Path], out: Path) -> int:
    """Write the report on the runs under some folders into `out`, and print what was found; 0."""
    collection = collect(runs)
    page = write(collection, out)
    for entry in collection.rejected:
        print(f"{entry.state}: {entry.folder} ({entry.reason})")
    print(*findings(collection.groups), sep="\n", end="\n\n")
    print(*(f"{group.name}, finished runs: {len(group.finished)}" for group in collection.groups), sep="\n", end="\n\n")
    print(f"report:   {page}\nmarkdown: {out / 'report.md'}\nfigures:  {out / 'figures'}")
    return 0


def write(collection: Collection, out: Path) -> Path:
    """Write report, appendix and provenance, each as Markdown and as a page, and figures/ into `out`; return the
    report's page. StudyError if nothing can be written."""
    prepare_out(out / "figures")
    made = [_part(group, out, f"other{number}-" if number else "") for number, group in enumerate(collection.groups)]
    values = facts(collection.groups) | {
        "findings": findings(collection.groups),
        "main": made[0] if made else None,
        "others": made[1:],
        "parts": [_registered(part) for part in parts(collection.groups)],
        "printed_rate": tables.printed_rate(collection.groups),
        "rejected": [vars(entry) for entry in collection.rejected],
        "chosen": list(tables.chosen_rows(tuning())) if any(group.first_recipe for group in collection.groups) else [],
        "runs": tables.provenance_rows(collection.groups),
    }
    for name in ("report", "appendix", "provenance"):
        text = narrow(render(TEMPLATES / f"{name}.md", source=Source, title=TITLE, averaged=AVERAGED, **values))
        write_atomically(out / f"{name}.md", text)
        write_atomically(out / f"{name}.html", to_html(TITLE, text.replace(".md)", ".html)"), out))
    return out / "report.html"


def findings(groups: Sequence[Group]) -> list[str]:
    """Say what was found, in a few paragraphs of Markdown."""
    text = render(TEMPLATES / "findings.md", **facts(groups))
    return [" ".join(part.split()).removeprefix("- ") for part in text.split("\n- ")]


def facts(groups: Sequence[Group]) -> dict[str, Any]:
    """Compute what the sentences of the report say."""
    main = next((group for group in groups if group.recipe_b), None)
    first = next((group for group in groups if group.first_recipe), None)
    judged, checked = verdicts(main), precision_check(groups)
    solves = solved([run for run in main.finished if counts(run.result.settings)] if main else [], DEQ)
    devices = [difference for _, difference in gpu_less_cpu(groups)]
    entries = [PAPER[block.setting] for block in PRIMARY]
    return {
        "progress": progress(main),
        "judged": judged,
        "claims": {judgement.claim.name: judgement for judgement in judged},
        "unadjusted": [
            judgement
            for judgement in judged
            if judgement.verdict == OPEN and judgement.estimate and judgement.estimate.p_different <= ALPHA
        ],
        "by_signs": sorted(
            (judgement for judgement in judged if judgement.signs <= ALPHA), key=lambda judgement: judgement.signs
        ),
        "pooled": tables.pooled_rows(main, UNCLAIMED_PAIRS) if judged and main else [],
        "recipe": _recipe_of_the_explicit_network(),
        "levels": (ALPHA, ALPHA / len(CLAIMS["recipe B"])),
        "conclusions": conclusions({judgement.claim.name: judgement.verdict for judgement in judged}) if judged else [],
        "obstacle": _obstacle(solves, checked),
        "by_setting": tables.difference_rows(main, [(DEQ, "explicit")]) if main else [],
        "gain": fmean(entry["deq"].overall.mean - entry["explicit"].overall.mean for entry in entries),
        "tuned": list(tables.same_values_rows(first, groups)) if first else [],
        "not_run": [
            setting for setting in PAPER if not (main and all(main.networks(setting, arm) for arm in ("explicit", DEQ)))
        ],
        "widest": max((group.experiment.width for group in groups), default=0),
        "rates": {group.experiment.lr for group in groups for _, arm in group.runs if arm == DEQ},
        "checked": checked,
        "points": PRECISION_POINTS,
        "devices": {"count": len(devices), "shown": shown("overall", [devices]), "all": [*map(abs, devices)]},
        "solved": {"main": solves, "jfb": solved(first.finished if first else [], "deq-jfb")},
        "printed": PAPER[TRIAL_SETTING]["explicit"].overall.mean,
    }


def _registered(part: Part) -> dict[str, Any]:
    """Values of a part of the last amendment for the template."""
    few = part.converged is not None and part.converged < SOLVED
    return {
        **vars(part),
        "title": PART_TITLES[part.name],
        "answer": answer(part) if part.name == "mechanism" and not few else "",
        "rows": list(tables.claim_rows(part.judged)),
        "obstacle": f"{100 * (part.converged or 0):.1f} % of the DEQ's solves converge" if few else "",
    }


def _recipe_of_the_explicit_network() -> dict[str, float | None]:
    """Return accuracies of the trials with recipe B, and the DEQ's best, if the explicit network's best is recipe B."""
    tuned = tuning()
    if tuned.chosen["explicit"] != RECIPE_B:
        return {}
    at = {trial.arm: trial.overall for trial in tuned.trials if trial.values == RECIPE_B}
    best = max(trial.overall for trial in tuned.trials if trial.arm == DEQ and trial.overall is not None)
    return {"explicit": at["explicit"], "deq": at[DEQ], "deq_best": best}


def solved(runs: Sequence[Run], arm: str) -> float | None:
    """Return the share of an arm's samples that reach the tolerance in the last epoch, on average over its runs."""
    networks = [run.result.network for run in runs if run.result.arm == arm]
    return fmean(network.curves["converged"][-1] or 0 for network in networks) if networks else None


def _obstacle(share: float | None, checked: dict[str, float]) -> str:
    """Say why the protocol draws no conclusion, if it does not."""
    if share is not None and share < SOLVED:
        return f"the DEQ is not at a fixed point: {100 * share:.1f} % of the samples reach the tolerance"
    if not checked:
        return "the check of the precision is not there"
    return "the check of the precision failed" if abs(checked["bf16"] - checked["fp32"]) > PRECISION_POINTS else ""


def _part(group: Group, out: Path, prefix: str) -> dict[str, Any]:
    """Make the tables of a group, and its figures under names that begin with the prefix."""
    pairs = [(arm, "explicit") for arm in LABELS]
    controls = [(DEQ, "once"), (DEQ, "explicit-norm")]
    differences = tables.difference_rows(group, [*pairs, *controls, ("deq-jfb", DEQ)])
    figures = {}
    for picture in pictures(group) if differences or not prefix else ():
        figures[picture.name] = {"title": picture.title, "path": f"figures/{prefix}{picture.name}.png"}
        write_atomically(out / figures[picture.name]["path"], png(picture.figure))
    broken = list(tables.broken_rows(group))
    return {
        "group": group,
        "verdicts": list(tables.verdict_rows(group, verdicts(group) if group.recipe_b else [])),
        "differences": differences,
        "deq": tables.difference_rows(group, [pair for pair in pairs if "deq" in pair[0]]),
        "controls": tables.difference_rows(group, controls),
        "arms": tables.arm_rows(group, tables.ALL),
        "short": tables.arm_rows(group, ("overall", "minority", "training", *tables.SHORT[2:])),
        "further": [{"recipe": group.recipe, **row} for row in tables.arm_rows(group, tables.FURTHER)],
        "solves": [row for row in tables.arm_rows(group, tables.SOLVES) if row["converged"] != tables.NOTHING],
        "geometry": list(tables.geometry_rows(group)),
        "papers": {} if group.drawn else {name: rows for name in TABLES if (rows := [*tables.paper_rows(group, name)])},
        "broken": broken,
        "training": sorted(run.result.network.curves["train_accuracy"][-1] or 0 for run in group.finished),
        "figures": figures,
    }

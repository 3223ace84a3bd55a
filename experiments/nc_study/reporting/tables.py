"""Tables of the report: arms, paired differences, verdicts, the paper's tables, geometry, and provenance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from ..config import Setting
from ..figures import LABELS
from ..paper import INCONSISTENT, PAPER, TABLES
from ..protocol import FRESH, GRID, PRIMARY, PRINTED, PRINTED_LEAST, TUNED, Claim, Tuning
from ..record import COLLAPSE, GROUPS, LATE, NetworkResult, Number, Spread
from .runs import Group, apart, identity
from .verdicts import NOTHING, Judgement, differences, shown

Row = dict[str, object]
QUANTITIES = {name: name for name in (*GROUPS, *LATE.values())} | {name.upper(): name for name in COLLAPSE}
QUANTITIES |= {"NC2 centred": "nc2_centered", "NC3 centred": "nc3_centered"}
"""Columns of tables, and the quantity that each shows."""
UNCLAIMED = ("minority", "NC1", "NC2", "NC2 centred", "NC3", "NC3 centred")
SHORT = ("overall", *UNCLAIMED)
CENTRED = ("NC2 centred", "NC3 centred")
ALL = ("overall", LATE["overall"], "majority", "minority", "training", *map(str.upper, COLLAPSE), *CENTRED)
FURTHER = ("overall", "minority", "training", "NC2 centred", "converged")
SOLVES = ("evaluations", "converged", "radius")
BROKEN = 1.5  # times the loss of the epoch before
NOT_RUN = "not run"
TARGETS = {"simplex": "simplex", "orthogonal": "orthogonal", "seli": "SELI"}


def over_seeds(values: Sequence[Number]) -> str:
    """Show the mean of a number of each seed, with the deviation if there are several."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return NOTHING
    return str(Spread.of(known)) if len(known) > 1 else f"{known[0]:.2f}"


def value(network: NetworkResult, column: str) -> Number:
    """Return what a column shows of a run, after its last epoch."""
    if column in QUANTITIES:
        return network.quantity(QUANTITIES[column])
    if column == "training":
        return network.curves["train_accuracy"][-1]
    if column == "radius":
        return max(network.spectral_radius.values, default=None) if network.spectral_radius else None
    if column == "evaluations":
        return network.solver.iterations if network.solver else None
    share = network.curves["converged"][-1] if network.solver else None
    return None if share is None else 100 * share


def arm_rows(group: Group, columns: Sequence[str]) -> list[Row]:
    """Show every arm in every setting over seeds, in columns that `value` knows."""
    rows: list[Row] = []
    for setting, arm in product(group.settings, LABELS):
        if networks := list(group.networks(setting, arm).values()):
            row: Row = {"setting": setting.imbalance, "arm": LABELS[arm], "seeds": len(networks)}
            rows.append(row | {name: over_seeds([value(network, name) for network in networks]) for name in columns})
    return rows


def difference_rows(group: Group, pairs: Sequence[tuple[str, str]], columns: Sequence[str] = SHORT) -> list[Row]:
    """Show how far an arm is from its control in every setting, paired by seed."""
    rows: list[Row] = []
    for setting, (arm, control) in product(group.settings, pairs):
        differences_of = {name: group.differences(setting, arm, control, QUANTITIES[name]) for name in columns}
        if arm != control and differences_of["overall"]:
            row: Row = {"setting": setting.imbalance, "arms": f"{LABELS[arm]} − {LABELS[control]}"}
            row["pairs"] = len(differences_of["overall"])
            rows.append(
                row | {name: shown(QUANTITIES[name], [list(seeds.values())]) for name, seeds in differences_of.items()}
            )
    return rows


def verdict_rows(group: Group, judged: Sequence[Judgement]) -> Iterator[Row]:
    """Show each verdict with the numbers that it rests on, and the same estimate of the fresh seeds."""
    for judgement in judged:
        claim, late = judgement.claim, replace(judgement.claim, quantity=LATE.get(judgement.claim.quantity, ""))
        fresh = differences(group, claim, [replace(PRIMARY[0], seeds=FRESH)])
        name = "overall" if late.quantity else "NC2 centred"
        contradicts = judgement.estimate is not None and sum(map(sum, fresh)) * judgement.estimate.mean < 0
        yield {
            "claim": f"{claim.name}: {name} {claim.expected} than {LABELS[claim.control]}",
            "verdict": judgement.verdict,
            "difference": judgement.shown,
            "p (Holm)": f"{judgement.p:.3f}",
            "sign test, p (Holm)": f"{judgement.signs:.3f}",
            "last epochs": shown("", differences(group, late, PRIMARY)) if late.quantity else NOTHING,
            "fresh seeds": shown(claim.quantity, fresh) + (", the other way" if contradicts else ""),
        }


def printed_rate(groups: Sequence[Group]) -> str:
    """Say whether the printed rate is the paper's, by the protocol's rule for its recipe at width 64."""
    block = PRINTED[0]
    for group in groups:
        experiment = group.experiment
        as_printed = experiment.preset == block.options["preset"] and not experiment.departures.keys() - {"precision"}
        for seed in block.seeds if as_printed and experiment.device == "cuda" else ():
            if network := group.networks(block.setting, *block.arms).get(seed):
                reached = network.accuracy.overall.mean
                word = "not " if reached < PRINTED_LEAST else ""
                return f"{reached:.2f} % on balanced classes: the printed rate is {word}the paper's."
    return "Not run: needs a GPU. No verdict."


def claim_rows(judged: Sequence[Judgement]) -> Iterator[Row]:
    """Show each verdict of a part of the last amendment."""
    for judgement in judged:
        claim = judgement.claim
        quantity = "slope of the gain in log10 R" if claim.quantity == "slope" else claim.quantity
        name = next((column for column, known in QUANTITIES.items() if known == quantity), quantity)
        yield {
            "claim": f"{claim.name}: {LABELS[claim.arm]}, {name} {claim.expected}, {LABELS[claim.control]}",
            "question": claim.source,
            "verdict": judgement.verdict,
            "difference": judgement.shown,
            "p (signs, Holm)": f"{judgement.p:.3f}",
        }


def pooled_rows(group: Group, pairs: Sequence[tuple[str, str]]) -> list[Row]:
    """Show how far each arm is from its control, over the settings of the claims, in quantities without a claim."""
    rows: list[Row] = []
    for arm, control in pairs:
        claims = {name: Claim("", arm, control, QUANTITIES[name], "", "") for name in UNCLAIMED}
        pooled = {name: shown(claim.quantity, differences(group, claim, PRIMARY)) for name, claim in claims.items()}
        rows.append({"arms": f"{LABELS[arm]} − {LABELS[control]}", **pooled})
    return rows


def paper_rows(group: Group, table: str) -> Iterator[Row]:
    """Yield one of the paper's Tables 1 to 4 in its own shape, with our number next to every number of the paper, of
    the settings that have a run.

    The paper's mean and deviation are over the last epochs of one run, ours over seeds.
    """
    for imbalance in TABLES[table]:
        setting = Setting(group.experiment.dataset, *imbalance)
        for quantity in GROUPS if setting.majority else GROUPS[:1]:
            row: Row = {"setting": setting.imbalance, "accuracy": quantity}
            for model, arm, name in (("explicit", "explicit", "explicit"), ("deq", "deq-implicit", "DEQ")):
                mark = "†" if quantity == "overall" and (setting, model) in INCONSISTENT else ""
                row[f"{name}, paper"] = f"{getattr(PAPER[setting][model], quantity)}{mark}"
                late = [network.quantity(LATE[quantity]) for network in group.networks(setting, arm).values()]
                row[f"{name}, ours"] = f"{over_seeds(late)} ({len(late)})" if late else NOT_RUN
            if {row["explicit, ours"], row["DEQ, ours"]} != {NOT_RUN}:
                yield row


def same_values_rows(first: Group, groups: Sequence[Group]) -> Iterator[Row]:
    """Show how far the first recipe's DEQ is from the explicit network as tuned, and from one with its own values; and
    what these values do to the explicit network: overall accuracy, paired by seed."""
    for setting, group in product(first.settings, groups):
        deq, tuned = (first.networks(setting, arm) for arm in ("deq-implicit", "explicit"))
        control = group.networks(setting, "explicit")
        arms = (first.runs.get((setting, "deq-implicit"), {}), group.runs.get((setting, "explicit"), {}))
        if (
            not group.tuned
            and deq
            and control
            and len({identity(run, False) for runs_of_arm in arms for run in runs_of_arm.values()}) == 1
        ):
            pairs = {"DEQ less explicit, as tuned": (deq, tuned)}
            pairs["explicit with the DEQ's values, less as tuned"] = (control, tuned)
            pairs["DEQ less explicit, same values"] = (deq, control)
            apart_by = {
                name: shown("overall", [list(apart(*pair, "overall").values())]) for name, pair in pairs.items()
            }
            minority = over_seeds([network.quantity("minority") for network in control.values()])
            yield {"setting": setting.imbalance, **apart_by, "explicit's minority accuracy then, %": minority}


def geometry_rows(group: Group) -> Iterator[Row]:
    """Yield the distances of class means and classifier from the optima that the class sizes predict.

    They are of the last epoch, for every arm in every imbalanced setting, over the seeds that saved their class means.
    """
    for setting, arm in product([setting for setting in group.settings if setting.majority], LABELS):
        runs = group.runs.get((setting, arm), {}).values()
        if seeds := [run.geometry for run in runs if run.geometry]:
            row: Row = {"setting": setting.imbalance, "arm": LABELS[arm], "seeds": len(seeds)}
            for part, (name, label) in product(("means", "classifier"), TARGETS.items()):
                row[f"{part}: {label}"] = over_seeds([getattr(getattr(network, part), name) for network in seeds])
            row["minority's cosine"] = over_seeds(
                [network.classifier and network.classifier.minority_cosine for network in seeds]
            )
            yield row


def chosen_rows(tuning: Tuning) -> Iterator[Row]:
    """Yield the values of every arm, and its best trial compared with its others.

    More than two rates were tried: a rate is marked if it is the grid's least or largest.
    """
    for arm, chosen in tuning.chosen.items():
        *others, best = sorted(
            trial.overall for trial in tuning.trials if trial.arm == arm and trial.overall is not None
        )
        row: Row = {"arm": LABELS[arm]}
        row |= {name: f"{chosen[option]:g}" for name, option in zip(("rate", "decay", "gain"), TUNED, strict=True)}
        row["rate"] = f"{row['rate']}{' (edge)' if chosen['lr'] in (GRID['lr'][0], GRID['lr'][-1]) else ''}"
        spread = f"{others[0]:.2f} to {others[-1]:.2f}" if others else NOTHING
        yield row | {"best trial, %": f"{best:.2f}", "other trials, %": spread}


def broken(network: NetworkResult) -> list[int]:
    """Return the places in the curves of the epochs in which the loss rose by more than half."""
    losses = [loss or 0 for loss in network.curves["loss"]]
    return [at for at, before in enumerate(losses[:-1], 1) if before and losses[at] > BROKEN * before]


def broken_rows(group: Group) -> Iterator[Row]:
    """Show the epochs in which a run's loss rose by more than half, with the share of solves that converged then."""
    for setting, arm in product(group.settings, LABELS):
        for seed, network in group.networks(setting, arm).items():
            for at in broken(network):
                row: Row = {
                    "setting": setting.imbalance,
                    "arm": LABELS[arm],
                    "seed": seed,
                    "epoch": network.curves["epoch"][at],
                }
                row["rate"] = f"{network.curves['lr'][at]:.3f}"
                for name in ("loss", "train_accuracy"):
                    row[name.replace("train_", "training ")] = " to ".join(
                        f"{network.curves[name][i]:.3g}" for i in (at - 1, at)
                    )
                share = network.curves["converged"][at] if network.solver else None
                yield row | {"converged, %": NOTHING if share is None else f"{100 * share:.1f}"}


def provenance_rows(groups: Sequence[Group]) -> list[Row]:
    """List where the numbers of each group come from: a row for each kernel, machine and set of versions."""
    by_origin: dict[tuple[str, ...], Counter[str]] = {}
    for group in groups:
        for result in (run.result for run in group.finished):
            used = result.machine
            machine = f"{used.gpu or used.cpu}, {used.processes} × {used.threads} threads"
            versions = ", ".join(f"{name} {number}" for name, number in result.versions.items() if number)
            commits = by_origin.setdefault((group.name, result.kernel.used, machine, versions), Counter())
            commits[(result.commit or "unknown")[:12]] += 1
    rows: list[Row] = []
    for key, commits in by_origin.items():
        row: Row = dict(zip(("group", "kernel", "machine", "versions"), key, strict=True))
        counted = ", ".join(f"{name} ({count})" for name, count in sorted(commits.items()))
        rows.append(row | {"runs": commits.total(), "commits (runs)": counted})
    return rows

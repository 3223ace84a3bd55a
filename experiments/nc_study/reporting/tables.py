"""Tables of the report: the paper's numbers with ours beside them, every network, and where the numbers come from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean

from ..config import Setting
from ..figures import ARMS
from ..paper import INCONSISTENT, PAPER, TABLES
from ..protocol import (
    CLAIMS,
    FRESH,
    GRID,
    PRECISION_CHECK,
    PRECISION_POINTS,
    PRIMARY,
    TRIAL_SETTING,
    TUNED,
    Block,
    Claim,
    Tuning,
)
from ..record import CENTRED, COLLAPSE, GROUPS, LATE, Number, Spread
from .runs import FIRST_RECIPE, Group, Run, gpu_less_cpu
from .verdicts import Estimate, conclusions, differences, estimate, precision_check, progress, ready, verdicts

QUANTITIES = {name: name for name in (*GROUPS, LATE["overall"], LATE["minority"])} | {
    "nc1": "NC1",
    "nc2_centered": "NC2 centred",
    "nc3_centered": "NC3 centred",
}
BROKEN = 1.5  # times the loss of the epoch before
CONTROLS = ("explicit-norm", "once")
CONTROLLED = (("deq-implicit", "once"), ("deq-implicit", "explicit-norm"), ("deq-jfb", "deq-implicit"))
SOLVED = 0.95  # of the samples: with fewer an arm is not at a fixed point
SHOWN = (*COLLAPSE, *CENTRED)
Row = dict[str, object]
NOTHING = "–"
NOT_RUN = "not run"
PAPERS_ARMS = {"explicit": ("explicit",), "deq": ("deq-implicit", "deq-jfb")}
OTHER_WAY = ", the other way"


def verdict_rows(group: Group) -> list[Row]:
    """Judge every claim of the protocol, with the numbers that a verdict rests on; nothing before there are any."""
    rows: list[Row] = []
    if not (group.recipe_b and ready(group)):
        return rows
    fresh = replace(PRIMARY[0], seeds=FRESH)
    for claim, (verdict, found) in zip(CLAIMS, verdicts(group, CLAIMS), strict=True):
        text = f"{ARMS[claim.arm][0]} against {ARMS[claim.control][0]}: {QUANTITIES[claim.quantity]} {claim.expected}"
        late, again = LATE.get(claim.quantity), _estimated(group, claim, [fresh])
        apart = _estimated(group, replace(claim, quantity=late), [*ready(group)]) if late else None
        contradicts = again and found and again.mean * found.mean < 0
        rows.append(
            {
                **{"": claim.name, "claim": text, "verdict": verdict, "difference": _shown(claim.quantity, found)},
                "last epochs": _shown(late or "", apart),
                "fresh seeds": _shown(claim.quantity, again) + (OTHER_WAY if contradicts else ""),
                "source": claim.source,
            }
        )
    return rows


def _estimated(group: Group, claim: Claim, blocks: Sequence[Block]) -> Estimate | None:
    """Estimate a claim's difference from some settings, if each has two pairs."""
    found = differences(group, claim, blocks)
    return estimate(found) if all(len(one) > 1 for one in found) else None


def _shown(quantity: str, found: Estimate | None) -> str:
    """Show an estimate and its interval, if there is one."""
    return shown_difference(quantity, found.mean, found.interval) if found else NOTHING


EVIDENCE = (
    "On average over these settings, its overall accuracy in points: {A1} against the explicit network, {A4} against "
    "the cell evaluated once, {A5} against the explicit block with the DEQ's normalisation.",
    "On average, its centred NC2: {N1}, {N3} and {N4} against the same three.",
)
"""What the report's first sentences rest on: differences with 95 % interval, and verdicts, by the name of the claim."""


def findings(groups: Sequence[Group]) -> list[str]:
    """Say what was found: by the protocol's verdicts, and before there are any, how far its runs are and what the
    finished ones give; then what those of the first recipe gave, and what the check of the precision came to."""
    main = next((group for group in groups if group.recipe_b), None)
    first = next((group for group in groups if group.first_recipe), None)
    (done, needed), checked = progress(main), precision_check(groups)
    rows = verdict_rows(main) if main else []
    unsolved = _unsolved(main, "recipe B", [block.setting for block in PRIMARY]) if main else {}
    if done < needed:
        said = [f"No verdict yet: {done} of the {needed} runs on which the protocol's verdicts rest are finished."]
    elif "deq-implicit" in unsolved or not checked or _apart(checked) > PRECISION_POINTS:
        failed = "with a check of the precision that failed" if checked else "without the check of the precision"
        cause = "not at a fixed point" if "deq-implicit" in unsolved else failed
        said = [f"No conclusion about the equilibrium: the DEQ with the implicit gradient is {cause}."]
    else:
        said = conclusions({str(row[""]): str(row["verdict"]) for row in rows})
    if main and rows:
        said += [f"Recipe B. {_by_setting(main)}", *_evidence(rows, done == needed), *unsolved.values()]
    if first and ready(first):
        said += [f"{_capital(FIRST_RECIPE)}, without a verdict. {_by_setting(first)}", *_of_rate_and_decay(first)]
        said += _unsolved(first, "the first recipe", first.settings).values()
    elif not rows:
        said += [sentence for group in groups[:1] if (sentence := _first_look(group))]
    return [*said, *([_precision(checked)] if checked else []), *_devices(groups)]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _evidence(rows: Sequence[Row], judged: bool) -> list[str]:
    """The differences behind the claims, with their verdicts if there are any, and the fresh seeds that contradict."""
    shown = {}
    for row in rows:
        other = "; the fresh seeds go the other way" if str(row["fresh seeds"]).endswith(OTHER_WAY) else ""
        shown[str(row[""])] = f"{row['difference']}" + (f" ({row['verdict']}{other})" if judged else "")
    return [sentence.format(**shown) for sentence in EVIDENCE]


def _by_setting(group: Group) -> str:
    """Say how far the DEQ with the implicit gradient is from the explicit network, setting by setting."""
    rows = {
        f"{block.setting.imbalance} ({seeds} seeds)": _difference(group, block.setting, "deq-implicit")
        for block, seeds in ready(group).items()
    }
    runs = broken(group, [block.setting for block in ready(group)], ["deq-implicit"])
    said = f" In training the loss rose by more than half within an epoch: {'; '.join(runs)}." if runs else ""
    shown = "; ".join(f"{name}: {row['overall']} and {row['NC2 centred']}" for name, row in rows.items())
    return (
        "The DEQ with the implicit gradient less the explicit network, in points of overall accuracy and in centred "
        f"NC2 (less is nearer to the ETF), with 95 % intervals: {shown}.{said}"
    )


def _of_rate_and_decay(group: Group) -> list[str]:
    """Say where both controls, too, have less than half of the explicit network's minority classes, if the trials gave
    all arms but that network a larger rate and weight decay."""

    def minority(setting: Setting, arm: str) -> float:
        return fmean(one.quantity("minority") or 0 for one in group.networks(setting, arm).values())

    chosen = {arm: one.result.settings for (_, arm), seeds in group.runs.items() for one in seeds.values()}
    explicit, others = chosen.get("explicit"), [one for arm, one in chosen.items() if arm != "explicit"]
    if explicit is None or any(o.lr <= explicit.lr or o.weight_decay <= explicit.weight_decay for o in others):
        return []
    lost = [
        block.setting
        for block in ready(group)
        if 2 * max(minority(block.setting, arm) for arm in CONTROLS) < minority(block.setting, "explicit")
    ]
    if not lost:
        return []
    where = " and ".join(one.imbalance for one in lost)
    arms = [arm for arm in ARMS if arm in chosen]
    shown = "; ".join(f"{ARMS[arm][0]} {fmean(minority(one, arm) for one in lost):.1f}" for arm in arms)
    return [
        f"At {where} both controls, which have no equilibrium, lose most of the minority classes too (accuracy in %: "
        f"{shown}). All arms but the explicit network have a larger rate and weight decay, which the trials at "
        f"{TRIAL_SETTING.imbalance} gave them: differences from it may be due to that. (Seen after the runs.)"
    ]


def _unsolved(group: Group, recipe: str, settings: Sequence[Setting]) -> dict[str, str]:
    """Say of which arms too few samples reach the tolerance at the end of training, on average over the runs."""
    said = {}
    for arm in ARMS:
        networks = [one for setting in settings for one in group.networks(setting, arm).values() if one.solver]
        shares = [one.curves["converged"][-1] or 0 for one in networks]
        if shares and fmean(shares) < SOLVED:
            said[arm] = (
                f"{ARMS[arm][0]} is not at a fixed point: in the last epoch {100 * fmean(shares):.1f} % of the samples "
                f"reach the tolerance, on average over all runs of {recipe} ({100 * min(shares):.1f} % in the "
                f"worst): what is compared is a cell unrolled by the solver. (Said of fewer than {100 * SOLVED:.0f} %.)"
            )
    return said


def _apart(checked: Mapping[str, float]) -> float:
    return abs(checked["bf16"] - checked["fp32"])


def _precision(checked: Mapping[str, float]) -> str:
    """Say what the check of the precision came to."""
    apart = _apart(checked)
    judged = "" if apart <= PRECISION_POINTS else ": all runs are to be made in float32"
    return (
        f"Check of the precision, {PRECISION_CHECK.setting.imbalance}, {len(PRECISION_CHECK.seeds)} seeds: overall, "
        "the DEQ with the implicit gradient less the explicit network is "
        f"{checked['bf16']:+.2f} points in bfloat16 and {checked['fp32']:+.2f} in float32, which is {apart:.2f} apart; "
        f"by the protocol at most {PRECISION_POINTS:g} is allowed{judged}."
    )


def _devices(groups: Sequence[Group]) -> list[str]:
    """Say how far the overall accuracies on a GPU are from the ones on a CPU, if three runs or more have both."""
    found = gpu_less_cpu(groups)
    if len(found) < 3:
        return []
    apart = [one for _, one in found]
    counted = Counter(ARMS[arm][0] for arm, _ in found)
    arms = "; ".join(f"{arm}: {count}" for arm, count in counted.items())
    shown = shown_difference("overall", fmean(apart), estimate([apart]).interval)
    return [
        f"Check of the device: {len(apart)} runs were made on a CPU and on a GPU, with different versions of torch "
        f"({arms}). The GPU's overall accuracy less the CPU's is {shown} points, and for one run at most "
        f"{max(map(abs, apart)):.2f}."
    ]


def _first_look(group: Group) -> str:
    """Say how far an arm is from the explicit network in the setting with most pairs; nothing without a pair."""
    pairs = {
        (setting, arm): len(group.differences(setting, arm, "explicit", "overall"))
        for setting, arm in product(group.settings, reversed(ARMS))
        if arm != "explicit"
    }
    setting, arm = max(pairs, key=lambda key: (pairs[key] * (key[1] == "deq-implicit"), pairs[key]), default=(None, ""))
    if setting is None or not (count := pairs[setting, arm]):
        return ""
    row = _difference(group, setting, arm)
    return (
        f"An estimate, no verdict ({group.name}): {row['arm']}, less the explicit network, at "
        f"{setting.imbalance}, paired by seed, {count} pair{'s'[: count - 1]}: "
        f"overall accuracy {row['overall']} points ({row[LATE['overall']]} over the last epochs), "
        f"centred NC2 {row['NC2 centred']}, centred NC3 {row['NC3 centred']}."
    )


def difference_rows(group: Group) -> list[Row]:
    """Tell of every arm, in every setting, how far it is from the explicit network."""
    return _differences(group, [(arm, "explicit") for arm in ARMS if arm != "explicit"])


def control_rows(group: Group) -> list[Row]:
    """Tell the same of other pairs: what the equilibrium brings, and what its gradient."""
    return _differences(group, CONTROLLED)


def _differences(group: Group, pairs: Sequence[tuple[str, str]]) -> list[Row]:
    rows = [_difference(group, setting, *pair) for setting, pair in product(group.settings, dict.fromkeys(pairs))]
    return [row for row in rows if any(row[name] != NOTHING for name in QUANTITIES.values())]


def _difference(group: Group, setting: Setting, arm: str, control: str = "explicit") -> Row:
    found = {name: list(group.differences(setting, arm, control, name).values()) for name in QUANTITIES}
    row: Row = {"setting, number of pairs": f"{setting.imbalance}, {len(found['overall'])}", "arm": ARMS[arm][0]}
    row |= {} if control == "explicit" else {"against": ARMS[control][0]}
    for name, values in found.items():
        interval = estimate([values]).interval if len(values) > 1 else None
        row[QUANTITIES[name]] = shown_difference(name, fmean(values), interval) if values else NOTHING
    return row


def shown_difference(quantity: str, mean: float, interval: tuple[float, float] | None) -> str:
    """Show a mean difference and its interval, of NC1 as a ratio."""
    form = "×{:.2f}" if quantity == "nc1" else "{:+.3f}" if quantity.startswith("nc") else "{:+.2f}"
    numbers = [form.format(math.exp(one) if quantity == "nc1" else one) for one in (mean, *(interval or ()))]
    return f"{numbers[0]} [{numbers[1]}, {numbers[2]}]" if interval else numbers[0]


def paper_rows(group: Group, table: str) -> list[Row]:
    """One of the paper's Tables 1 to 4 in its own shape, with ours next to every number: mean and deviation over the
    last epochs of the paper's run, over seeds of ours."""
    rows: list[Row] = []
    for imbalance in TABLES[table]:
        setting = Setting(group.experiment.dataset, *imbalance)
        for quantity in GROUPS if setting.majority else GROUPS[:1]:
            row: Row = {"setting": setting.imbalance, "accuracy, %": quantity}
            for model, arms in PAPERS_ARMS.items():
                mark = "†" if quantity == "overall" and (setting, model) in INCONSISTENT else ""
                row[f"{ARMS.get(model, ('DEQ',))[0]}, paper"] = f"{getattr(PAPER[setting][model], quantity)}{mark}"
                for arm in arms:
                    networks = group.networks(setting, arm).values()
                    late = [one.quantity(LATE[quantity]) for one in networks]
                    row[f"{ARMS[arm][0]}, ours"] = f"{over_seeds(late)} ({len(late)})" if late else NOT_RUN
            rows.append(row)
    return rows


def result_rows(group: Group) -> list[Row]:
    """Show every arm in every setting: its accuracy at the end, over seeds, and how its solves ended."""
    return [_result(group, *key) for key in product(group.settings, ARMS) if key in group.runs]


def collapse_rows(group: Group) -> list[Row]:
    """Show the neural collapse of the training images in the same way."""
    return [
        _row_of(group, setting, arm)
        | {QUANTITIES.get(name, name.upper()): over_seeds([one.quantity(name) for one in networks]) for name in SHOWN}
        for setting, arm in product(group.settings, ARMS)
        if (networks := list(group.networks(setting, arm).values()))
    ]


def chosen_rows(tuning: Tuning) -> list[Row]:
    """Tell which values every arm has, and how its best trial compares with its others; the rate, of which more than
    two were tried, is marked where it is the grid's least or largest."""
    rows: list[Row] = []
    for arm, chosen in tuning.chosen.items():
        at_edge = chosen["lr"] in (min(GRID["lr"]), max(GRID["lr"]))
        seen = sorted(one.overall for one in tuning.trials if one.arm == arm and one.overall is not None)
        rows.append(
            {
                "arm": ARMS[arm][0],
                **dict(zip(("rate", "weight decay", "gain"), (f"{chosen[name]:g}" for name in TUNED), strict=True)),
                "at the edge": "rate" if at_edge else NOTHING,
                "best trial, %": f"{seen[-1]:.2f}" if seen else NOTHING,
                "other trials, %": f"{seen[0]:.2f} to {seen[-2]:.2f}" if len(seen) > 1 else NOTHING,
            }
        )
    return rows


def broken(group: Group, settings: Sequence[Setting], arms: Iterable[str] = ARMS) -> list[str]:
    """Name the runs whose loss rose by more than half from one epoch to the next, with these epochs."""
    found = []
    for setting, arm in product(settings, arms):
        for seed, network in group.networks(setting, arm).items():
            epochs, losses = network.curves["epoch"], [loss or 0 for loss in network.curves["loss"]]
            steps = zip(epochs, losses, losses[1:], strict=False)
            if rises := [f"{epoch:g}" for epoch, before, after in steps if epoch and after > BROKEN * before]:
                found.append(f"{ARMS[arm][0]}, {setting.imbalance}, seed {seed} (after epoch {' and '.join(rises)})")
    return found


def _row_of(group: Group, setting: Setting, arm: str) -> Row:
    seeds = len(group.networks(setting, arm))
    return {"setting, number of seeds": f"{setting.imbalance}, {seeds}", "network": ARMS[arm][0]}


def _result(group: Group, setting: Setting, arm: str) -> Row:
    networks = list(group.networks(setting, arm).values())
    row = _row_of(group, setting, arm)
    for name in (GROUPS[0], LATE[GROUPS[0]], *GROUPS[1:]):
        row[QUANTITIES[name]] = over_seeds([one.quantity(name) for one in networks])
    row["training"] = over_seeds([one.curves["train_accuracy"][-1] for one in networks])
    solvers = [one.solver for one in networks if one.solver]
    row["evaluations a sample"] = over_seeds([one.iterations for one in solvers])
    shares = [one.curves["converged"][-1] for one in networks if one.solver]
    row["converged in the last epoch, %"] = over_seeds([None if share is None else 100 * share for share in shares])
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

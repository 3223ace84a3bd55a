"""Estimates and p-values compared with scipy's, and the verdicts that follow from them by experiments/protocol.md."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, product

import pytest
from nc_study import protocol
from nc_study.config import arm_options
from nc_study.protocol import B_ARMS, CLAIMS, PRIMARY, RECIPE_B
from nc_study.reporting.runs import collect, gpu_less_cpu
from nc_study.reporting.tables import findings, verdict_rows
from nc_study.reporting.verdicts import (
    CONTRADICTED,
    EQUAL,
    OPEN,
    SUPPORTED,
    Estimate,
    conclusions,
    estimate,
    holm,
    judge,
    precision_check,
    ready,
    verdicts,
)
from scipy import stats
from study_helpers import SOLVER

ONE, OTHER = [0.4, 1.1, -0.3, 2.0], [1.2, 0.1, 0.9]


def test_one_setting_is_a_paired_t_test_and_two_are_welchs():
    expected = stats.ttest_1samp(ONE, 0)
    found, interval = estimate([ONE]), expected.confidence_interval()
    assert found.p_different == pytest.approx(expected.pvalue)
    assert found.interval == pytest.approx((interval.low, interval.high))
    welch = stats.ttest_ind(ONE, [-value for value in OTHER], equal_var=False)
    found = estimate([ONE, OTHER])
    assert (found.freedom, found.p_different) == pytest.approx((welch.df, welch.pvalue))
    assert found.mean == pytest.approx((0.8 + 2.2 / 3) / 2), "settings count alike, however many seeds they have"
    sides = [stats.ttest_1samp(ONE, -2, alternative="greater"), stats.ttest_1samp(ONE, 2, alternative="less")]
    assert estimate([ONE]).p_equal(2) == pytest.approx(max(side.pvalue for side in sides))
    same = estimate([[0.5, 0.5], [0.5, 0.5]])
    assert (same.mean, same.error, same.p_different, same.p_equal(1), same.p_equal(0.1)) == (0.5, 0, 0, 0, 1)


def test_holm():
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert holm([0.9, 0.8]) == [1, 1] and holm([]) == []


@pytest.mark.parametrize(
    ("mean", "error", "p_different", "p_equal", "higher", "lower"),
    [
        (2.0, 0.3, 0.001, 0.99, SUPPORTED, CONTRADICTED),
        (-2.0, 0.3, 0.001, 0.99, CONTRADICTED, SUPPORTED),
        (0.4, 0.1, 0.01, 0.001, EQUAL, EQUAL),  # a difference, but too small to matter
        (0.4, 0.9, 0.7, 0.3, OPEN, OPEN),
    ],
)
def test_the_words(mean, error, p_different, p_equal, higher, lower):
    found = Estimate(mean, error, 20)
    assert [judge(one, found, p_different, p_equal) for one in ("higher", "lower")] == [higher, lower]


@pytest.fixture
def write(made_up, monkeypatch):
    """Write runs of the study preset, the shift and the options of each: all groups so far. No trial has chosen."""
    monkeypatch.setattr(protocol, "tuned", dict)
    monkeypatch.setattr("nc_study.reporting.tables.precision_check", lambda groups: {"bf16": 1.0, "fp32": 1.5})
    monkeypatch.setattr("study_helpers.SOLVER", replace(SOLVER, converged=0.955))
    names = count()

    def write(*runs):
        for shift, given in runs:
            options = {"preset": "study", "epochs": 30, "precision": "bf16", "device": "cuda", **given}
            path = made_up(f"run{next(names)}", shift, **options)
        return collect([path.parent]).groups

    return write


def of_b(arm, **given):
    return {**arm_options(arm), **RECIPE_B, **given}


@pytest.fixture
def primary(write, monkeypatch):
    """Write finished primary runs, two seeds per block, with an arm's DEQ ahead by a given shift; return their
    group."""
    blocks = tuple(replace(block, seeds=range(2)) for block in PRIMARY)
    for module in ("protocol", "reporting.verdicts", "reporting.tables"):
        monkeypatch.setattr(f"nc_study.{module}.PRIMARY", blocks)

    def finish(gain, without=0):
        runs = [(block.setting, seed, arm) for block in blocks for seed in range(2) for arm in block.arms]
        runs = [(gain(seed, arm), of_b(arm, seed=seed, **setting.options)) for setting, seed, arm in runs[without:]]
        (group,) = write(*runs)
        assert group.recipe_b and not group.tuned
        return group

    return finish


def verdict_of_each(group):
    return {claim.name: verdict for claim, (verdict, _) in zip(CLAIMS, verdicts(group, CLAIMS), strict=True)}


def test_verdicts_and_conclusions_of_all_primary_runs(primary, monkeypatch):
    group = primary(lambda seed, arm: 2 + seed / 5)
    said = findings([group])
    assert verdict_of_each(group) == dict.fromkeys(("A1", "A4", "A5", "N1", "N3", "N4"), SUPPORTED)
    # Three settings, each with the differences 2.0 and 2.2: standard error 0.0577, three degrees of freedom, t = 3.182.
    assert said[0].endswith("its normalisation: the equilibrium does it.") and len(said) == 6
    assert "(3,7) R = 10 (2 seeds): +2.10 [+0.83, +3.37] and -0.210 [-0.337, -0.083]; (3,7) R = 100 (2" in said[2]
    assert "in points: +2.10 [+1.92, +2.28] (supported) against the explicit network, +2.10" in said[3]
    assert "centred NC2: -0.210 [-0.228, -0.192] (supported), -0.210" in said[4]
    assert said[5].startswith("Check of the precision") and said[5].endswith(
        "0.50 apart; by the protocol at most 2 is allowed."
    )
    for checked, cause in (({}, "without the check of"), ({"bf16": 1.0, "fp32": 3.5}, "with a check of")):
        monkeypatch.setattr("nc_study.reporting.tables.precision_check", lambda groups, checked=checked: checked)
        said = findings([group])
        assert f"is {cause} the precision" in said[0] and len(said) == 4 + bool(checked)
    monkeypatch.setattr("nc_study.reporting.tables.SOLVED", 0.96)  # of the samples
    said = findings([group])
    assert said[0].startswith("No conclusion about the equilibrium") and "is not at a fixed point." in said[0]
    assert said[-2].startswith("DEQ, implicit is not at a fixed point: in the last epoch 95.5 % of the samples reach")


def test_the_conclusions_are_the_protocols():
    names = [claim.name for claim in CLAIMS]
    everything, nothing = dict.fromkeys(names, SUPPORTED), dict.fromkeys(names, OPEN)
    said = ["The DEQ with the implicit gradient classifies long-tailed images better than", "Its equilibrium brings"]
    assert [one[: len(start)] for one, start in zip(conclusions(everything), said, strict=True)] == said
    assert "not shown" in conclusions({**everything, "A4": OPEN, "A5": OPEN})[0], "what is open shows nothing"
    assert "not shown" in conclusions({**everything, "A4": EQUAL})[0], "one control by itself decides neither way"
    assert "The normalised ending makes" in conclusions({**everything, "A4": EQUAL, "A5": CONTRADICTED})[0]
    assert (
        all("not shown" in one for one in conclusions(nothing))
        and "not shown" in conclusions({**everything, "N4": EQUAL})[1]
    )
    assert conclusions(dict.fromkeys(names, "not yet: 3 of 120 runs")) == []


def test_no_verdict_before_the_last_primary_run(primary):
    """Estimates are of the settings that have two seeds of every arm; without one, there is a first look."""
    said = findings([primary(lambda seed, arm: 2 + seed / 5, without=17)])
    assert said[0].startswith("No verdict yet: 7 of the 24 runs") and "overall accuracy +2.20" in said[1]
    group = primary(lambda seed, arm: 2 + seed / 5, without=1)
    said = findings([group])
    assert set(verdict_of_each(group).values()) == {"not yet: 23 of 24 runs"}
    assert said[0] == "No verdict yet: 23 of the 24 runs on which the protocol's verdicts rest are finished."
    assert "(3,7) R = 100 (2 seeds): +2.10" in said[1] and "(3,7) R = 10 " not in said[1]
    # Two settings, each with the differences 2.0 and 2.2: standard error 0.071, two degrees of freedom, t = 4.303.
    assert "in points: +2.10 [+1.80, +2.40] against the explicit network" in said[2] and len(said) == 5


def test_fresh_seeds_that_go_the_other_way_are_told_with_the_verdict(write, monkeypatch):
    """Of six seeds at (3,7) R = 10 the first three lead by 5 and 6, and the fresh ones trail by 1 and 2."""
    monkeypatch.setattr("study_helpers.SOLVER", replace(SOLVER, converged=1.0))
    runs = [
        ((5 if seed < 3 else -2) + seed % 2, of_b(arm, seed=seed, **block.setting.options))
        for block in PRIMARY
        for seed, arm in product(block.seeds, B_ARMS)
    ]
    (group,) = write(*runs)
    (row, *_) = verdict_rows(group)
    # Differences -1, -2 and -1: deviation 0.577, t = 4.303.
    assert row["fresh seeds"] == "-1.33 [-2.77, +0.10], the other way" and row["difference"].startswith("+4.")
    assert findings([group])[3].count("(supported; the fresh seeds go the other way)") == 3


def test_a_setting_is_ready_when_the_arms_share_two_seeds(write):
    pairs = [pair for pair in product(B_ARMS, range(3)) if pair != ("deq-implicit", 0)]
    (group,) = write(*((1.0, of_b(arm, seed=seed)) for arm, seed in pairs))
    assert ready(group) == {PRIMARY[0]: 2}
    del group.runs[PRIMARY[0].setting, "once"][1]
    assert ready(group) == {}, "they share only seed 2"


@pytest.mark.parametrize(
    ("moved", "judged"),
    [
        (2.0, "2.00 apart; by the protocol at most 2 is allowed."),
        (-2.5, "2.50 apart; by the protocol at most 2 is allowed: all runs"),
    ],
)
def test_the_check_of_the_precision(write, monkeypatch, moved, judged):
    """Arms with their own rates are compared; half of the check decides nothing."""
    rates = {"explicit": 0.03, "deq-implicit": 0.3}
    monkeypatch.setattr(protocol, "tuned", lambda: {arm: {"lr": lr} for arm, lr in rates.items()})
    monkeypatch.setattr("nc_study.reporting.tables.precision_check", precision_check)
    *runs, last = [
        (
            1.0 + moved * (precision == "fp32") + seed,
            {**arm_options(arm), "lr": lr, "seed": seed, "precision": precision, "device": "cpu"},
        )
        for precision, seed, (arm, lr) in product(("bf16", "fp32"), range(2), rates.items())
    ]
    groups = write(*runs)
    assert precision_check(groups) == {} and not any("Check of" in one for one in findings(groups))
    groups = write(last)
    assert precision_check(groups) == pytest.approx({"bf16": 1.5, "fp32": 1.5 + moved})
    assert judged in findings(groups)[-1]


def test_recipes_and_devices_are_never_in_one_estimate(write, monkeypatch):
    """Runs of the explicit network that differ only in the device form two groups, and check the device."""
    first = {arm: {"lr": 0.03 if arm == "explicit" else 0.1, "scale": 1.0} for arm in protocol.ARMS}
    monkeypatch.setattr(protocol, "tuned", lambda: first)
    cpu = {"device": "cpu"}
    runs = [(1.0, {**arm_options(arm), **first[arm], "seed": seed, **cpu}) for seed, arm in product(range(2), first)]
    runs += [(1.0, of_b(arm, seed=seed)) for seed, arm in product((0, 1, 3), B_ARMS)]
    runs += [(3.0, of_b("deq-implicit", seed=3, **cpu)), (1.0, of_b("explicit", lr=0.1))]
    apart = ({"no_augmentation": True}, {"dataset": "cifar100"})
    runs += [(1.0, of_b(arm, **given)) for arm, given in product(B_ARMS, apart)]
    b, old, *others = groups = write(*runs)
    assert b.recipe_b and old.first_recipe and len(b.finished) == 12 and len(old.finished) == 10
    assert {len(group.finished) for group in others} == {1, 4} and len(others) == 4
    assert not any(group.recipe_b or group.tuned for group in others)
    setting = PRIMARY[0].setting
    for group, rate, seeds, device in ((old, 0.1, {0, 1}, "cpu"), (b, 0.03, {0, 1, 3}, "cuda")):
        assert set(group.differences(setting, "deq-implicit", "explicit", "overall")) == seeds
        settings = [run.result.settings for run in group.runs[setting, "deq-implicit"].values()]
        assert {(one.lr, one.device) for one in settings} == {(rate, device)}
    assert len({run.path for group in groups for run in group.finished}) == len(runs)
    # The explicit network under seeds 0 and 1 is equal on both devices, the DEQ under seed 3 is 2 points better here.
    assert sorted(gpu_less_cpu(groups)) == [("deq-implicit", -2.0), ("explicit", 0.0), ("explicit", 0.0)]
    (said,) = (one for one in findings(groups) if one.startswith("Check of the device: 3 runs"))
    assert said.endswith("less the CPU's is -0.67 [-3.54, +2.20] points, and for one run at most 2.00.")


def test_a_run_of_other_values_is_none_of_the_protocols(write, monkeypatch):
    monkeypatch.setattr(protocol, "tuned", lambda: {"deq-jfb": {"lr": 0.3}})
    changes = [{}, {"lr": 0.1}, {"precision": "fp32"}, {"dataset": "cifar100"}, {"metrics_every": 7}, {"seed": 3}]
    groups = write(*((1.0, {"lr": 0.3, "device": "cpu", **given}) for given in changes))
    tuned = [sorted(run.path.name for run in group.finished) for group in groups if group.tuned]
    assert sorted(tuned) == [["run0"], ["run2"]] and not any(group.recipe_b for group in groups)
    assert [group.first_recipe for group in groups] == [True] + [False] * (len(groups) - 1)

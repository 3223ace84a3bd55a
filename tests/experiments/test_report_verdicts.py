"""Estimates and p-values against scipy's, and the verdicts that follow from them as experiments/protocol.md says."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, product

import pytest
from nc_study import protocol
from nc_study.config import arm_options
from nc_study.protocol import CLAIMS, PRIMARY
from nc_study.reporting.runs import collect
from nc_study.reporting.tables import findings
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
    ("mean", "error", "p_different", "p_equal", "higher", "lower", "alike"),
    [
        (2.0, 0.3, 0.001, 0.99, SUPPORTED, CONTRADICTED, CONTRADICTED),
        (-2.0, 0.3, 0.001, 0.99, CONTRADICTED, SUPPORTED, CONTRADICTED),
        (1.2, 0.3, 0.01, 0.7, SUPPORTED, CONTRADICTED, OPEN),  # excludes equality but not the band
        (0.4, 0.1, 0.01, 0.001, EQUAL, EQUAL, SUPPORTED),  # a difference, but too small to matter
        (0.4, 0.9, 0.7, 0.3, OPEN, OPEN, OPEN),
    ],
)
def test_the_words(mean, error, p_different, p_equal, higher, lower, alike):
    words = [judge(one, Estimate(mean, error, 20), 1.0, p_different, p_equal) for one in ("higher", "lower", "alike")]
    assert words == [higher, lower, alike]


@pytest.fixture
def primary(made_up, monkeypatch):
    """Finished primary runs, two seeds a block, in which an arm's DEQ is ahead by so much: their group."""
    monkeypatch.setattr(protocol, "tuned", lambda: {arm: {"lr": 0.3} for arm in protocol.ARMS})
    blocks = tuple(replace(block, seeds=range(2)) for block in PRIMARY)
    for module in ("protocol", "reporting.verdicts"):
        monkeypatch.setattr(f"nc_study.{module}.PRIMARY", blocks)
    monkeypatch.setattr("nc_study.reporting.tables.precision_check", lambda groups: {"bf16": 1.0, "fp32": 1.5})
    monkeypatch.setattr("study_helpers.SOLVER", replace(SOLVER, converged=0.95))
    names = count()

    def write(gain, without=0):
        runs = [(block.setting, seed, arm) for block in blocks for seed in range(2) for arm in block.arms]
        for setting, seed, arm in runs[without:]:
            options = {**setting.options, **arm_options(arm), "seed": seed, "preset": "study", "epochs": 30, "lr": 0.3}
            path = made_up(f"run{next(names)}", gain(seed, arm), precision="bf16", **options)
        (group,) = collect([path.parent]).groups
        assert group.protocol
        return group

    return write


def verdict_of_each(group):
    return {claim.name: verdict for claim, (verdict, _) in zip(CLAIMS, verdicts(group, CLAIMS), strict=True)}


def test_verdicts_and_conclusions_of_all_primary_runs(primary, monkeypatch):
    group = primary(lambda seed, arm: 2 + seed / 5 - (arm == "deq-jfb"))
    said = findings([group])
    assert verdict_of_each(group) == {
        **dict.fromkeys(("A1", "A2", "A3", "A4", "A5", "A6", "N1", "N3", "N4"), SUPPORTED),
        **{"N2": EQUAL, "N5": SUPPORTED},
    }
    # Four settings, each with the differences 2.0 and 2.2: standard error 0.05, four degrees of freedom, t = 2.776.
    assert said[0].endswith("its normalisation: the equilibrium does it.") and len(said) == 7
    assert "(3,7) R = 10: +2.10 [+0.83, +3.37] and -0.210 [-0.337, -0.083]; (3,7) R = 100: +2.10" in said[2]
    assert "in points: +2.10 [+1.96, +2.24] (supported) against the explicit network, +2.10" in said[3]
    assert "centred NC2: -0.210 [-0.224, -0.196] (supported), -0.210" in said[4] and "NC1 ×1.00" in said[4]
    assert "is +1.10 [+0.96, +1.24] (supported) against the explicit network and -1.00" in said[5]
    assert said[6].startswith("Check of the precision") and said[6].endswith(
        "0.50 apart; by the protocol at most 2 is allowed."
    )
    for checked, cause in (({}, "without the check of"), ({"bf16": 1.0, "fp32": 3.5}, "with a check of")):
        monkeypatch.setattr("nc_study.reporting.tables.precision_check", lambda groups, checked=checked: checked)
        said = findings([group])
        assert f"is {cause} the precision" in said[0] and len(said) == 5 + bool(checked)
    monkeypatch.setattr("nc_study.reporting.tables.SOLVED", 0.96)  # of the samples
    said = findings([group])
    assert said[0].startswith("No conclusion about the equilibrium") and "is not at a fixed point." in said[0]
    assert said[-2].startswith("DEQ, implicit is not at a fixed point: in the last epoch 95.0 % of the samples reach")


def test_the_conclusions_are_the_protocols():
    names = [claim.name for claim in CLAIMS]
    everything, nothing = dict.fromkeys(names, SUPPORTED), dict.fromkeys(names, OPEN)
    said = ["The DEQ with the implicit gradient classifies long-tailed images better than", "Its equilibrium brings"]
    assert [one[: len(start)] for one, start in zip(conclusions(everything), said, strict=True)] == said
    assert "not shown" in conclusions({**everything, "A4": OPEN, "A5": OPEN})[0], "what is open shows nothing"
    assert "not shown" in conclusions({**everything, "A4": EQUAL})[0], "one control alone decides neither way"
    assert "The normalised ending makes" in conclusions({**everything, "A4": EQUAL, "A5": CONTRADICTED})[0]
    assert (
        all("not shown" in one for one in conclusions(nothing))
        and "not shown" in conclusions({**everything, "N4": EQUAL})[1]
    )
    assert conclusions(dict.fromkeys(names, "not yet: 3 of 120 runs")) == []


def test_no_verdict_before_the_last_primary_run(primary):
    """Estimates are of the settings that have two seeds of every arm; where none has, there is a first look."""
    group = primary(lambda seed, arm: 2 + seed / 5, without=1)
    said = findings([group])
    assert set(verdict_of_each(group).values()) == {"not yet: 39 of 40 runs"}
    assert said[0].startswith("No verdict yet: 39 of the 40 runs")
    assert said[0].endswith("(3,7) R = 100 (2 seeds); (5,5) R = 100 (2 seeds); (7,3) R = 10 (2 seeds).")
    # Three settings, each with the differences 2.0 and 2.2: standard error 0.058, three degrees of freedom, t = 3.182.
    assert "in points: +2.10 [+1.92, +2.28] against the explicit network" in said[2] and len(said) == 6


def test_a_setting_is_ready_when_the_arms_share_two_seeds(made_up, monkeypatch):
    monkeypatch.setattr(protocol, "tuned", lambda: {arm: {"lr": 0.3} for arm in protocol.ARMS})
    options = {"preset": "study", "epochs": 30, "lr": 0.3, "precision": "bf16"}
    for arm, seed in product(protocol.ARMS, range(3)):
        if (arm, seed) != ("deq-jfb", 0):
            path = made_up(f"{arm}{seed}", seed=seed, **{**options, **arm_options(arm)})
    (group,) = collect([path.parent]).groups
    assert ready(group) == {PRIMARY[0]: 2}
    (path.parent / "once1" / "result.json").unlink()
    (group,) = collect([path.parent]).groups
    assert ready(group) == {}, "they share seed 2 alone"


def test_a_first_look_before_any_setting_is_ready(primary):
    said = findings([primary(lambda seed, arm: 2.0, without=31)])
    assert said[0].startswith("No verdict yet: 9 of the 40 runs") and "overall accuracy +2.00" in said[1]


@pytest.mark.parametrize(
    ("moved", "judged"),
    [
        (2.0, "2.00 apart; by the protocol at most 2 is allowed."),
        (-2.5, "2.50 apart; by the protocol at most 2 is allowed: all runs"),
    ],
)
def test_the_check_of_the_precision(made_up, monkeypatch, moved, judged):
    """Arms with rates of their own are compared; half of the check says nothing."""
    rates = {"explicit": 0.03, "deq-implicit": 0.3}
    monkeypatch.setattr(protocol, "tuned", lambda: {arm: {"lr": lr} for arm, lr in rates.items()})
    options = {"preset": "study", "epochs": 30}
    for precision, seed, (arm, lr) in product(("bf16", "fp32"), range(2), rates.items()):
        given = {**options, **arm_options(arm), "lr": lr, "seed": seed, "precision": precision}
        shift = 1.0 + moved * (precision == "fp32") + seed
        path = made_up(f"{arm}{seed}{precision}", shift, **given)
    groups = collect([path.parent]).groups
    assert precision_check(groups) == pytest.approx({"bf16": 1.5, "fp32": 1.5 + moved})
    assert judged in findings(groups)[-1]
    (path / "result.json").unlink()
    groups = collect([path.parent]).groups
    assert precision_check(groups) == {} and not any("Check of" in one for one in findings(groups))


def test_a_run_of_other_values_than_those_chosen_is_none_of_the_protocols(made_up, monkeypatch):
    monkeypatch.setattr(protocol, "tuned", lambda: {"deq-jfb": {"lr": 0.3}})
    for name, given in {
        "a": {},
        "b": {"lr": 0.1},
        "c": {"precision": "fp32"},
        "d": {"dataset": "cifar100"},
        "e": {"metrics_every": 7},
    }.items():
        options = {"preset": "study", "epochs": 30, "lr": 0.3, "precision": "bf16", **given}
        root = made_up(name, **options).parent
    groups = collect([root]).groups
    assert [group.protocol for group in groups] == [True, False, False, False, False]

"""Estimates and p-values compared with scipy's, and the verdicts that follow from them by experiments/protocol.md."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import count, product

import numpy as np
import pytest
from nc_study import protocol
from nc_study.config import arm_options
from nc_study.protocol import B_ARMS, CLAIMS, PRIMARY, RECIPE_B, Rate, Rates
from nc_study.reporting import power
from nc_study.reporting.report import SOLVED, facts, findings
from nc_study.reporting.runs import collect, gpu_less_cpu
from nc_study.reporting.tables import printed_rate, same_values_rows
from nc_study.reporting.verdicts import (
    CONTRADICTED,
    EQUAL,
    OPEN,
    SUPPORTED,
    Judgement,
    Part,
    answer,
    judge,
    parts,
    shown,
    verdicts,
)
from nc_study.rundir import RunDirectory
from runs.paired import POWER, Estimate, estimate, holm, sign_flip
from scipy import stats
from study_helpers import SOLVER, made_up_epoch, made_up_result, made_up_settings

JUDGED = ("mechanism", "settings", "size")
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
    monkeypatch.setattr("nc_study.reporting.report.precision_check", lambda groups: {"bf16": 1.0, "fp32": 1.5})
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
    for module in ("protocol", "reporting.verdicts", "reporting.tables", "reporting.report"):
        monkeypatch.setattr(f"nc_study.{module}.PRIMARY", blocks)

    def finish(gain, without=0):
        runs = [(block.setting, seed, arm) for block in blocks for seed in range(2) for arm in block.arms]
        runs = [(gain(seed, arm), of_b(arm, seed=seed, **setting.options)) for setting, seed, arm in runs[without:]]
        (group,) = write(*runs)
        assert group.recipe_b and not group.tuned
        return group

    return finish


def verdict_of_each(group):
    return {one.claim.name: one.verdict for one in verdicts(group, CLAIMS)}


def test_verdicts_and_findings_of_all_primary_runs(primary, monkeypatch):
    group = primary(lambda seed, arm: 2 + seed / 5)
    better, nearer, where, sure, unclaimed, untested = findings([group])
    assert verdict_of_each(group) == dict.fromkeys(("A1", "A4", "A5", "N1", "N3", "N4"), SUPPORTED)
    # Three settings, each with the differences 2.0 and 2.2: standard error 0.0577, three degrees of freedom, t = 3.182.
    assert better.startswith("**Is the DEQ more accurate? Yes.**") and "Inconclusive" not in better
    assert "overall accuracy is +2.10 \\[+1.92, +2.28\\] points" in better and "A1: supported" in better
    assert "+1.51 on average, is outside the interval" in better
    assert nearer.count("Nearer than") == 3 and "centred NC2 -0.210 \\[-0.228, -0.192\\] (N3: supported)" in nearer
    assert "+2.10 \\[+0.83, +3.37\\] at (3,7) R = 10 (2 seeds); +2.10" in where
    assert "half-width of 0.18 points. A test finds a difference of 0.2 points" in sure
    # Six differences of one sign: two of the 64 choices of signs are as far from 0, times six claims.
    assert {one.signs for one in verdicts(group, CLAIMS)} == {6 * 2 / 64} and "flips signs" not in sure
    assert "minority accuracy +2.10 \\[+1.92, +2.28\\] points" in unclaimed
    assert "for 17 of the 20 settings: cifar10 balanced, (3,7) R = 50" in untested and "cifar100 (all)" in untested
    assert facts([group])["conclusions"][0].endswith("the equilibrium does it.")


@pytest.mark.parametrize(
    ("checked", "share", "cause"),
    [
        ({"bf16": 1.0, "fp32": 3.5}, 1.0, "the check of the precision failed"),
        ({"bf16": 1.0, "fp32": 1.5}, 0.94, "94.0 % of the samples reach the tolerance"),
        ({"bf16": 1.0, "fp32": 3.0}, SOLVED + 0.01, ""),
    ],
)
def test_what_stands_against_a_conclusion(primary, monkeypatch, checked, share, cause):
    monkeypatch.setattr("study_helpers.SOLVER", replace(SOLVER, converged=share))
    monkeypatch.setattr("nc_study.reporting.report.precision_check", lambda groups: checked)
    said = facts([primary(lambda seed, arm: 2.0)])["obstacle"]
    assert said.endswith(cause) and bool(said) == bool(cause)


def test_the_test_of_signs_is_exact():
    """Of eight choices of signs of 1, 2 and 4 two are as far from 0 as 7, and six as far as 4 + 1 - 2."""
    assert sign_flip([[1.0, 2.0, 4.0]]) == sign_flip([[-1.0], [-2.0], [-4.0]]) == 2 / 8
    assert sign_flip([[1.0, -2.0, 4.0]]) == 6 / 8 and sign_flip([[0.0, 0.0]]) == 1


@pytest.mark.parametrize("alpha", [0.05, 0.05 / 6])
def test_the_power_is_that_of_the_t_test(alpha):
    """Of 20,000 drawn samples of three 80 % are found, within four standard errors of that share."""
    found = Estimate(0.0, 1 / 3**0.5, 2)
    samples = np.random.default_rng(0).normal(found.detectable(alpha), 1, (20_000, 3))
    share = (stats.ttest_1samp(samples, 0, axis=1).pvalue < alpha).mean()
    assert share == pytest.approx(POWER, abs=4 * (POWER * (1 - POWER) / 20_000) ** 0.5)


def test_differences_are_shown_with_their_interval():
    # Mean 1.05, error 0.05 with one degree of freedom: t = 12.706.
    assert shown("overall", [[1.0, 1.1]]) == "+1.05 [+0.41, +1.69]" and shown("nc2_centered", [[0.5]]) == "+0.500"
    assert (
        shown("nc1", [[0.0, 0.0]]) == "×1.00 [×1.00, ×1.00]" and shown("overall", [[]]) == shown("overall", []) == "–"
    )


def test_no_verdict_before_the_last_primary_run(primary):
    group = primary(lambda seed, arm: 2 + seed / 5, without=1)
    (said,) = findings([group])
    assert said.startswith("No verdict: 23 of the 24 runs") and verdicts(group, CLAIMS) == []


def test_the_confound_is_shown_by_runs_that_differ_only_in_the_arm(write, monkeypatch):
    """The DEQ is 3 points ahead as tuned; explicit runs with its values are 2 points below those as tuned."""
    first = {arm: {"lr": 0.03 if arm == "explicit" else 0.1, "scale": 1.0} for arm in (*B_ARMS, "deq-jfb")}
    monkeypatch.setattr(protocol, "tuned", lambda: first)
    monkeypatch.setattr("study_helpers.made_up_epoch", lower_at_a_large_rate)
    monkeypatch.setattr("conftest.made_up_epoch", lower_at_a_large_rate)
    runs = [
        (3.0, {**arm_options(arm), **first[arm], "seed": seed, "device": "cpu"})
        for seed, arm in product(range(2), first)
    ]
    runs += [
        (0.0, {**arm_options("explicit"), "lr": lr, "seed": s, "device": "cpu"}) for lr in (0.1, 0.3) for s in range(2)
    ]
    groups = write(*runs)
    (row,) = same_values_rows(groups[0], groups)
    tuned, values, same = (value.split()[0] for value in list(row.values())[1:4])
    assert groups[0].first_recipe and (tuned, values, same) == ("+3.00", "-2.00", "+5.00")


def lower_at_a_large_rate(number, settings, shift=1.0):
    """A made-up epoch in which a rate above 0.03 costs the explicit network 2 points."""
    epoch = made_up_epoch(number, settings, shift)
    return replace(epoch, overall=epoch.overall - 2) if settings.lr > 0.03 and settings.model == "explicit" else epoch


def test_recipes_and_devices_are_never_in_one_estimate(write, monkeypatch):
    """Runs of the explicit network that differ only in the device form two groups, and check the device."""
    first = {arm: {"lr": 0.03 if arm == "explicit" else 0.1, "scale": 1.0} for arm in (*B_ARMS, "deq-jfb")}
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
    assert facts(groups)["devices"] == {"count": 3, "shown": "-0.67 [-3.54, +2.20]", "all": pytest.approx([0, 0, 2])}


def test_a_run_of_other_values_is_none_of_the_protocols(write, monkeypatch):
    monkeypatch.setattr(protocol, "tuned", lambda: {"deq-jfb": {"lr": 0.3}})
    changes = [{}, {"lr": 0.1}, {"precision": "fp32"}, {"dataset": "cifar100"}, {"metrics_every": 7}, {"seed": 3}]
    groups = write(*((1.0, {"lr": 0.3, "device": "cpu", **given}) for given in changes))
    tuned = [sorted(run.path.name for run in group.finished) for group in groups if group.tuned]
    assert sorted(tuned) == [["run0"], ["run2"]] and not any(group.recipe_b for group in groups)
    assert [group.first_recipe for group in groups] == [True] + [False] * (len(groups) - 1)


@pytest.mark.parametrize("pairs", [30, 5])
def test_signs_of_many_pairs_are_flipped_exactly(pairs):
    """If all pairs but the first are 0, half of the flips are as far; if all are equal, two are."""
    assert sign_flip([[1.0] + [0.0] * (pairs - 1)]) == 1
    assert sign_flip([[0.1] * pairs]) == 2 / 2**pairs


def test_a_common_variance_is_the_pooled_one():
    """Deviations 1 and 3 of three and two pairs: variance (2 * 1 + 1 * 9) / 3, with three degrees of freedom."""
    found = estimate([[0.0, 1.0, 2.0], [-(4.5**0.5), 4.5**0.5]], common=True)
    assert (found.mean, found.freedom) == (0.5, 3)
    assert found.error == pytest.approx((11 / 3 * (1 / 3 + 1 / 2)) ** 0.5 / 2)


@pytest.mark.parametrize(
    ("interval", "p_different", "p_equal", "verdict"),
    [(1.5, 0.01, 0.9, CONTRADICTED), (0.5, 0.01, 0.9, OPEN), (0.1, 0.9, 0.01, SUPPORTED), (0.1, 0.9, 0.2, OPEN)],
)
def test_what_is_expected_alike(interval, p_different, p_equal, verdict):
    """Contradicted only if the whole interval is outside the band of 1."""
    found = Estimate(interval + 0.2, 0.2 / stats.t.ppf(0.975, 20), 20)
    assert judge("alike", found, p_different, p_equal, 1.0) == verdict


@pytest.fixture
def of_parts(tmp_path, monkeypatch):
    """Write a run of each arm, setting and seed (two) of a part, the DEQ ahead by `gain(setting, seed)`: all groups."""
    every = tuple(Rate(arm, ratio, 5e-4, 0.01, 50.0) for arm in protocol.NEW_ARMS for ratio in (10, 100))
    monkeypatch.setattr(protocol, "rates", lambda: Rates((), every))
    kept = {name: tuple(replace(one, seeds=range(10, 12)) for one in protocol.PARTS[name]) for name in JUDGED}
    for name in JUDGED:
        monkeypatch.setitem(protocol.PARTS, name, kept[name])

    def finish(part, gain):
        for block, seed in product(kept[part], range(10, 12)):
            for arm in block.arms:
                given = {**arm_options(arm), **block.setting.options, "seed": seed, "lr": 0.01, "device": "cuda"}
                given |= {"preset": "study", "precision": "bf16", "epochs": 30, **block.options}
                given |= {"n_majority": 50_000 // block.setting.classes}
                settings = made_up_settings(block.setting.study, **given)
                run = RunDirectory(tmp_path / settings.run_name)
                run.path.mkdir()
                run.conclude(made_up_result(settings, gain(block.setting, seed)))
        return collect([tmp_path]).groups

    return finish


def test_the_mechanism_is_judged_by_flips_of_signs_and_a_common_variance(of_parts):
    """Six pairs per claim cannot pass Holm's first level, 2 / 64 * 9; eight of nine claims have the same pairs."""
    mechanism, settings, size = parts(of_parts("mechanism", lambda setting, seed: 2.0 + seed / 100))
    assert (
        (mechanism.done, mechanism.needed) == (48, 48) and not settings.judged and settings.done == 18 < settings.needed
    )
    assert {one.claim.name: one.p for one in mechanism.judged}["M1"] == 9 * 2 / 64
    assert mechanism.converged == 0 and answer(mechanism) == "It is not shown that a DEQ helps under imbalance."
    assert answer(settings).startswith("No verdict: 18 of the 120 runs") and not size.judged


def test_all_settings_are_judged_by_their_means_and_the_slope_in_log_r(of_parts):
    """The DEQ's gain is 1 point at R = 10 and rises by 3 points per decade, more or less by the seed."""

    def gain(setting, seed):
        return 1.0 + (seed - 10.5) / 10 + 3 * math.log10((setting.ratio or 10) / 10)

    _, settings, _ = parts(of_parts("settings", gain))
    found = {one.claim.name: one for one in settings.judged}
    assert found["S1"].verdict == found["S3"].verdict == SUPPORTED
    assert found["S3"].estimate.mean == pytest.approx(3) and found["S3"].estimate.freedom == 6 * 2 - 1
    assert (
        found["S1"].estimate.mean == pytest.approx(1 + 3 * (math.log10(5) + 1) / 3)
        and found["S1"].estimate.freedom == 17
    )


@pytest.mark.parametrize(
    ("verdicts_of", "said"),
    [
        ((SUPPORTED,) * 3, "A DEQ helps"),
        ((SUPPORTED, EQUAL, OPEN), "does not help"),
        ((SUPPORTED, OPEN, OPEN), "not shown"),
    ],
)
def test_a_deq_helps_only_if_it_beats_all_three(verdicts_of, said):
    names = zip(("M1", "M2", "M3"), verdicts_of, strict=True)
    claims = {claim.name: claim for claim in protocol.MECHANISM_CLAIMS}
    found = [Judgement(claims[name], verdict, None, 0.0, "", 0.0) for name, verdict in names]
    assert said in answer(Part("mechanism", 1, 1, found, 1.0))


@pytest.mark.parametrize(
    ("shift", "said"), [(40.0, "83.75 % .* is not the paper's"), (50.0, "93.75 % .* is the paper's")]
)
def test_the_printed_rate_is_the_papers_from_90_percent_on(made_up, shift, said):
    path = made_up("p", study="cifar_balanced", preset="paper", model="explicit", seed=10, epochs=4, device="cuda")
    groups = collect([path.parent]).groups
    (network,) = groups[0].networks(groups[0].settings[0], "explicit").values()
    better = replace(network.accuracy, overall=replace(network.accuracy.overall, mean=43.75 + shift))
    run = RunDirectory(path)
    run.conclude(replace(run.result, network=replace(network, accuracy=better)))
    assert re.search(said, printed_rate(collect([path.parent]).groups)) and printed_rate([]).startswith(
        "Not run: needs a GPU"
    )


def test_the_power_is_of_the_registered_pairs(monkeypatch):
    """An effect far above the deviations is always seen, and none is seen as rarely as the level says."""
    monkeypatch.setattr(power, "DRAWS", 40)
    assert [len(one) for one in next(power.drawn([1.0] * 3, 0.0))] == [6, 12, 12]
    assert power.power([0.1] * 3, 1.0, 0.05 / 9) == 1 and power.power([1.0] * 3, 0.0, 0.05) < 0.3
    low = power.detectable([1.0] * 3, 0.05)
    assert power.power([1.0] * 3, low, 0.05) >= POWER > power.power([1.0] * 3, 0.5 * low, 0.05)

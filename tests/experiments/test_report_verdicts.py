"""Estimates and p-values compared with scipy's, and the verdicts that follow from them by experiments/protocol.md."""

import math
from dataclasses import replace
from itertools import count, product

import numpy as np
import pytest
from nc_study import protocol
from nc_study.config import arm_options
from nc_study.protocol import B_ARMS, PRIMARY, RECIPE_B, Rate, Rates
from nc_study.reporting import power
from nc_study.reporting.report import SOLVED, facts, findings
from nc_study.reporting.runs import collect, gpu_less_cpu
from nc_study.reporting.tables import printed_rate, same_values_rows
from nc_study.reporting.verdicts import (
    CONTRADICTED,
    EQUAL,
    OPEN,
    POWER,
    SUPPORTED,
    Estimate,
    Judgement,
    Part,
    answer,
    estimate,
    holm,
    judge,
    parts,
    shown,
    sign_flip,
    verdicts,
)
from nc_study.rundir import RunDirectory
from scipy import stats
from study_helpers import SOLVER, made_up_epoch, made_up_result, made_up_settings

JUDGED = ("mechanism", "settings", "size")
FOUR, THREE = [0.4, 1.1, -0.3, 2.0], [1.2, 0.1, 0.9]


def test_one_setting_is_a_paired_t_test_and_two_are_welchs():
    expected, paired = stats.ttest_1samp(FOUR, 0), estimate([FOUR])
    interval = expected.confidence_interval()
    assert paired.p_different == pytest.approx(expected.pvalue)
    assert paired.interval == pytest.approx((interval.low, interval.high))
    welch, both = stats.ttest_ind(FOUR, [-value for value in THREE], equal_var=False), estimate([FOUR, THREE])
    assert (both.freedom, both.p_different) == pytest.approx((welch.df, welch.pvalue))
    assert both.mean == pytest.approx((0.8 + 2.2 / 3) / 2), "settings count alike, however many seeds they have"
    sides = [stats.ttest_1samp(FOUR, -2, alternative="greater"), stats.ttest_1samp(FOUR, 2, alternative="less")]
    assert estimate([FOUR]).p_equal(2) == pytest.approx(max(side.pvalue for side in sides))
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
    difference = Estimate(mean, error, 20)
    assert [judge(expected, difference, p_different, p_equal) for expected in ("higher", "lower")] == [higher, lower]


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


def recipe_b(arm, **given):
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
        runs = [(gain(seed, arm), recipe_b(arm, seed=seed, **setting.options)) for setting, seed, arm in runs[without:]]
        (group,) = write(*runs)
        assert group.recipe_b and not group.tuned
        return group

    return finish


def test_verdicts_and_findings_of_all_primary_runs(primary, monkeypatch):
    group = primary(lambda seed, arm: 2 + seed / 5)
    better, nearer, where, sure, unclaimed, untested = findings([group])
    judged = {judgement.claim.name: judgement.verdict for judgement in verdicts(group)}
    assert judged == dict.fromkeys(("A1", "A4", "A5", "N1", "N3", "N4"), SUPPORTED)
    # Three settings, each with the differences 2.0 and 2.2: standard error 0.0577, three degrees of freedom, t = 3.182.
    assert better.startswith("**Is the DEQ more accurate? Yes.**") and "Inconclusive" not in better
    assert "overall accuracy is +2.10 \\[+1.92, +2.28\\] points" in better and "A1: supported" in better
    assert "+1.51 on average, is outside the interval" in better
    assert nearer.count("Nearer than") == 3 and "centred NC2 -0.210 \\[-0.228, -0.192\\] (N3: supported)" in nearer
    assert "+2.10 \\[+0.83, +3.37\\] at (3,7) R = 10 (2 seeds); +2.10" in where
    assert "half-width of 0.18 points. A test finds a difference of 0.2 points" in sure
    # Six differences of one sign: two of the 64 choices of signs are as far from 0, times six claims.
    assert {judgement.signs for judgement in verdicts(group)} == {6 * 2 / 64} and "flips signs" not in sure
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


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([[1.0, 2.0, 4.0]], 2 / 8),  # of eight choices of signs two are as far from 0 as 7
        ([[-1.0], [-2.0], [-4.0]], 2 / 8),
        ([[1.0, -2.0, 4.0]], 6 / 8),  # and six as far as 4 + 1 - 2
        ([[0.0, 0.0]], 1),
        ([[1.0] + [0.0] * 29], 1),
        ([[0.1] * 30], 2 / 2**30),
    ],
)
def test_the_test_of_signs_is_exact(differences, p):
    assert sign_flip(differences) == p


@pytest.mark.parametrize("alpha", [0.05, 0.05 / 6])
def test_the_power_is_that_of_the_t_test(alpha):
    """Of 20,000 drawn samples of three 80 % are found, within four standard errors of that share."""
    samples = np.random.default_rng(0).normal(Estimate(0.0, 1 / 3**0.5, 2).detectable(alpha), 1, (20_000, 3))
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
    (text,) = findings([group])
    assert text.startswith("No verdict: 23 of the 24 runs") and verdicts(group) == []


@pytest.fixture
def first(write, monkeypatch):
    """The values that trials have chosen for each arm."""
    values = {arm: {"lr": 0.03 if arm == "explicit" else 0.1, "scale": 1.0} for arm in (*B_ARMS, "deq-jfb")}
    monkeypatch.setattr(protocol, "tuned", lambda: values)
    return {arm: {**arm_options(arm), **given, "device": "cpu"} for arm, given in values.items()}


def test_the_confound_is_shown_by_runs_that_differ_only_in_the_arm(write, first, monkeypatch):
    """The DEQ is 3 points ahead as tuned; explicit runs with its values are 2 points below those as tuned."""

    def lower_at_a_large_rate(number, settings, shift=1.0):
        epoch, slow = made_up_epoch(number, settings, shift), settings.lr > 0.03 and settings.model == "explicit"
        return replace(epoch, overall=epoch.overall - 2) if slow else epoch

    for module in ("study_helpers", "conftest"):
        monkeypatch.setattr(f"{module}.made_up_epoch", lower_at_a_large_rate)
    runs = [(3.0, {**first[arm], "seed": seed}) for seed, arm in product(range(2), first)]
    explicit = {**arm_options("explicit"), "device": "cpu"}
    runs += [(0.0, {**explicit, "lr": lr, "seed": seed}) for lr, seed in product((0.1, 0.3), range(2))]
    groups = write(*runs)
    (row,) = same_values_rows(groups[0], groups)
    tuned, values, same = (value.split()[0] for value in list(row.values())[1:4])
    assert groups[0].first_recipe and (tuned, values, same) == ("+3.00", "-2.00", "+5.00")


def test_recipes_and_devices_are_never_in_one_estimate(write, first):
    """Runs of the explicit network that differ only in the device form two groups, and check the device."""
    runs = [(1.0, {**first[arm], "seed": seed}) for seed, arm in product(range(2), first)]
    runs += [(1.0, recipe_b(arm, seed=seed)) for seed, arm in product((0, 1, 3), B_ARMS)]
    runs += [(3.0, recipe_b("deq-implicit", seed=3, device="cpu")), (1.0, recipe_b("explicit", lr=0.1))]
    apart = ({"no_augmentation": True}, {"dataset": "cifar100"})
    runs += [(1.0, recipe_b(arm, **given)) for arm, given in product(B_ARMS, apart)]
    b, old, *others = groups = write(*runs)
    assert b.recipe_b and old.first_recipe and len(b.finished) == 12 and len(old.finished) == 10
    assert {len(group.finished) for group in others} == {1, 4} and len(others) == 4
    assert not any(group.recipe_b or group.tuned for group in others)
    setting = PRIMARY[0].setting
    for group, rate, seeds, device in ((old, 0.1, {0, 1}, "cpu"), (b, 0.03, {0, 1, 3}, "cuda")):
        assert set(group.differences(setting, "deq-implicit", "explicit", "overall")) == seeds
        settings = [run.result.settings for run in group.runs[setting, "deq-implicit"].values()]
        assert {(given.lr, given.device) for given in settings} == {(rate, device)}
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


def test_a_common_variance_is_the_pooled_one():
    """Deviations 1 and 3 of three and two pairs: variance (2 * 1 + 1 * 9) / 3, with three degrees of freedom."""
    pooled = estimate([[0.0, 1.0, 2.0], [-(4.5**0.5), 4.5**0.5]], common=True)
    assert (pooled.mean, pooled.freedom) == (0.5, 3)
    assert pooled.error == pytest.approx((11 / 3 * (1 / 3 + 1 / 2)) ** 0.5 / 2)


@pytest.mark.parametrize(
    ("interval", "p_different", "p_equal", "verdict"),
    [(1.5, 0.01, 0.9, CONTRADICTED), (0.5, 0.01, 0.9, OPEN), (0.1, 0.9, 0.01, SUPPORTED), (0.1, 0.9, 0.2, OPEN)],
)
def test_what_is_expected_alike(interval, p_different, p_equal, verdict):
    """Contradicted only if the whole interval is outside the band of 1."""
    difference = Estimate(interval + 0.2, 0.2 / stats.t.ppf(0.975, 20), 20)
    assert judge("alike", difference, p_different, p_equal, 1.0) == verdict


@pytest.fixture
def write_parts(tmp_path, monkeypatch):
    """Write a run of each arm, setting and seed (two) of a part, the DEQ ahead by `gain(setting, seed)`: all groups.

    The seeds of `mechanism` are 10 and 11, those of the other parts 11 and 12.
    """
    every = tuple(Rate(arm, ratio, 5e-4, 0.01, 50.0) for arm in protocol.NEW_ARMS for ratio in (10, 100))
    monkeypatch.setattr(protocol, "rates", lambda: Rates((), every))
    kept = {}
    for name in JUDGED:
        seeds = range(10, 12) if name == "mechanism" else range(11, 13)
        kept[name] = tuple(replace(block, seeds=seeds) for block in protocol.PARTS[name])
        monkeypatch.setitem(protocol.PARTS, name, kept[name])

    def finish(part, gain):
        for block in kept[part]:
            for seed, arm in product(block.seeds, block.arms):
                given = {**arm_options(arm), **block.setting.options, "seed": seed, "lr": 0.01, "device": "cuda"}
                given |= {"preset": "study", "precision": "bf16", "epochs": 30, **block.options}
                given |= {"n_majority": 50_000 // block.setting.classes}
                settings = made_up_settings(block.setting.study, **given)
                run = RunDirectory(tmp_path / settings.run_name)
                run.path.mkdir(exist_ok=True)
                run.conclude(made_up_result(settings, gain(block.setting, seed)))
        return collect([tmp_path]).groups

    return finish


def test_the_mechanism_is_judged_by_flips_of_signs_and_a_common_variance(write_parts):
    """Six pairs per claim cannot pass Holm's first level, 2 / 64 * 9; eight of nine claims have the same pairs."""
    mechanism, settings, size = parts(write_parts("mechanism", lambda setting, seed: 2.0 + seed / 100))
    assert (
        (mechanism.done, mechanism.needed) == (48, 48) and not settings.judged and settings.done == 9 < settings.needed
    )
    assert {judged.claim.name: judged.p for judged in mechanism.judged}["M1"] == 9 * 2 / 64
    assert mechanism.converged == 0 and answer(mechanism) == "It is not shown that a DEQ helps under imbalance."
    assert answer(settings).startswith("No verdict: 9 of the 120 runs") and not size.judged


def test_all_settings_are_judged_by_their_means_and_the_slope_in_log_r(write_parts):
    """The DEQ's gain is 1 point at R = 10 and rises by 3 points per decade, more or less by the seed. The part before
    has runs of the same group, with another gain."""

    def gain(setting, seed):
        return 1.0 + (seed - 11.5) / 10 + 3 * math.log10((setting.ratio or 10) / 10)

    write_parts("mechanism", lambda setting, seed: -8.0)
    _, settings, _ = parts(write_parts("settings", gain))
    s1, s3 = (judged for judged in settings.judged if judged.claim.name in ("S1", "S3"))
    assert s1.verdict == s3.verdict == SUPPORTED
    assert s3.estimate.mean == pytest.approx(3) and s3.estimate.freedom == 6 * 2 - 1
    assert s1.estimate.mean == pytest.approx(1 + 3 * (math.log10(5) + 1) / 3) and s1.estimate.freedom == 17


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((SUPPORTED,) * 3, "A DEQ helps"),
        ((SUPPORTED, EQUAL, OPEN), "does not help"),
        ((SUPPORTED, OPEN, OPEN), "not shown"),
    ],
)
def test_a_deq_helps_only_if_it_beats_all_three(words, said):
    claims = [claim for claim in protocol.CLAIMS["mechanism"] if claim.name in ("M1", "M2", "M3")]
    judged = [Judgement(claim, word, None, 0.0, "", 0.0) for claim, word in zip(claims, words, strict=True)]
    assert said in answer(Part("mechanism", 1, 1, judged, 1.0))


@pytest.mark.parametrize(("overall", "said"), [(83.75, "is not the paper's"), (93.75, "is the paper's")])
def test_the_printed_rate_is_the_papers_from_90_percent_on(made_up, overall, said):
    printed = {"study": "cifar_balanced", "preset": "paper", "model": "explicit", "seed": 10, "device": "cuda"}
    printed |= {"epochs": 100, "n_majority": 5000, "test_images": 10_000}
    for name, other in {"rate": {"lr": 0.1}, "seed": {"seed": 3}, "bounds": {"e_w": 0.01, "e_h": 0.01}}.items():
        path = made_up(name, **printed | other)
    assert printed_rate(collect([path.parent]).groups).startswith("Not run")
    path = made_up("p", **printed)
    run = RunDirectory(path)
    network = run.result.network
    accuracy = replace(network.accuracy, overall=replace(network.accuracy.overall, mean=overall))
    run.conclude(replace(run.result, network=replace(network, accuracy=accuracy)))
    text = printed_rate(collect([path.parent]).groups)
    assert f"{overall} % " in text and said in text and printed_rate([]).startswith("Not run: needs a GPU")


def test_the_power_is_of_the_registered_pairs(monkeypatch):
    """An effect far above the deviations is always seen, and none is seen as rarely as the level says."""
    monkeypatch.setattr(power, "DRAWS", 40)
    assert [len(pairs) for pairs in next(power.drawn([1.0] * 3, 0.0))] == [6, 12, 12]
    assert power.power([0.1] * 3, 1.0, 0.05 / 9) == 1 and power.power([1.0] * 3, 0.0, 0.05) < 0.3
    low = power.detectable([1.0] * 3, 0.05)
    assert power.power([1.0] * 3, low, 0.05) >= POWER > power.power([1.0] * 3, 0.5 * low, 0.05)

"""Intervals and sign tests against numbers worked out by hand, and the words that follow from them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from nc_study.paper import CLAIMS, RATIOS
from nc_study.record import RunResult, read_record, to_json
from nc_study.reporting.runs import collect
from nc_study.reporting.verdicts import (
    FAILS,
    HOLDS,
    UNDECIDED,
    Interval,
    judge,
    judge_interval,
    paper_differences,
    sign_test,
    t_interval,
)

OVERALL, MAJORITY, MINORITY, NC1, NC2, NC3 = CLAIMS[:6]
BALANCED, BALANCED_NC2 = CLAIMS[8], CLAIMS[10]
SIX = [(majority, ratio) for majority in (3, 5) for ratio in RATIOS]


def test_intervals():
    found = t_interval([1.0, 2.0, 3.0])
    # t(0.975; 2) = 4.302653, deviation 1, divided by the root of 3.
    assert found.mean == 2 and found.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-6)
    assert found.low + found.high == pytest.approx(4)
    found = t_interval([0.0, 0.0, 0.0, 0.0, 5.0])
    # t(0.975; 4) = 2.776445, deviation the root of 5.
    assert found.high - found.mean == pytest.approx(2.776445, abs=1e-6)
    assert t_interval([1.0, 1.0, 1.0]) == Interval(1.0, 1.0, 1.0)


def test_signs():
    assert sign_test(6, 0) == pytest.approx(2 / 64)
    assert sign_test(5, 0) == pytest.approx(2 / 32)
    assert sign_test(5, 1) == pytest.approx(14 / 64)
    assert sign_test(1, 1) == 1 and sign_test(0, 0) == 1


@pytest.mark.parametrize(
    ("low", "high", "higher", "lower", "alike"),
    [
        (0.01, 0.1, HOLDS, FAILS, HOLDS),
        (-0.1, -0.01, FAILS, HOLDS, HOLDS),
        (-0.1, 0.1, UNDECIDED, UNDECIDED, HOLDS),
        (-0.3, 0.1, UNDECIDED, UNDECIDED, UNDECIDED),
        (0.1, 0.5, HOLDS, FAILS, UNDECIDED),
        (0.3, 0.5, HOLDS, FAILS, FAILS),
        (-0.5, -0.3, FAILS, HOLDS, FAILS),
        (0.0, 0.0, UNDECIDED, UNDECIDED, HOLDS),
    ],
)
def test_what_an_interval_says(low, high, higher, lower, alike):
    found = Interval((low + high) / 2, low, high)
    assert [judge_interval(found, expected) for expected in ("higher", "lower", "alike")] == [higher, lower, alike]


@pytest.fixture
def group(made_up):
    """The group of runs whose DEQ is ahead by the shifts given, of each seed, in each imbalance (K_A, R)."""

    def build(imbalances):
        for (majority, ratio), shifts in imbalances.items():
            for seed, shift in enumerate(shifts):
                path = made_up(majority=majority, ratio=ratio, seed=seed, shift=shift)
        (found,) = collect([path.parent]).groups
        return found

    return build


def test_three_seeds_that_agree(group):
    found = group({(3, 10): [1.0, 1.2, 1.4]})
    one = judge(found, OVERALL)
    assert one.verdict == HOLDS and judge(found, MINORITY).verdict == HOLDS
    assert list(one.evidence[0].differences.values()) == pytest.approx([1.0, 1.2, 1.4])
    # t(0.975; 2) · 0.2 / root 3.
    assert one.evidence[0].interval.low == pytest.approx(1.2 - 4.302653 * 0.2 / math.sqrt(3), abs=1e-6)
    assert "+1.20 points on average over 1 setting (3 pairs); higher in 1, lower in 0" in one.numbers
    assert "of 1 setting with 3 or more seeds: holds in 1" in one.numbers
    assert judge(found, NC2).verdict == HOLDS and judge(found, NC2).evidence[0].mean == pytest.approx(-0.12)
    assert judge(found, NC1).verdict == HOLDS and judge(found, NC1).evidence[0].mean == 0


def test_three_seeds_that_do_not_agree(group):
    found = group({(3, 10): [-1.0, 0.5, 1.0]})
    assert judge(found, OVERALL).verdict == UNDECIDED and judge(found, NC3).verdict == UNDECIDED


def test_the_opposite(group):
    found = group({(3, 10): [-1.0, -1.1, -1.2], (5, 10): [1.0, 1.1, 1.2]})
    one = judge(found, OVERALL)
    assert one.verdict == FAILS and "holds in 1, does not hold in 1" in one.numbers
    assert [entry.verdict for entry in one.evidence] == [FAILS, HOLDS]


def test_a_claim_must_hold_in_every_setting_with_enough_seeds(group):
    found = group({(3, 10): [1.0, 1.1, 1.2], (5, 10): [-1.0, 0.0, 1.2], (7, 10): [-9.0]})
    assert judge(found, OVERALL).verdict == UNDECIDED


def test_two_seeds_in_one_setting_are_not_enough(group):
    found = group({(3, 10): [1.0, 1.2]})
    assert judge(found, OVERALL).verdict == "not enough runs (2)"
    assert judge(found, OVERALL).evidence[0].interval is None
    assert judge(found, BALANCED).verdict == "not enough runs (0)"
    assert judge(found, BALANCED).numbers == "no pair of networks with the same seed"


@pytest.mark.parametrize(
    ("shifts", "overall", "nc2"),
    [([1.0] * 6, HOLDS, HOLDS), ([-1.0] * 6, FAILS, FAILS), ([1.0] * 5 + [-1.0], UNDECIDED, UNDECIDED)],
)
def test_one_seed_in_six_settings_is_judged_by_signs(group, shifts, overall, nc2):
    found = group({one: [shift] for one, shift in zip(SIX, shifts, strict=True)})
    assert judge(found, OVERALL).verdict == overall and judge(found, NC2).verdict == nc2
    assert judge(found, NC1).verdict == "not enough runs (6)", "no signs can show likeness"


def test_where_the_seeds_leave_it_open_the_signs_of_six_settings_decide(group):
    shifts = [[-1.0, 0.4, -0.2], *([-1.0] for _ in SIX[1:])]
    found = group(dict(zip(SIX, shifts, strict=True)))
    assert judge(found, OVERALL).evidence[0].verdict == UNDECIDED
    assert judge(found, OVERALL).verdict == FAILS


def test_one_seed_in_five_settings_is_not_enough(group):
    assert judge(group({one: [1.0] for one in SIX[:5]}), OVERALL).verdict == "not enough runs (5)"


def test_the_balanced_claims_take_the_balanced_runs(made_up):
    for seed in range(3):
        path = made_up(study="cifar_balanced", seed=seed, shift=1.0 + seed / 10)
    (found,) = collect([path.parent]).groups
    assert judge(found, BALANCED).verdict == HOLDS
    assert judge(found, OVERALL).verdict == "not enough runs (0)"
    (nc2,) = judge(found, BALANCED_NC2).evidence
    assert nc2.differences[1] == pytest.approx(math.log(1 - 0.11))


def test_an_undefined_metric_is_counted_apart(made_up):
    path = made_up() / "result.json"
    result = read_record(RunResult, path)
    deq = result.networks["deq"]
    networks = {**result.networks, "deq": replace(deq, nc=replace(deq.nc, nc3=None))}
    path.write_bytes(to_json(replace(result, networks=networks)))
    (found,) = collect([path.parent]).groups
    assert judge(found, NC3).verdict == "not enough runs (0)"
    assert judge(found, NC3).numbers == "the metric is not defined in 1 pair"
    assert judge(found, NC2).verdict == "not enough runs (1)"


def test_the_papers_own_differences():
    assert len(paper_differences(OVERALL, "cifar10")) == 9
    assert paper_differences(BALANCED, "cifar10") == [pytest.approx(0.18)]
    assert sum(value > 0 for value in paper_differences(MAJORITY, "cifar10")) == 5
    assert paper_differences(NC2, "cifar10") == []

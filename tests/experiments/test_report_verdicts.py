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
    judge,
    judge_interval,
    paper_differences,
    sign_test,
    t_interval,
)

OVERALL, MAJORITY, MINORITY, NC1, NC2, NC3 = CLAIMS[:6]
BALANCED, BALANCED_NC2 = CLAIMS[8], CLAIMS[10]
SIX = [(majority, ratio) for majority in (3, 5) for ratio in RATIOS]


def test_intervals_and_signs():
    # t(0.975; 2) = 4.302653, deviation 1, divided by the root of 3; t(0.975; 4) = 2.776445, deviation the root of 5.
    half = 4.302653 / math.sqrt(3)
    assert t_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - half, 2 + half), abs=1e-6)
    assert t_interval([0.0, 0.0, 0.0, 0.0, 5.0]) == pytest.approx((1 - 2.776445, 1 + 2.776445), abs=1e-6)
    assert t_interval([1.0, 1.0, 1.0]) == (1.0, 1.0)
    assert [sign_test(*signs) for signs in ((6, 0), (5, 1), (1, 1), (0, 0))] == pytest.approx([2 / 64, 14 / 64, 1, 1])


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
    assert [judge_interval(low, high, expected) for expected in ("higher", "lower", "alike")] == [higher, lower, alike]


@pytest.mark.parametrize(
    ("imbalances", "verdicts"),
    [
        pytest.param({(3, 10): [1.0, 1.2, 1.4]}, {OVERALL: HOLDS, MINORITY: HOLDS, NC1: HOLDS, NC2: HOLDS}, id="agree"),
        pytest.param({(3, 10): [-1.0, 0.5, 1.0]}, {OVERALL: UNDECIDED, NC3: UNDECIDED}, id="disagree"),
        pytest.param({(3, 10): [-1.0, -1.1, -1.2], (5, 10): [1.0, 1.1, 1.2]}, {OVERALL: FAILS}, id="the opposite once"),
        pytest.param(
            {(3, 10): [1.0, 1.1, 1.2], (5, 10): [-1.0, 0.0, 1.2], (7, 10): [-9.0]},
            {OVERALL: UNDECIDED},
            id="not in all",
        ),
        pytest.param(
            {(3, 10): [1.0, 1.2]}, {OVERALL: "not enough runs (2)", BALANCED: "not enough runs (0)"}, id="two"
        ),
        pytest.param({one: [1.0] for one in SIX[:5]}, {OVERALL: "not enough runs (5)"}, id="five signs"),
        pytest.param(
            {one: [1.0] for one in SIX}, {OVERALL: HOLDS, NC2: HOLDS, NC1: "not enough runs (6)"}, id="six signs"
        ),
        pytest.param({one: [-1.0] for one in SIX}, {OVERALL: FAILS, NC2: FAILS}, id="six signs against"),
        pytest.param({one: [1.0 if one != SIX[0] else -1.0] for one in SIX}, {OVERALL: UNDECIDED}, id="signs differ"),
        pytest.param(
            {one: [-1.0] if one != SIX[0] else [-1.0, 0.4, -0.2] for one in SIX}, {OVERALL: FAILS}, id="signs decide"
        ),
    ],
)
def test_verdicts_of_runs_whose_deq_is_ahead_by_so_much(made_up, imbalances, verdicts):
    for (majority, ratio), shifts in imbalances.items():
        for seed, shift in enumerate(shifts):
            path = made_up(majority=majority, ratio=ratio, seed=seed, shift=shift)
    (group,) = collect([path.parent]).groups
    assert {claim: judge(group, claim).verdict for claim in verdicts} == verdicts


def test_the_numbers_behind_a_verdict(made_up):
    for seed, shift in enumerate((1.0, 1.2, 1.4)):
        path = made_up(seed=seed, shift=shift)
    (group,) = collect([path.parent]).groups
    where = (
        "on average over 1 setting (3 pairs); higher in 1, lower in 0; of 1 setting with 3 or more seeds: holds in 1"
    )
    assert judge(group, OVERALL).numbers == f"DEQ - explicit +1.20 points {where}"
    assert judge(group, NC1).numbers.startswith("DEQ / explicit ×1 on average")
    assert judge(group, NC2).numbers.startswith("DEQ - explicit -0.120 on average")
    assert judge(group, BALANCED).numbers == "no pair of networks with the same seed"


def test_the_balanced_claims_take_the_balanced_runs(made_up):
    for seed in range(3):
        path = made_up(study="cifar_balanced", seed=seed, shift=1.0 + seed / 10)
    (found,) = collect([path.parent]).groups
    assert judge(found, BALANCED).verdict == HOLDS and judge(found, OVERALL).verdict == "not enough runs (0)"
    ratio = math.prod(1 - shift / 10 for shift in (1.0, 1.1, 1.2)) ** (1 / 3)
    assert judge(found, BALANCED_NC2).numbers.startswith(f"DEQ / explicit ×{ratio:.3g} on average")


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

"""Intervals and sign tests against numbers worked out by hand, and the words that follow from them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from nc_study.paper import CLAIMS, RATIOS
from nc_study.record import RunResult, read_record, to_json
from nc_study.reporting.runs import collect
from nc_study.reporting.verdicts import FAILS, HOLDS, UNDECIDED, judge, judge_interval, judge_signs, t_interval

OVERALL, _, MINORITY, NC1, NC2, NC3 = CLAIMS[:6]
BALANCED, BALANCED_NC2 = CLAIMS[8], CLAIMS[10]
SIX = [(majority, ratio) for majority in (3, 5) for ratio in RATIOS]


def test_intervals_and_signs():
    # t(0.975; 2) = 4.302653, deviation 1, divided by the root of 3; t(0.975; 4) = 2.776445, deviation the root of 5.
    half = 4.302653 / math.sqrt(3)
    assert t_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - half, 2 + half), abs=1e-6)
    assert t_interval([0.0, 0.0, 0.0, 0.0, 5.0]) == pytest.approx((1 - 2.776445, 1 + 2.776445), abs=1e-6)
    assert t_interval([1.0, 1.0, 1.0]) == (1.0, 1.0)
    # Two-sided: 2/64 for six equal signs, 2/32 for five, 18/256 for seven of eight.
    six, eight = [1.0] * 6, [1.0] * 7 + [-1.0]
    assert [judge_signs(six, expected) for expected in ("higher", "lower", "alike")] == [HOLDS, FAILS, None]
    assert judge_signs(six[1:], "higher") is None and judge_signs(eight, "higher") == UNDECIDED


@pytest.mark.parametrize(
    ("low", "high", "higher", "lower", "alike"),
    [
        (0.01, 0.1, HOLDS, FAILS, HOLDS),
        (-0.1, -0.01, FAILS, HOLDS, HOLDS),
        (-0.1, 0.1, UNDECIDED, UNDECIDED, HOLDS),
        (-0.3, 0.1, UNDECIDED, UNDECIDED, UNDECIDED),
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
            {(3, 10): [1.0, 1.2]}, {OVERALL: "not enough runs (2)", BALANCED: "not enough runs (0)"}, id="two"
        ),
        pytest.param({one: [1.0] for one in SIX}, {OVERALL: HOLDS, NC1: "not enough runs (6)"}, id="six signs"),
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
    assert {claim: judge(group, claim)[0] for claim in verdicts} == verdicts


def test_a_pair_without_the_metric_does_not_count(made_up):
    path = made_up() / "result.json"
    result = read_record(RunResult, path)
    deq = result.networks["deq"]
    networks = {**result.networks, "deq": replace(deq, nc={**deq.nc, "nc3": None})}
    path.write_bytes(to_json(replace(result, networks=networks)))
    (found,) = collect([path.parent]).groups
    assert judge(found, NC3)[0] == "not enough runs (0)" and judge(found, NC2)[0] == "not enough runs (1)"

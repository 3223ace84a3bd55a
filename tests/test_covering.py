"""What a slow kernel runs of a test with many combinations of parameters."""

import itertools

import pytest
import torch
from covering import covering

ALL = [
    {"shape": shape, "dtype": dtype, "kernel": "triton", "op": op}
    for shape in ((1, 2), (3, 4), (5, 6))
    for dtype in (torch.float32, torch.float64)
    for op in "abc"
]


@pytest.mark.parametrize(("strength", "count"), [(0, 1), (1, 3), (2, 9), (4, 18)])
def test_every_group_of_values_occurs(strength, count):
    chosen = [ALL[i] for i in covering(ALL, strength)]
    for names in itertools.combinations(ALL[0], strength):
        assert {tuple(one[n] for n in names) for one in chosen} == {tuple(one[n] for n in names) for one in ALL}
    assert len(chosen) == count


def test_of_no_combination_none_is_left_out():
    assert covering([], 2) == set()
    assert covering(ALL[:1], 2) == {0}

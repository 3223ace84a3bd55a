"""benchmarks/report.py: numbers in words, tables from rows, and sentences that hold whether a target is met or not."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
from reporting import words  # noqa: E402  (found through the path above)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.51234, "0.512"), (9.996, "10.0"), (34.73, "34.7"), (1234.5, "1230"), (1e6, "1.0e6"), (5e-5, "5.0e-5")],
)
def test_three_digits(value, text):
    assert words.digits(value) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0.00005, "50.0 ns"), (0.0123, "12.3 µs"), (0.9996, "1.00 ms"), (34.73, "34.7 ms"), (118_500, "118 s")],
)
def test_durations_take_the_unit_that_leaves_a_number_from_one_on(ms, text):
    assert words.duration(ms) == text


def test_ranges_only_where_the_ends_differ_as_printed():
    assert words.span([3.9, 5.1, 4.0], words.times) == "3.90× to 5.10×"
    assert words.span([4.001, 4.002], words.times) == "4.00×"
    assert words.span(4.0, words.times) == "4.00×"


def test_lists_read_as_english():
    assert [words.listed(items) for items in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]


def test_tables_leave_out_empty_columns_and_escape_bars():
    lines = words.table(["case", "empty", "ms"], [["a|b", "", "1"], ["c", "", ""]])
    assert lines == ["| case | ms |", "| --- | ---: |", "| a\\|b | 1 |", "| c |  |"]

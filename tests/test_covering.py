"""Cases that are chosen from many combinations of parameters: of slow kernels, and of the fast tier."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import tiers
import torch
from tiers import covering

ALL = [
    {"shape": shape, "dtype": dtype, "kernel": "triton", "op": op}
    for shape in ((1, 2), (3, 4), (5, 6))
    for dtype in (torch.float32, torch.float64)
    for op in "abc"
]


@pytest.mark.parametrize(("strength", "count"), [(0, 1), (1, 3), (2, 10), (4, 18)])
def test_every_group_of_values_occurs(strength, count):
    chosen = [ALL[i] for i in covering(ALL, strength)]
    for names in itertools.combinations(ALL[0], strength):
        assert {tuple(case[n] for n in names) for case in chosen} == {tuple(case[n] for n in names) for case in ALL}
    assert len(chosen) == count
    assert covering(ALL[:1], strength) == {0} and covering([], strength or 1) == set()


NO_PLUGINS = [part for name in ("xdist", "cacheprovider", "benchmark") for part in ("-p", f"no:{name}")]
SUITE = """
import pytest

@pytest.mark.parametrize("kernel", ["torch", "cpp", "triton", "cuda"])
@pytest.mark.parametrize("cell", [object(), object()], ids=["a", "b"])
@pytest.mark.parametrize(("n", "m"), [(0, 0), (0, 1), (1, 1)])
def test_solve(kernel, cell, n, m): ...

@pytest.mark.covering(1)
@pytest.mark.parametrize("implementation", ["cpp", "emulated"])
@pytest.mark.parametrize("x", [0, 1])
@pytest.mark.parametrize("y", [0, 1])
def test_op(implementation, x, y): ...

@pytest.mark.covering(2)
@pytest.mark.parametrize("x", [0, 1])
@pytest.mark.parametrize("y", [0, 1])
def test_pairs(x, y): ...

@pytest.mark.tier("full")
class TestLong:
    def test_long(self): ...

    @pytest.mark.tier("fast")
    @pytest.mark.parametrize("x", ["short", pytest.param("long", marks=pytest.mark.tier("full"))])
    def test_fast(self, x): ...
"""


class Collected:
    """Tier of a run, and its tests."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tier = session.config.option.tier
        self.names = [item.nodeid.rpartition("::")[2] for item in session.items]


@pytest.fixture
def collect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Collect SUITE with these options; each call imports it again, by another name."""

    def collect(*options: str) -> Collected:
        folder = tmp_path / f"run{len([*tmp_path.iterdir()])}"
        folder.mkdir()
        (folder / f"test_{folder.name}.py").write_text(SUITE)
        (folder / "pytest.ini").write_text("[pytest]\ntestpaths = .")
        monkeypatch.chdir(folder)
        given = ["--collect-only", "--import-mode=importlib", *NO_PLUGINS, *options]
        assert pytest.main(given, plugins=[tiers, collected := Collected()]) == 0
        return collected

    return collect


def test_fast_and_rest_are_the_full_tier_which_tests_that_are_named_have(collect, capsys):
    default, left, named = collect(), collect("--rest"), collect(".")
    fast, rest, full = default.names, left.names, named.names
    assert f"tier fast: {len(rest)} tests left out, which --rest runs" in capsys.readouterr().out
    assert sorted(fast + rest) == sorted(full) and not set(fast) & set(rest)
    assert len(full) == len(set(full)) == 24 + 4 + 2 + 4 + 3
    chosen = [collect("-k", "op or solve"), collect("-m", "tier")]
    assert [run.tier for run in (default, left, named, *chosen)] == ["fast", "rest", "full", "full", "full"]

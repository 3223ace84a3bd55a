"""The docstrings: every example in them runs, and every public symbol has one."""

from __future__ import annotations

import doctest
import inspect

import pytest
import torch

import deqfast

# No example: types of results, queries of the machine, options of torch, and a module.
WITHOUT = {
    "Availability",
    "CellHooks",
    "Diagnosis",
    "NCResult",
    "backends",
    "package_options",
    "regularize",
    "release_memory",
}


def members(symbol: object) -> list[object]:
    """The symbol and, of a class, its public methods and properties."""
    own = vars(symbol) if inspect.isclass(symbol) else {}
    kinds = (property, classmethod, staticmethod)
    public = [member for name, member in own.items() if not name.startswith("_")]
    return [symbol, *(member for member in public if inspect.isfunction(member) or isinstance(member, kinds))]


def examples(name: str) -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True, recurse=False)
    scope = {"torch": torch, "deqfast": deqfast}
    found = [test for m in members(getattr(deqfast, name)) for test in finder.find(m, name, globs=scope)]
    return [test for test in found if test.examples]


@pytest.mark.filterwarnings("ignore:deqfast. in ")  # examples also show solves that do not converge
@pytest.mark.parametrize("name", deqfast.__all__)
def test_examples_run(name):
    tests = examples(name)
    assert tests or name in WITHOUT, f"deqfast.{name} has no example"
    for test in tests:
        torch.manual_seed(0)
        printed: list[str] = []
        doctest.DocTestRunner(verbose=False).run(test, out=printed.append)
        assert not printed, "".join(printed)


def test_every_public_symbol_is_documented():
    for name in deqfast.__all__:
        for member in members(getattr(deqfast, name)):
            assert inspect.getdoc(member), f"{name}: {member}"

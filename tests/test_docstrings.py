"""The docstrings: every example in them runs, and every public symbol has one."""

import doctest
import inspect

import pytest
import torch

import deqfast

# No example: types of results, queries of the machine, options of torch, and a module.
WITHOUT = {"Availability", "CellHooks", "Diagnosis", "NCResult", "backends", "package_options", "regularize"}
WITHOUT |= {"release_memory"}


def members(symbol: object) -> list[object]:
    """The symbol and, of a class, its public methods and properties."""
    own = vars(symbol) if inspect.isclass(symbol) else {}
    kinds = (property, classmethod, staticmethod)
    public = [member for name, member in own.items() if not name.startswith("_")]
    return [symbol, *(member for member in public if inspect.isfunction(member) or isinstance(member, kinds))]


@pytest.mark.filterwarnings("ignore:deqfast. in ")  # examples also show solves that do not converge
@pytest.mark.parametrize("name", deqfast.__all__)
def test_examples_run(name):
    finder, scope = doctest.DocTestFinder(exclude_empty=True, recurse=False), {"torch": torch, "deqfast": deqfast}
    symbols = members(getattr(deqfast, name))
    tests = [test for symbol in symbols for test in finder.find(symbol, name, globs=scope) if test.examples]
    assert all(map(inspect.getdoc, symbols)), f"deqfast.{name}, or a member of it, has no docstring"
    assert tests or name in WITHOUT, f"deqfast.{name} has no example"
    for test in tests:
        torch.manual_seed(0)
        printed: list[str] = []
        doctest.DocTestRunner(verbose=False).run(test, out=printed.append)
        assert not printed, "".join(printed)

"""The docstrings: every example in them runs, and none opens with a bare preposition."""

from __future__ import annotations

import ast
import doctest
import inspect
from pathlib import Path

import pytest
import torch

import deqfast

PACKAGE = Path(deqfast.__file__).parent
ROOT = PACKAGE.parent
FOLDERS = (PACKAGE, *(ROOT / name for name in ("kernels", "benchmarks", "experiments")))
PREPOSITIONS = {"At", "By", "For", "From", "In", "Of", "To", "With"}
# What a user meets first; each has an example.
MAIN = {
    "Anderson",
    "Broyden",
    "Cell",
    "DEQBlock",
    "FCCell",
    "Groups",
    "Implicit",
    "JFB",
    "LinearCell",
    "MonotoneCell",
    "NeuralCollapse",
    "Phantom",
    "Picard",
    "ResidualCell",
    "SHINE",
    "Solution",
    "SolveDropout",
    "Status",
    "Unrolled",
    "neural_collapse",
    "solve",
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


@pytest.mark.parametrize("name", deqfast.__all__)
def test_examples_run(name):
    tests = examples(name)
    assert tests or name not in MAIN, f"deqfast.{name} has no example"
    for test in tests:
        torch.manual_seed(0)
        printed: list[str] = []
        doctest.DocTestRunner(verbose=False).run(test, out=printed.append)
        assert not printed, "".join(printed)


def docstrings(path: Path) -> list[tuple[str, str]]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, documented)]
    return [(getattr(node, "name", "module"), text) for node in nodes if (text := ast.get_docstring(node))]


def test_docstrings_open_with_a_noun_or_a_verb():
    paths = [path for folder in FOLDERS for path in folder.rglob("*.py")]
    found = [(path, *documented) for path in paths for documented in docstrings(path)]
    assert len(found) > 300  # of an installed wheel: it has no benchmarks, no experiments
    bare = [(path, name, text) for path, name, text in found if text.split()[0] in PREPOSITIONS]
    assert [f"{path.name}: {name}: {text[:40]}" for path, name, text in bare] == []


def test_every_public_symbol_is_documented():
    for name in deqfast.__all__:
        for member in members(getattr(deqfast, name)):
            assert inspect.getdoc(member), f"{name}: {member}"

"""The layout of the package: what may import what, and where torch's private names are used."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "deqfast"
# Each package or module may import those of the lines above it, and itself.
LAYERS = [
    ("_checkout", "_extension", "_checks", "solution", "kernels", "torch_internals"),
    ("ops",),
    ("state", "metrics"),
    ("solvers", "regularize"),
    ("engine",),
    ("gradients", "cells"),
    ("transforms",),
    ("api",),
    ("diagnosis", "compat"),
]
MODULES = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
FOUND = {name.removesuffix(".__init__") for name in MODULES.values()}
PRIVATE = re.compile(r"\b(torch|functorch)(\.\w+)*\._(?!_)|\bfrom torch(\.\w+)*\._|import _\w+")


def imported(path: Path) -> set[str]:
    """Modules of the package that the module imports when it is imported itself."""
    tree, module = ast.parse(path.read_text()), MODULES[path].split(".")
    package = module[:-1]  # of __init__ too, whose last part is that name
    names = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            names |= {f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in FOUND} or {base}
    return {name if name in MODULES.values() else f"{name}.__init__" for name in names}


@pytest.mark.parametrize("layer", [name for names in LAYERS for name in names])
def test_nothing_climbs(layer):
    below = {
        name for names in LAYERS[: next(i for i, names in enumerate(LAYERS) if layer in names) + 1] for name in names
    }
    for path in MODULES:
        parts = MODULES[path].split(".")
        if parts[1] == layer:
            for name in imported(path):
                assert name.split(".")[1] in below | {"__init__"}, f"{MODULES[path]} imports {name}"


def test_every_part_has_its_layer():
    layers = {name for names in LAYERS for name in names} - {"kernels"}  # a folder of its own
    assert {name.split(".")[1] for name in MODULES.values()} - {"__init__"} == layers


# Whether a call is traced, transformed or exported is asked above the engine, once.
CONTEXT = re.compile(
    r"\b(is_exporting|is_tracing|outside_exports|in_torch_func|in_forward_mode|present_context|is_given_up)\b"
)


@pytest.mark.parametrize("folder", ["ops", "state", "solvers", "engine"])
def test_no_question_of_context(folder):
    asking = [
        MODULES[path] for path in MODULES if MODULES[path].split(".")[1] == folder and CONTEXT.search(path.read_text())
    ]
    assert not asking


def test_no_circle():
    needs = {MODULES[path]: imported(path) for path in MODULES}
    left = dict(needs)
    while free := [name for name, of in left.items() if not of & left.keys() - {name}]:
        for name in free:
            del left[name]
    assert not left, f"modules that import each other: {sorted(left)}"


def test_no_circle_hides_from_the_interpreter():
    # A package's __init__ imports lazily, and for types.
    hidden = [MODULES[path] for path in MODULES if path.stem != "__init__" and "TYPE_CHECKING" in path.read_text()]
    assert not hidden, f"modules that import for types only: {hidden}"


def test_private_names_of_torch_stand_in_one_package():
    for path in MODULES:
        if "torch_internals" in path.parts:
            continue
        found = [line for line in path.read_text().splitlines() if PRIVATE.search(line) and "deqfast" not in line]
        found = [line for line in found if not re.match(r"\s*(#|from \.)", line)]
        assert not found, f"{MODULES[path]}: {found}"

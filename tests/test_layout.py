"""The layout of the package: what may import what, and where torch's private names are used."""

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
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
PATHS = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
PRIVATE = re.compile(r"\b(torch|functorch)(\.\w+)*\._(?!_)|\bfrom torch(\.\w+)*\._|import _\w+")
# Whether a call is traced, transformed or exported is asked above the engine, once.
CONTEXT = re.compile(
    r"\b(is_exporting|is_tracing|outside_exports|in_torch_func|in_forward_mode|present_context|is_given_up)\b"
)


def part(module: str) -> str:
    return module.split(".")[1]


def imported(module: str) -> set[str]:
    """Modules of the package that the module imports when it is imported itself."""
    package, names = module.split(".")[:-1], set()  # of __init__ too, whose last part is that name
    for node in ast.parse(PATHS[module].read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            modules = {f"{base}.{alias.name}" for alias in node.names}
            names |= {name for name in modules if {name, f"{name}.__init__"} & PATHS.keys()} or {base}
    return {name if name in PATHS else f"{name}.__init__" for name in names}


def test_nothing_climbs_and_every_part_has_its_layer():
    parts = {part(module) for module in PATHS} - {"__init__"}
    assert parts == RANK.keys() - {"kernels"}  # a folder of its own
    climbing = [
        f"{module} imports {name}"
        for module in PATHS
        for name in imported(module)
        if part(module) in parts and part(name) != "__init__" and RANK[part(name)] > RANK[part(module)]
    ]
    assert not climbing


@pytest.mark.parametrize("folder", ["ops", "state", "solvers", "engine"])
def test_no_question_of_context(folder):
    assert not [name for name, path in PATHS.items() if part(name) == folder and CONTEXT.search(path.read_text())]


def test_no_circle():
    left = {module: imported(module) for module in PATHS}
    while free := [name for name, needs in left.items() if not needs & left.keys() - {name}]:
        for name in free:
            del left[name]
    assert not left, f"modules that import each other: {sorted(left)}"


def test_no_circle_hides_from_the_interpreter():
    # A package's __init__ imports lazily, and for types.
    assert not [name for name, path in PATHS.items() if path.stem != "__init__" and "TYPE_CHECKING" in path.read_text()]


def test_private_names_of_torch_stand_in_one_package():
    outside = [path for path in PATHS.values() if "torch_internals" not in path.parts]
    lines = [f"{path.name}: {line}" for path in outside for line in path.read_text().splitlines()]
    suspect = [line for line in lines if PRIVATE.search(line) and "deqfast" not in line]
    assert not [line for line in suspect if not re.search(r": \s*(#|from \.)", line)]

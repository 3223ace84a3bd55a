"""Whether the extensions were built from the sources of this checkout."""

from __future__ import annotations

import runpy
from pathlib import Path

from deqfast import _extension

SETUP = Path(__file__).resolve().parents[2] / "setup.py"


def stale_extensions() -> list[str]:
    """The extension modules that are loaded and were built from other sources, with what to do about it."""
    digest = runpy.run_path(str(SETUP))["digest"]
    modules = {"cpu": _extension.cpp_module, "cuda": _extension.cuda_module}
    return [
        f"{module.__name__} was built from other sources than csrc/ has: install deqfast again (pip install -e .)"
        for device, module in modules.items()
        if module is not None and module.build_info().get("sources") != digest(device)
    ]

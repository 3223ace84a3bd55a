"""Whether the extensions were built from the sources of this checkout."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

from deqfast import _extension

SETUP = Path(__file__).resolve().parents[2] / "setup.py"
NO_SETUPTOOLS = "of which sources the extensions were built cannot be told without setuptools: pip install setuptools"


def stale_extensions() -> list[str]:
    """The extension modules that are loaded and were built from other sources, with what to do about it.

    Where setup.py cannot be asked, that is said instead.
    """
    modules = {"cpu": _extension.cpp_module, "cuda": _extension.cuda_module}
    loaded = {device: module for device, module in modules.items() if module is not None}
    if not loaded:
        return []
    if importlib.util.find_spec("setuptools") is None:
        return [NO_SETUPTOOLS]
    digest = runpy.run_path(str(SETUP))["digest"]
    return [
        f"{module.__name__} was built from other sources than csrc/ has: install deqfast again (pip install -e .)"
        for device, module in loaded.items()
        if module.build_info().get("sources") != digest(device)
    ]

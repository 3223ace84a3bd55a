"""Triton's interpreter: without a GPU it is used, from the import of this module on.

Import this before deqfast: triton reads TRITON_INTERPRET when it is imported, and torch's compiler imports it.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def keep_patches() -> None:
    """Let the interpreter replace the functions of Triton's language once for each module of kernels.

    Else it does so at every call of a function by another, which takes half of its time.
    """
    from triton.runtime import interpreter

    patch, patched, kept = interpreter._patch_lang, set[int](), SimpleNamespace(restore=lambda: None)

    def patch_once(function: Callable[..., Any]) -> Any:
        if (module := id(function.__globals__)) not in patched:
            patch(function)
            patched.add(module)
        return kept

    interpreter._patch_lang = patch_once


if INTERPRETED and find_spec("triton"):
    keep_patches()

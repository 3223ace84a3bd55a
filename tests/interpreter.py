"""Triton's interpreter: without a GPU it is used, from the import of this module on.

Import this before deqfast: triton reads TRITON_INTERPRET when it is imported, and torch's compiler imports it.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

"""Choice of triton's interpreter where there is no GPU, made before anything imports triton.

triton reads the variable when it decorates a function, its own library's at its import, and importing deqfast imports
triton through torch. So this module is the first that conftest.py imports.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

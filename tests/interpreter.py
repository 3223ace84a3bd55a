"""Whether triton interprets: without a GPU it does, from the import of this module on.

To be imported before deqfast: triton reads TRITON_INTERPRET when it decorates its own functions, that is when it is
imported, which torch's compiler does.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

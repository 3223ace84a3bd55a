"""Path to the Triton kernels of a checkout.

They are in ../kernels and are installed as deqfast.kernels. A run from the checkout, without an install, finds them
through the package's path. The path must be extended before anything imports the kernels.
"""

import sys
from pathlib import Path

_root = Path(__file__).resolve().parent.parent
CHECKOUT = _root if (_root / "csrc").is_dir() and (_root / "kernels").is_dir() else None
if CHECKOUT is not None:
    sys.modules["deqfast"].__path__.append(str(CHECKOUT))

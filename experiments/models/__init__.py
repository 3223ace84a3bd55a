"""Known models as fixed points, one module each, next to explicit twins."""

import runs  # noqa: F401  # first: it says which packages are missing

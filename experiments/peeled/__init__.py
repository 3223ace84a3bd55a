"""Layer-peeled problems of Sun & Shi (NeurIPS 2024): numerical optima, with which the paper's theorems are compared."""

import runs  # noqa: F401  # first: it says which packages are missing

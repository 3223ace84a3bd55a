"""Separation and bias of deep equilibrium models (Wu et al., NeurIPS 2024), each experiment with its exact check."""

import runs  # noqa: F401  # first: it says which packages are missing

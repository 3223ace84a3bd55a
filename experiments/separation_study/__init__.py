"""Separation and bias of deep equilibrium models (Wu et al., NeurIPS 2024): experiments, each beside its exact check."""

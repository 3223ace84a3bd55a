"""Separation and bias of deep equilibrium models (Wu et al., NeurIPS 2024), each experiment beside its exact check."""

"""Separation and bias of deep equilibrium models (Wu et al., NeurIPS 2024), each experiment with its exact check."""

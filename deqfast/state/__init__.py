"""State of a solve: its rows, samples, norms and rounding."""

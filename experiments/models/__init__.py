"""Known models as fixed points, one module each, next to explicit twins."""

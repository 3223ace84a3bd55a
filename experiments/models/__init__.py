"""Known models as fixed points, one module each, beside explicit twins."""

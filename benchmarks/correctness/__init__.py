"""What is correct, for tests and benchmarks: tolerances, problems with known solutions, random arguments of the ops."""

from .problems import PROBLEMS, FixedPoint, linear, tanh
from .tolerances import (
    ACCURACY_UNITS,
    FINITE_DIFFERENCES,
    GRADIENT,
    ITERATES,
    OPERATIONS,
    WELL_CONDITIONED,
    accuracy,
    after_solve,
    amplification,
    assert_accurate,
    assert_close,
    bounds,
    lost,
    relative_error,
    rounding,
)

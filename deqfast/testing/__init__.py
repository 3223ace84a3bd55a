"""Helpers that tests and benchmarks share: tolerances, problems, random states of the ops, compiled code."""

from .problems import PROBLEMS, SOLVERS, FixedPoint, Recorder, assert_solves, linear, non_normal, sawtooth, tanh
from .tolerances import (
    ACCURACY_FACTOR,
    ACCURACY_UNITS,
    FINITE_DIFFERENCES,
    GRADIENT,
    ITERATES,
    NEGLIGIBLE_RIDGE,
    ROUNDING_UNITS,
    accuracy,
    assert_accurate,
    assert_close,
    relative_error,
    rounding,
    solved,
)

__all__ = [
    "ACCURACY_FACTOR",
    "ACCURACY_UNITS",
    "FINITE_DIFFERENCES",
    "FixedPoint",
    "GRADIENT",
    "ITERATES",
    "NEGLIGIBLE_RIDGE",
    "PROBLEMS",
    "ROUNDING_UNITS",
    "Recorder",
    "SOLVERS",
    "accuracy",
    "assert_accurate",
    "assert_close",
    "assert_solves",
    "linear",
    "non_normal",
    "relative_error",
    "rounding",
    "sawtooth",
    "solved",
    "tanh",
]

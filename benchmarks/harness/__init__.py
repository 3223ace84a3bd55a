"""Common parts of the benchmark suites, the gate and the report."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "experiments"))  # `recording`, `runs` and `nc_study`, for scripts

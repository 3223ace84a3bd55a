"""Common parts of the benchmark suites, the gate and the report."""

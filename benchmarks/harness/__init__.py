"""What the benchmark suites, the gate and the report share."""

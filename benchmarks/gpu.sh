#!/usr/bin/env bash
# Runs on a GPU, in calls of limited time: benchmarks/gpu.sh --help.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD:$PWD/benchmarks:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" benchmarks/gpu.py "$@"

#!/usr/bin/env bash
# Proof with a GPU: build, test, look for memory errors and races, measure; one table last. See --help.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'TEXT'
usage: bash benchmarks/gpu.sh [--dry-run] [--json FILE] [--help]

Builds the extensions for the GPU at hand, runs the tests on it, runs every CUDA op under compute-sanitizer, and
measures kernels, solves, cells, training steps and metrics against their byte floors and against torchdeq. Needs a
machine with a GPU, torch, triton, nvcc and a C++ compiler; no network. Takes less than ten minutes. A stage that fails
or hangs is named in the table and does not stop the others; the exit status is 1 then.

  --dry-run    tiny shapes on the CPU, to see that the script works; writes no results but to --json
  --json FILE  where the results go (default: benchmarks/results/<gpu>.json, of a dry run a temporary file)

Variables:
  PYTHON          the interpreter (python3)
  DEQFAST_WHEELS  a folder of wheels, installed beside the interpreter's packages for this run: what is missing there
                  (torchdeq, pytest, pytest-timeout, hypothesis, torchmetrics, pybind11, ninja, setuptools>=77;
                  pytest-xdist, if it is there, runs the tests side by side)
  DEQFAST_COMMIT  the commit to record where there is no git
  OUT             a folder that also receives the results, the table and the log
TEXT
}

die() { printf 'gpu.sh: %s\n' "$1" >&2; exit 2; }

dry_run=false
json=
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage; exit 0 ;;
    --dry-run) dry_run=true ;;
    --json) [ $# -ge 2 ] || die "--json needs a file"; json=$2; shift ;;
    *) die "unknown argument '$1'; --help lists the arguments" ;;
  esac
  shift
done
python=${PYTHON:-python3}
command -v "$python" >/dev/null || die "PYTHON: '$python' is no command"
[ -z "$json" ] || [ -d "$(dirname "$json")" ] || die "--json: '$(dirname "$json")' is not a folder"
[ -z "${DEQFAST_WHEELS:-}" ] || [ -d "$DEQFAST_WHEELS" ] || die "DEQFAST_WHEELS: '$DEQFAST_WHEELS' is not a folder"
[ -z "${OUT:-}" ] || [ -d "$OUT" ] || die "OUT: '$OUT' is not a folder"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
out=${OUT:-$work}
stages=$work/stages
log=$out/gpu.log
: >"$stages"
: >"$log"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

device=cuda
if $dry_run; then device=cpu; fi

# limit WANTED RESERVED: a time limit that leaves the stages to come the seconds reserved for them, of 560 in all.
limit() {
  local left=$((560 - SECONDS - $2))
  if [ "$left" -gt "$1" ]; then left=$1; fi
  if [ "$left" -lt 20 ]; then left=20; fi
  echo "$left"
}

record() { # stage, outcome, seconds, note
  printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$(tr '\t\n' '  ' <<<"$4" | sed 's/===*//g; s/^ *//; s/ *$//')" | tee -a "$stages"
}

# run STAGE LIMIT COMMAND...: its output to the log, its outcome to the table; `note_of STAGE FILE` says what to note.
run() {
  local stage=$1 limit=$2 started=$SECONDS status=0 outcome=ok
  shift 2
  timeout --kill-after=10 "$limit" "$@" >"$work/$stage.log" 2>&1 || status=$?
  case $status in
    0) ;;
    124 | 137) outcome="FAILED, stopped after $limit s" ;;
    *) outcome="FAILED, status $status" ;;
  esac
  { printf '== %s\n' "$stage"; cat "$work/$stage.log"; } >>"$log"
  record "$stage" "$outcome" $((SECONDS - started)) "$(note_of "$stage" "$work/$stage.log")"
  [ "$status" -eq 0 ] || tail -n 15 "$work/$stage.log"
}

note_of() {
  case $1 in
    environment) tail -n 1 "$2" ;;
    measure) grep 'rows have a problem' "$2" || true ;;
    tests)
      grep -E '[0-9]+ (passed|failed|error|skipped).* in [0-9.]+s' "$2" | tail -n 1 ||
        echo "no summary: $(grep -c PASSED "$2" || true) passed, $(grep -cE 'FAILED|ERROR' "$2" || true) failed up to there"
      ;;
  esac
}

environment() {
  git rev-parse HEAD 2>/dev/null || echo "commit ${DEQFAST_COMMIT:-unknown}"
  nvcc --version 2>/dev/null | grep release || echo "nvcc is not on the PATH"
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit \
    --format=csv 2>/dev/null || echo "no nvidia-smi"
  "$python" - <<'TEXT'
import importlib.util
import os
import sys
from importlib.metadata import version

import torch

needed = ("numpy", "torchmetrics", "triton", "pytest", "pytest_timeout", "hypothesis", "torchdeq", "pybind11", "ninja")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if int(version("setuptools").split(".")[0]) < 77:
    missing.append(f"setuptools>=77 (there is {version('setuptools')})")
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
without = f"; missing: {', '.join(missing)}" if missing else ""
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {os.cpu_count()} cores, {gpu}{without}")
TEXT
}

wheels() {
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$work/site" \
    "$DEQFAST_WHEELS"/*.whl
}

# In place: needs neither a network nor the right to write to the interpreter's folders.
build() {
  local capability
  if $dry_run; then
    if "$python" -c 'import deqfast, sys; sys.exit(not deqfast.backends()["cpp"])'; then
      echo "the CPU extension is there"
      return
    fi
    DEQFAST_BUILD=cpu "$python" setup.py build_ext --inplace
    return
  fi
  capability=$("$python" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())')
  MAX_JOBS=$(nproc) TORCH_CUDA_ARCH_LIST=$capability DEQFAST_BUILD=cuda "$python" setup.py build_ext --inplace
  "$python" -c 'import deqfast, sys; state = deqfast.backends()["cuda"]; print(state); sys.exit(not state)'
}

# What needs no GPU is left out: emulated kernels, compilation for other machines, packaging, the study's scripts.
tests() {
  local arguments=(-v --tb=short -p no:cacheprovider --durations=15)
  if $dry_run; then
    "$python" -m pytest "${arguments[@]}" tests/test_packing.py
    return
  fi
  if "$python" -c 'import xdist' 2>/dev/null; then arguments+=(-n 8); fi
  "$python" -m pytest "${arguments[@]}" tests -k "not emulated" --ignore tests/csrc --ignore tests/kernels/test_aot.py \
    --ignore tests/experiments --ignore tests/test_packaging.py --ignore tests/test_gpu_script.py
}

# One tool of compute-sanitizer. Memory is not pooled, so that every tensor has bounds of its own.
sanitize_with() {
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout --kill-after=10 "$1" compute-sanitizer --tool "$2" --error-exitcode 99 \
    --report-api-errors no "$python" benchmarks/sanitize.py
}

# Findings are failures; a tool that cannot work on this machine is not. A program that an error has stopped returns its
# own status, so what counts is the tool's summary.
sanitizer_outcome() { # tool, status, its log, seconds
  local tool=$1 status=$2 output=$3 seconds=$4 summary outcome
  summary=$(grep -E 'SUMMARY|not supported|Error:' "$output" | tail -n 1 || true)
  if grep -qi 'not supported' "$output"; then
    outcome="not usable here"
  elif [ "$status" -eq 99 ] || grep -qE 'ERROR SUMMARY: [1-9]' "$output"; then
    outcome="FAILED, errors found"
  elif [ "$status" -eq 0 ]; then
    outcome=ok
  elif [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then
    outcome="not finished in time"
  else
    outcome="not usable here"
    summary="status $status: $summary"
  fi
  record "$tool" "$outcome" "$seconds" "$summary"
  case $outcome in FAILED*) { grep '=====' "$output" || true; } | head -n 15 ;; esac
  { printf '== %s\n' "$tool"; cat "$output"; } >>"$log"
}

sanitizers() { # LIMIT
  local tool started=$SECONDS tools=(memcheck racecheck initcheck synccheck)
  if $dry_run; then
    run sanitize.py "$1" "$python" benchmarks/sanitize.py --device cpu
    return
  fi
  run sanitize.py "$(limit 60 220)" "$python" benchmarks/sanitize.py
  if ! command -v compute-sanitizer >/dev/null; then
    record compute-sanitizer "not usable here" 0 "it is not on the PATH"
    return
  fi
  for tool in "${tools[@]}"; do
    (
      status=0
      sanitize_with "$1" "$tool" >"$work/$tool.log" 2>&1 || status=$?
      echo "$status $((SECONDS - started))" >"$work/$tool.status"
    ) &
  done
  wait
  for tool in "${tools[@]}"; do
    read -r status seconds <"$work/$tool.status"
    sanitizer_outcome "$tool" "$status" "$work/$tool.log" "$seconds"
  done
}

export -f environment wheels build tests
export python dry_run work
in_shell() { printf '%s' "set -euo pipefail; $1"; }

if [ -n "${DEQFAST_WHEELS:-}" ]; then
  run wheels 60 bash -c "$(in_shell wheels)"
  export PYTHONPATH="$work/site:$PYTHONPATH"
else
  record wheels skipped 0 "DEQFAST_WHEELS is not set: the interpreter's packages are used"
fi
run environment 60 bash -c "$(in_shell environment)"
run build 200 bash -c "$(in_shell build)"
run tests "$(limit 170 300)" bash -c "$(in_shell tests)"
sanitizers "$(limit 75 220)"
measures=$out/measures.json
seconds=$(limit 300 0)
run measure "$((seconds + 10))" "$python" benchmarks/gpu.py --json "$measures" --device "$device" --seconds "$seconds" \
  $($dry_run && echo --dry-run)

results=()
if [ -n "$json" ]; then results+=(--results "$json"); fi
if $dry_run; then
  if [ -z "$json" ]; then results+=(--results "$(mktemp --suffix .json)"); fi
else
  if [ -z "$json" ]; then mkdir -p benchmarks/results; results+=(--results benchmarks/results); fi
  if [ -n "${OUT:-}" ]; then results+=(--results "$OUT"); fi
fi
printf '\n'
"$python" benchmarks/gpu_report.py --stages "$stages" --measures "$measures" "${results[@]}" | tee "$out/table.txt"
rm -f "$measures"
! grep -q $'\tFAILED' "$stages"

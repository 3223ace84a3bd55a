#!/usr/bin/env bash
# Checks on a GPU: build, smoke, measure, memcheck, tests, sanitizers; it ends with tables in every case. See --help.
set -euo pipefail
cd "$(dirname "$0")/.."
phases=(build smoke measure memcheck tests sanitizers)
ops=(tests/test_steps.py tests/test_fc.py tests/test_norm_act.py tests/test_shine.py
  tests/test_neural_collapse_ops.py)

usage() {
  cat <<'TEXT'
usage: bash benchmarks/gpu.sh [--dry-run] [--out FOLDER] [--help] [PHASE ...]

On a machine with a GPU, torch, triton, nvcc, a C++ compiler and compute-sanitizer, without a network:
  build       150 s  the CUDA extension for this GPU, in place, unless one of these sources exists
  smoke        90 s  compares every kernel with the reference
  measure     500 s  `pytest benchmarks --device cuda`, with a process and a record per part
  memcheck     90 s  compute-sanitizer watches benchmarks/first_look.py --few, a fourth of the CUDA kernels' cases
  tests       330 s  the other tests that a GPU runs; an H100 with 16 cores took 120 s
  sanitizers  240 s  the same under racecheck, initcheck and synccheck, 80 s each
A call lasts at most DEQFAST_SECONDS (570). Without PHASE it starts afresh with the first three phases. `gpu.sh tests
memcheck sanitizers` is a second call, which adds to the log. Tests fail, and are not skipped, if the GPU or its
kernels are absent. `gpu.sh measure` continues with the parts that have no record yet. If a test failed or time ran
out, the record is a .json.part, and the part is measured again. The table at the end names the failures; the exit
status is then 1. benchmarks/report.py reports the records of runs/gpu that are copied to benchmarks/results.

  --out FOLDER  folder of records, log and table (runs/gpu)
  --dry-run     tiny cases on the CPU, to test the script

Variables:
  PYTHON          the interpreter (python3)
  DEQFAST_WHEELS  a folder of wheels, installed for this run in addition to the interpreter's packages: those of
                  torchdeq, pytest, pytest-benchmark, pytest-timeout, hypothesis, torchmetrics, ninja and
                  setuptools>=77 that are missing (pytest-xdist, if available, runs the tests in parallel)
  DEQFAST_COMMIT  the commit to record, if the files are a copy without git's data
  DEQFAST_SECONDS the time limit of a call
TEXT
}

die() { printf 'gpu.sh: %s\n' "$1" >&2; exit 2; }

dry_run=false out=runs/gpu wanted=()
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage; exit 0 ;;
    --dry-run) dry_run=true ;;
    --out) [ $# -ge 2 ] || die "--out needs a folder"; out=$2; shift ;;
    -*) die "unknown argument '$1'; --help lists the arguments" ;;
    *) [[ " ${phases[*]} " == *" $1 "* ]] || die "'$1' is not a phase: ${phases[*]}"; wanted+=("$1") ;;
  esac
  shift
done
python=${PYTHON:-python3}
command -v "$python" >/dev/null || die "PYTHON: '$python' is not a command"
[ -d "${DEQFAST_WHEELS:-.}" ] || die "DEQFAST_WHEELS: '$DEQFAST_WHEELS' is not a folder"
mkdir -p "$out"
if [ ${#wanted[@]} -eq 0 ]; then
  wanted=(build smoke measure)
  rm -f "$out"/{cpu,cuda}_*.json{,.part} "$out/gpu.log"
fi

work=$(mktemp -d)
: >"$work/stages"
export DEQFAST_REQUIRE=cuda,triton PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
device=cuda
if $dry_run; then device=cpu DEQFAST_REQUIRE=; fi

# step NAME SECONDS COMMAND...: the output goes to the log, the outcome and the last line to the table.
step() {
  local name=$1 limit=$2 left=$((${DEQFAST_SECONDS:-570} - SECONDS)) started=$SECONDS status=0 outcome
  shift 2
  if [ "$left" -lt "$limit" ]; then limit=$left; fi
  if [ "$limit" -lt 5 ]; then
    printf '%s\tFAILED, no time left\n' "$name" | tee -a "$work/stages"
    return
  fi
  timeout --kill-after=10 "$limit" "$@" >"$work/log" 2>&1 || status=$?
  { printf '== %s\n' "$name"; cat "$work/log"; } >>"$out/gpu.log"
  case $status in
    0) outcome=ok ;;
    124 | 137) outcome="FAILED, stopped after $limit s" ;;
    *) outcome="FAILED, status $status" ;;
  esac
  printf '%s\t%s\t%s s\t%s\n' "$name" "$outcome" $((SECONDS - started)) "$(tail -n 1 "$work/log" | cut -c 1-120)" |
    tee -a "$work/stages"
  [ "$status" -eq 0 ] || tail -n 15 "$work/log"
}

# pytest NAME SECONDS ARGUMENTS...; side_by_side uses several processes, if pytest-xdist is installed.
pytest() {
  step "$1" "$2" "$python" -m pytest --quiet --tb=short -p no:cacheprovider "${@:3}"
}

side_by_side() {
  local workers=()
  if "$python" -c 'import xdist' 2>/dev/null; then workers=(-n "$(($(nproc) < 12 ? $(nproc) : 12))"); fi
  pytest "$1" "$2" "${workers[@]}" "${@:3}"
}

finish() { # the tables, also if the script is stopped; status 1 if something failed
  {
    "$python" benchmarks/report.py --show "$out" || true
    printf '\n'
    cat "$work/stages"
  } | tee "$out/table.txt"
  if grep -q $'\tFAILED' "$work/stages"; then failed=1; else failed=0; fi
  rm -rf "$work"
  exit "$failed"
}
trap finish EXIT
trap 'exit 1' INT TERM

if [ -n "${DEQFAST_WHEELS:-}" ]; then
  step wheels 60 "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
    --target "$work/site" "$DEQFAST_WHEELS"/*.whl
  export PYTHONPATH="$work/site:$PYTHONPATH"
fi

build() { # in place: it needs neither a network nor write access to the interpreter's folders
  if $dry_run; then return; fi
  step build 150 env DEQFAST_BUILD=cuda MAX_JOBS="$(nproc)" bash -euc '
    TORCH_CUDA_ARCH_LIST=$("$0" -c "import torch; print(\"%d.%d\" % torch.cuda.get_device_capability())")
    export TORCH_CUDA_ARCH_LIST
    current="import deqfast._extension as built, setup; assert built.cuda_module, built.cuda_reason
assert built.cuda_module.build_info()[\"sources\"] == setup.digest(\"cuda\"), \"built of other sources\""
    "$0" -c "$current" || "$0" setup.py build_ext --inplace
    "$0" -c "import deqfast, sys; state = deqfast.backends()[\"cuda\"]; print(state); sys.exit(not state)"' "$python"
}

smoke() {
  if $dry_run; then pytest smoke 60 tests/test_packing.py; return; fi
  DEQFAST_SMOKE=1 side_by_side smoke 90 tests/kernels/test_triton_steps.py "${ops[@]}" \
    -k "(cuda or triton) and not emulated"
}

measure() { # a stopped GPU or a hanging kernel costs one part only
  local part parts=(nc ops solves training options study_step) record what
  if $dry_run; then parts=(ops nc); fi
  for part in "${parts[@]}"; do
    record=$out/${device}_$part.json
    if [ -e "$record" ]; then
      printf 'measure-%s\tkept\t%s\n' "$part" "$record" | tee -a "$work/stages"
      continue
    fi
    case $part in
      study_step) what=(benchmarks/test_study_step.py --full -k 64-128) ;;
      solves) what=(benchmarks/test_suite.py -m "solves or fc or cells") ;;
      *) what=(benchmarks/test_suite.py -m "$part") ;;
    esac
    if $dry_run; then what+=(--small); fi
    pytest "measure-$part" 200 \
      "${what[@]}" --device "$device" --record "$record"
    if [ -e "$record" ] && tail -n 1 "$work/stages" | grep -q $'\tFAILED'; then mv "$record" "$record.part"; fi
  done
}

memcheck() { sanitize memcheck 90; }

sanitizers() {
  local tool
  for tool in racecheck initcheck synccheck; do sanitize $tool 80; done
}

# sanitize TOOL SECONDS: without a memory pool, so that every tensor has its own bounds.
sanitize() {
  local look=("$python" benchmarks/first_look.py --few --kernel)
  if $dry_run; then step "$1" "$2" "${look[@]}" torch --only 301x37; return; fi
  if ! command -v compute-sanitizer >/dev/null; then
    printf '%s\tFAILED, no compute-sanitizer here\n' "$1" | tee -a "$work/stages"
    return
  fi
  step "$1" "$2" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 99 \
    --report-api-errors no "${look[@]}" cuda
}

tests() { # on the device, without emulation, ahead-of-time compilation, packaging and studies
  if $dry_run; then pytest tests 60 tests/test_packing.py; return; fi
  side_by_side tests 330 tests -k "(cuda or triton or graphs) and not emulated" --ignore tests/csrc \
    --ignore tests/kernels/test_aot.py --ignore tests/experiments --ignore tests/benchmarks \
    --ignore tests/test_packaging.py --ignore tests/test_gpu_script.py
}

for phase in "${wanted[@]}"; do $phase; done

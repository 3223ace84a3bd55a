#!/usr/bin/env bash
# Proof with a GPU: build, smoke, measure, memcheck, tests; a table last, whatever happened. See --help.
set -euo pipefail
cd "$(dirname "$0")/.."
phases=(build smoke measure memcheck tests sanitizers)

usage() {
  cat <<'TEXT'
usage: bash benchmarks/gpu.sh [--from PHASE] [--dry-run] [--json FILE] [--help] [PHASE ...]

On a machine with a GPU, torch, triton, nvcc and a C++ compiler, without a network, in ten minutes at most:
  build       the CUDA extension for the GPU at hand, in place
  smoke       a minute of tests: does every kernel compute what it should
  measure     `pytest benchmarks --device cuda`, a process for every file of it
  memcheck    compute-sanitizer watches every CUDA op
  tests       the other tests that need a GPU
  sanitizers  the same ops under racecheck, initcheck and synccheck
PHASEs named are run, else all. A phase that fails or has no time left is named in the table, which is always printed;
the exit status is 1 then. What was measured is kept as soon as it is there.

  --from PHASE  this phase and those after it
  --dry-run     tiny cases on the CPU, to see that the script works; writes no results but to --json
  --json FILE   where the results go (default: benchmarks/results/<gpu>.json, of a dry run a temporary file)

Variables:
  PYTHON          the interpreter (python3)
  DEQFAST_WHEELS  a folder of wheels, installed beside the interpreter's packages for this run: what is missing there
                  (torchdeq, pytest, pytest-benchmark, pytest-timeout, hypothesis, torchmetrics, pybind11, ninja,
                  setuptools>=77; pytest-xdist, if it is there, runs the tests side by side)
  DEQFAST_COMMIT  the commit to record where there is no git
  OUT             a folder that also receives the results, the table and the log
TEXT
}

die() { printf 'gpu.sh: %s\n' "$1" >&2; exit 2; }

is_phase() { [[ " ${phases[*]} " == *" $1 "* ]] || die "'$1' is no phase, only: ${phases[*]}"; }

dry_run=false json='' wanted=()
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage; exit 0 ;;
    --dry-run) dry_run=true ;;
    --json) [ $# -ge 2 ] || die "--json needs a file"; json=$2; shift ;;
    --from)
      [ $# -ge 2 ] || die "--from needs a phase"
      is_phase "$2"
      after=" ${phases[*]} " && read -ra wanted <<<"$2 ${after#*" $2 "}"
      shift ;;
    -*) die "unknown argument '$1'; --help lists the arguments" ;;
    *) is_phase "$1"; wanted+=("$1") ;;
  esac
  shift
done
[ ${#wanted[@]} -gt 0 ] || wanted=("${phases[@]}")
python=${PYTHON:-python3}
command -v "$python" >/dev/null || die "PYTHON: '$python' is no command"
[ -z "$json" ] || [ -d "$(dirname "$json")" ] || die "--json: '$(dirname "$json")' is not a folder"
for name in DEQFAST_WHEELS OUT; do
  [ -z "${!name:-}" ] || [ -d "${!name}" ] || die "$name: '${!name}' is not a folder"
done

work=$(mktemp -d)
out=${OUT:-$work}
log=$out/gpu.log
: >"$work/stages"
: >"$log"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
device=cuda
if $dry_run; then device=cpu; fi

# step NAME LIMIT COMMAND...: its output to the log, its outcome and its last line to the table; LIMIT within the 570 s.
step() {
  local name=$1 limit=$2 left=$((570 - SECONDS)) started=$SECONDS status=0 outcome=ok
  shift 2
  if [ "$left" -lt "$limit" ]; then limit=$left; fi
  if [ "$limit" -lt 5 ]; then
    status=1 outcome="FAILED, no time left"
  else
    timeout --kill-after=10 "$limit" "$@" >"$work/$name.log" 2>&1 || status=$?
    case $status in
      0) ;;
      124 | 137) outcome="FAILED, stopped after $limit s" ;;
      *) outcome="FAILED, status $status" ;;
    esac
    if [ -n "${tolerated:-}" ] && grep -qi "$tolerated" "$work/$name.log"; then status=0 outcome="not usable here"; fi
    { printf '== %s\n' "$name"; cat "$work/$name.log"; } >>"$log"
  fi
  printf '%s\t%s\t%s\t%s\n' "$name" "$outcome" $((SECONDS - started)) \
    "$(tail -n 1 "$work/$name.log" 2>/dev/null | tr '\t=' ' ' | cut -c 1-120)" | tee -a "$work/stages"
  [ "$status" -eq 0 ] || tail -n 15 "$work/$name.log" 2>/dev/null || true
}

pytest() { # NAME LIMIT ARGUMENTS...
  step "$1" "$2" "$python" -m pytest --quiet --tb=short -p no:cacheprovider "${@:3}"
}

finish() { # the table, also where the script is stopped; 1 where something failed
  "$python" benchmarks/gpu_table.py --stages "$work/stages" --parts "$work" --out "$out" \
    ${json:+--json "$json"} $($dry_run && echo --dry-run) | tee "$out/table.txt"
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

build() { # in place: needs neither a network nor the right to write to the interpreter's folders
  local kind=cuda name=cuda
  if $dry_run; then kind=cpu name=cpp; fi
  if ! $dry_run || ! "$python" -c 'import deqfast, sys; sys.exit(not deqfast.backends()["cpp"])'; then
    step build 200 env DEQFAST_BUILD=$kind MAX_JOBS="$(nproc)" bash -c 'if [ "$DEQFAST_BUILD" = cuda ]; then
      export TORCH_CUDA_ARCH_LIST=$("$0" -c "import torch; print(\"%d.%d\" % torch.cuda.get_device_capability())")
      fi; exec "$0" setup.py build_ext --inplace' "$python"
  fi
  step environment 60 "$python" -c "import sys, torch, deqfast
state = deqfast.backends()['$name']
print(f'Python {sys.version.split()[0]}, torch {torch.__version__}, $name: {state}')
sys.exit(not state)"
}

smoke() {
  if $dry_run; then pytest smoke 300 tests/test_packing.py; return; fi
  pytest smoke 60 -x tests/kernels tests/test_broyden_step.py tests/test_fc.py tests/test_norm_act.py \
    --ignore tests/kernels/test_aot.py -k "cuda or triton"
}

measure() { # a GPU that an error has stopped, or a kernel that hangs, costs one file only
  local part
  if $dry_run; then
    pytest measure-all 300 benchmarks --device cpu --small --record "$work/all.json"
    return
  fi
  for part in ops solvers neural_collapse training options; do
    pytest "measure-$part" 150 "benchmarks/test_$part.py" --device cuda --record "$work/$part.json"
  done
  pytest measure-study_step 100 benchmarks/test_study_step.py --device cuda --full -k 64-128-jfb \
    --record "$work/study_step.json"
}

memcheck() { sanitize memcheck 120; }

sanitizers() {
  local tool
  if $dry_run; then return; fi
  for tool in racecheck initcheck synccheck; do sanitize $tool 75; done
}

sanitize() { # TOOL LIMIT; memory is not pooled, so that every tensor has bounds of its own
  local watch=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 99
    --report-api-errors no)
  if $dry_run; then
    watch=()
  elif ! command -v compute-sanitizer >/dev/null; then
    printf '%s\tnot usable here\t0\tcompute-sanitizer is not on the PATH\n' "$1" | tee -a "$work/stages"
    return
  fi
  tolerated="not supported" step "$1" "$2" "${watch[@]}" "$python" benchmarks/sanitize.py --device $device
}

tests() { # what needs no GPU is left out: emulated kernels, compilation for other machines, packaging, the study
  local workers=()
  if $dry_run; then pytest tests 300 tests/test_packing.py; return; fi
  if "$python" -c 'import xdist' 2>/dev/null; then workers=(-n 8); fi
  pytest tests 300 "${workers[@]}" tests -k "not emulated" --ignore tests/csrc --ignore tests/kernels/test_aot.py \
    --ignore tests/experiments --ignore tests/test_packaging.py --ignore tests/test_gpu_script.py
}

for phase in "${wanted[@]}"; do $phase; done

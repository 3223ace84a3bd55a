#!/usr/bin/env bash
# Parts of the last amendment of protocol.md, on one GPU; each goes on where it stopped. See --help.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'TEXT'
usage: bash experiments/parts.sh [--seconds N] [--jobs N] PART ...

PART, in the protocol's order, with the seconds that an H100 is expected to take (no part has run on a GPU yet):
  rates        190 s  60 trials choose each arm's rate: experiments/results/rates.json
  mechanism  2,240 s  240 runs, eight arms: normalisation, equilibrium, tying or gradient?
  decay        300 s  36 runs with another decay (exploratory)
  settings   2,200 s  180 runs: all twenty settings of Tables 1 to 4
  printed      345 s  4 runs at width 64 with the paper's printed recipe
  size       1,500 s  45 runs at width 64

All parts but printed need rates.json. A part that N seconds stop goes on with the same command; epochs in progress
are lost. Checkpoints of finished runs are removed, their final weights are kept.

  --seconds N  end after N seconds in all (570)
  --jobs N     runs at a time (16; of width 64 at most 8)

Variables: DATA (folder of the CIFAR files: data), OUT (folder of the runs: runs/parts), PYTHON (python3)
TEXT
}

die() { printf 'parts.sh: %s\n' "$1" >&2; exit 2; }

parts=" rates mechanism decay settings printed size " seconds=570 jobs=16 wanted=()
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage; exit 0 ;;
    --seconds | --jobs)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || die "$1 ${2:-}: a whole number above 0"
      if [ "$1" = --seconds ]; then seconds=$2; else jobs=$2; fi
      shift ;;
    *) [[ $parts == *" $1 "* ]] || die "$1: one of$parts"; wanted+=("$1") ;;
  esac
  shift
done
[ ${#wanted[@]} -gt 0 ] || die "which part? one of$parts"
data=${DATA:-data} out=${OUT:-runs/parts} python=${PYTHON:-python3} status=0
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if command -v nvidia-cuda-mps-control >/dev/null; then nvidia-cuda-mps-control -d || true; fi

for part in "${wanted[@]}"; do
  left=$((seconds - SECONDS)) started=$SECONDS code=0
  [ "$left" -gt 0 ] || { printf '%s: not begun, no time left\n' "$part"; status=1; continue; }
  case $part in printed | size) at_once=$((jobs < 8 ? jobs : 8)) ;; *) at_once=$jobs ;; esac
  timeout --signal=TERM --kill-after=20 "$left" "$python" experiments/study.py --protocol "$part" --threads 1 \
    --jobs "$at_once" --no-report --data-root "$data" --out "$out" || code=$?
  find "$out" -name result.json -printf '%h/last.ckpt\n' 2>/dev/null | xargs -r rm -f
  case $code in 0) word=finished ;; 124) word='to be continued' ;; *) word="failed, status $code" ;; esac
  printf '%s: %s after %s s\n' "$part" "$word" $((SECONDS - started))
  [ "$code" -eq 0 ] || status=1
done
exit "$status"

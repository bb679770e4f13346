#!/bin/bash
# On a machine with an NVIDIA GPU: builds the extension for it, runs the GPU tests, times the operator, and runs
# compute-sanitizer over a small grid. Every part has its own limit, 8 minutes in all; logs go to $OUT (default: a new
# folder). Ends with one line for each part.
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-$(mktemp -d)}
PYTHON=${PYTHON:-python3}
export PATH=$PATH:/usr/local/cuda/bin
export MAX_JOBS=${MAX_JOBS:-16} TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0} PYTHONUNBUFFERED=1
find "${TORCH_EXTENSIONS_DIR:-$HOME/.cache/torch_extensions}" -name lock -delete 2>/dev/null

summary=""
part() {  # part NAME SECONDS COMMAND...: run with a limit, keep the log, note how it ended
  local name=$1 limit=$2 start=$SECONDS code
  shift 2
  timeout "$limit" "$@" >"$OUT/$name.log" 2>&1
  code=$?
  summary+="$name: exit $code after $((SECONDS - start)) s"$'\n'
  return $code
}

if ! part build 150 "$PYTHON" setup.py build_ext --inplace; then
  tail -40 "$OUT/build.log"
  printf '%s' "$summary"
  exit 1
fi
tests=tests/mamba_ssm/ops/test_selective_scan_native.py
part tests 100 "$PYTHON" -m pytest -q --import-mode=importlib -p no:cacheprovider --durations=5 -m "gpu and not slow" $tests
part bench 90 "$PYTHON" benchmarks/bench_selective_scan.py --device cuda --profile
cp benchmarks/results/selective_scan_nvidia_*.json "$OUT/" 2>/dev/null
exercise="$PYTHON csrc/selective_scan/exercise.py --device cuda"
part memcheck 70 compute-sanitizer --tool memcheck --error-exitcode 9 $exercise
part racecheck 80 compute-sanitizer --tool racecheck --error-exitcode 9 $exercise
tail -25 "$OUT/tests.log"
grep -v '^---' "$OUT/bench.log" | cut -c1-200
tail -3 "$OUT/memcheck.log" "$OUT/racecheck.log"
printf '%s' "$summary"

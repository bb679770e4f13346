#!/bin/sh
# Builds the C++ part with the address and undefined-behaviour sanitizers in a copy of the tree and runs exercise.py.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r "$root/csrc" "$root/mamba_ssm" "$root/setup.py" "$copy"
rm -f "$copy"/mamba_ssm/ops/_native_ext*
cd "$copy"
MAMBA_SANITIZE=address,undefined MAMBA_SKIP_CUDA=1 python setup.py -q build_ext --inplace
# Python leaks by design; what torch does before the first operator is not ours.
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 OMP_NUM_THREADS=2
preload="$(${CXX:-c++} -print-file-name=libasan.so) $(${CXX:-c++} -print-file-name=libubsan.so)"
for capability in default avx2 avx512; do
  echo "instruction set: $capability"
  LD_PRELOAD="$preload" ATEN_CPU_CAPABILITY=$capability python csrc/selective_scan/exercise.py --device cpu
done

#!/usr/bin/env bash
# Builds a folder that runs tests and benches on any GPU host, without cargo or a network there:
#
#     benches/pack_gpu.sh [FOLDER]          here; then, there:  FOLDER/run.sh [tests|soak|faults|sanitizer|python|benches|bridges|fits|general|ranks ...]
#
# The host needs a driver, NVRTC (SOK_NVRTC, or CUDA's own), and for `python` Python 3.10+ with pytest, Keras 3.12+ and PyTorch or JAX.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-target/gpu}
mkdir -p "$folder"

newest() { find "target/$1/deps" -maxdepth 1 -name "$2-*" -executable -type f -printf '%T@ %p\n' | sort -n | tail -1 | cut -d' ' -f2; }
cargo test -q -p sok-cuda --no-run
cargo bench -q -p sok-cuda --no-run
install -s "$(newest debug conformance)" "$folder/conformance"
for bench in dump find growth lookup policies ranks shapes step; do install -s "$(newest release "$bench")" "$folder/$bench"; done
cc -O1 -shared -fPIC -o "$folder/libcuda.so" crates/cuda/tests/faults/driver.c -ldl
rm -f "$folder"/*.whl
if command -v maturin >/dev/null; then maturin build -q --release -o "$folder"; else
  make -s .venv/package.done && .venv/bin/maturin build -q --release -o "$folder"; fi
rm -rf "$folder/tests" "$folder/examples" "$folder/docs"
cp -r tests examples docs benches/gpu_latency.py benches/gpu_bridge.py benches/gpu_fit.py benches/gpu_ranks.py benches/turns.py benches/run_gpu.sh "$folder"
mkdir -p "$folder/benches"
cp benches/{general,keras_step,native_step,turns,work}.py "$folder/benches"
mv "$folder/run_gpu.sh" "$folder/run.sh"
git rev-parse --short HEAD > "$folder/commit"
echo "$folder is ready"

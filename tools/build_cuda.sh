#!/bin/bash
# Compile csrc/fmha with nvcc, and print the registers and shared memory of each kernel. Only OPS=fmha uses these kernels.
#   [CUDA_ARCHS="8.0;9.0;10.0"] tools/build_cuda.sh [FILE]
# FILE is the library to write; the default is where OPS=fmha looks for it. CUDA_ARCHS are compute capabilities; newer
# GPUs translate the first one's code at first use.
set -euo pipefail

pytorch_dir="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/benchmarks/bert/implementations/pytorch"
export PYTHONPATH="${pytorch_dir}${PYTHONPATH:+:${PYTHONPATH}}"

if ! command -v nvcc >/dev/null; then
    echo "build_cuda.sh: no nvcc on PATH. Install the CUDA toolkit; only OPS=fmha needs it." >&2
    exit 2
fi
target="${1:-$(python3 -c 'from mlbert.ops import fmha; print(fmha.library_path())')}"
IFS=';' read -r -a architectures <<<"${CUDA_ARCHS:-8.0;9.0;10.0}"
targets=(-gencode "arch=compute_${architectures[0]//./},code=compute_${architectures[0]//./}")
for architecture in "${architectures[@]//./}"; do
    targets+=(-gencode "arch=compute_${architecture},code=sm_${architecture}")
done

mkdir -p "$(dirname "${target}")"
folder="$(mktemp -d "$(dirname "${target}")/.build-XXXXXX")"
trap 'rm -rf "${folder}"' EXIT
nvcc -std=c++17 -O3 -shared -Xcompiler -fPIC -Xptxas -v "${targets[@]}" "${pytorch_dir}"/csrc/fmha/*.cu -o "${folder}/fmha.so"
mv "${folder}/fmha.so" "${target}"
echo "${target}"

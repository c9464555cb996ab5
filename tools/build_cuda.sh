#!/bin/bash
# Compiles csrc/fmha with nvcc for the compute capabilities in CUDA_ARCHS (default "8.0;9.0;10.0"; newer ones translate
# the first at their first use) into the place where OPS=fmha looks for it, or into the file given. It prints what each
# kernel takes of registers and shared memory. Nothing else needs these kernels.
set -euo pipefail

pytorch_dir="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/benchmarks/bert/implementations/pytorch"
export PYTHONPATH="${pytorch_dir}${PYTHONPATH:+:${PYTHONPATH}}"

if ! command -v nvcc >/dev/null; then
    echo "build_cuda.sh: no nvcc on PATH. Install the CUDA toolkit, or do without: only OPS=fmha needs it." >&2
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

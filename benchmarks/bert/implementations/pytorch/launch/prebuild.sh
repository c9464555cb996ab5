#!/bin/bash
# Compile csrc/ for this machine's processor; other processors recompile it at first use. With CUDA_ARCHS, such as
# "8.0;9.0;10.0", also compile every Triton kernel for these GPUs, as a check of the image's Triton: no GPU is needed, and a
# run compiles its own kernels at first use. The Dockerfile calls this.
set -euo pipefail

pytorch_dir="$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="${pytorch_dir}${PYTHONPATH:+:${PYTHONPATH}}"

python3 - <<'PYTHON'
import torch  # the OpenMP runtime that the kernels share

from mlbert.host import native
from mlbert.data.formats import tfrecord_native
from mlbert.ops import native_library

native.load("ops", native_library.SOURCES)
native.load("optim", ["optim.c"])
native.load("wordpiece", ["wordpiece.c"], openmp=False)
native.load("instances", ["instances.c"], openmp=False)
native.load("tfrecord", tfrecord_native.SOURCES, openmp=False)
native.load("mhalib", ["matmul.c"], openmp=False, folder=native.MHALIB_FOLDER)
print(native.status())
PYTHON

[[ -n "${CUDA_ARCHS:-}" ]] || exit 0
if ! python3 -c 'import triton' 2>/dev/null; then
    echo "This torch has no Triton: nothing to compile for CUDA_ARCHS=${CUDA_ARCHS}."
    exit 0
fi
IFS=';' read -r -a architectures <<<"${CUDA_ARCHS//./}" # 90 for 9.0
python3 "${pytorch_dir}/../../../../tools/compile_kernels.py" --arch "${architectures[@]}"

#!/bin/bash
# Test and measure what needs a GPU, in two calls of at most 420 and 240 seconds; see docs/gpu.md.
#   [OUT=DIR] tools/gpu_check.sh --call 1|2 [--out DIR] [--first DIR/call1.jsonl] [--parts turns-bert,...] [--dry-run]
# PYTHON names the interpreter (default: .venv of this tree, else python3). It needs torch, numpy, h5py and triton;
# pytest and hypothesis for the tests, transformers for the comparison.
# Exit code: 0 success, 1 something failed, 2 no GPU.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source-path=SCRIPTDIR source=choose_python.sh
source "${root}/tools/choose_python.sh"
arguments=()
[[ -n "${OUT:-}" ]] && arguments=(--out "${OUT}")
exec "${python}" -m gpu_check.main "${arguments[@]}" "$@"

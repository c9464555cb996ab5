#!/bin/bash
# Measure what only a node with several GPUs can tell, in about 10 minutes, and write one text file to send back.
#   tools/site_check.sh [--config CONFIG] [--out FILE] [--seconds 45] [--dry-run]
# PYTHON names the interpreter (default: .venv of this tree, else python3). Without a container or Slurm: run it on the
# node itself, or as `srun --gpus-per-node=8 --cpus-per-task=64 tools/site_check.sh`. See docs/gpu.md.
# Exit code: 0 success, 1 something failed, 2 wrong input.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source-path=SCRIPTDIR source=choose_python.sh
source "${root}/tools/choose_python.sh"
exec "${python}" -m site_check "$@"

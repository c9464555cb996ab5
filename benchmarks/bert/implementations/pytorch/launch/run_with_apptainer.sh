#!/bin/bash
# Run NEXP experiments on this machine in an Apptainer or Singularity image, one after another:
#   source config_<system>.sh && CONT=<image>.sif ../pytorch/launch/run_with_apptainer.sh
# Settings are those of run.sub for one node.
set -euo pipefail

case "${1:-}" in
-h | --help) sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}" && exit 0 ;;
?*) echo "error: run_with_apptainer.sh takes no arguments ($1): export settings." >&2 && exit 2 ;;
esac

: "${CONFIG_FILE:?is not set: source a config_<system>.sh first}"
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

mlbert_once() {
    "${apptainer_command[@]}" "${PYTHON:-python3}" -m mlbert "$@"
}

check_settings
((DGXNNODES == 1)) || fail "DGXNNODES=${DGXNNODES}, but this starts one node. Use run.sub."
[[ "${CONT:-}" == *.sif ]] || fail "CONT=${CONT:-} is not a .sif. docs/docker.md makes it: CONT=<image>.sif ../pytorch/launch/run_with_apptainer.sh"
CONT="$(realpath --canonicalize-missing --no-symlinks "${CONT}")"
[[ -f "${CONT}" && -r "${CONT}" ]] || fail "CONT=${CONT} is not a readable file here. docs/docker.md makes it."
choose_python
choose_mounts
choose_apptainer_command "${system_dir}"
identify_image
train_on_this_machine "${apptainer_command[@]}"

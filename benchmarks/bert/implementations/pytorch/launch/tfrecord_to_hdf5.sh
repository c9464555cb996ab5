#!/bin/bash
# Convert all TFRecord files of a folder to fixed-length HDF5 shards as NVIDIA's scripts do, 36,280 sequences each:
#   TF_INPUT_DIR=DIR HDF5_OUTPUT_DIR=DIR tfrecord_to_hdf5.sh
# Started again, it continues where it was interrupted.
set -euo pipefail

fail() {
    echo "error: $*" >&2
    exit 2
}

for name in TF_INPUT_DIR HDF5_OUTPUT_DIR; do
    [[ -n "${!name:-}" ]] || fail "${name} is not set. Usage: TF_INPUT_DIR=DIR HDF5_OUTPUT_DIR=DIR ./run_trans_tfrecord_to_hdf5.sh"
done
command -v mlbert >/dev/null || fail "mlbert is not in PATH. Run ./quickstart.sh once and source .venv/bin/activate, or pip install the tree."
exec mlbert prepare export-nvidia --input "${TF_INPUT_DIR}" --out "${HDF5_OUTPUT_DIR}" --layout fixed

#!/bin/bash
# TF_INPUT_DIR=<TFRecord files> HDF5_OUTPUT_DIR=<HDF5 shards> ./run_trans_tfrecord_to_hdf5.sh
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/../pytorch/launch/tfrecord_to_hdf5.sh"

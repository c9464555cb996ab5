#!/bin/bash
# PYTHON=<python> DGXSYSTEM=<system> INPUT_DIR=<bins> EVAL_DIR=<samples> CHECKPOINTDIR_PHASE1=<weights> NEXP=10 ./run_multinode.sh [--mpirun]
set -euo pipefail
export hosts=('192.168.16.1' '192.168.16.2')
source "$(dirname "${BASH_SOURCE[0]}")/../pytorch/launch/run_hosts.sh"

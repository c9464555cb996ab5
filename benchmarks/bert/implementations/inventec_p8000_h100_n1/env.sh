# Site settings of Inventec's P8000 (8 H100) and P9000 (8 B200): image, paths and srun arguments. Edit this file for your site, not the configs.
# shellcheck shell=bash source-path=SCRIPTDIR source=../pytorch/launch/begin_system.sh
source "$(dirname "${BASH_SOURCE[0]:-$0}")/../pytorch/launch/begin_system.sh"

# The image made with `docker build` and `enroot import` (README.md); without this line, jobs use the nodes' Python.
export CONT=/mnt/sqsh/bert_ngc23.09_pyt.sqsh
export SRUN_ARGS=--gres=gpu:8

# Written by ./input_preprocessing/prepare_data.sh --outputdir /mnt/mlperf/bert_data --packed-data.
data_dir=/mnt/mlperf/bert_data
export DATADIR_PHASE2="${data_dir}/packed"
export EVALDIR="${data_dir}/eval"
export INIT_CHECKPOINT="${data_dir}/checkpoint/model.safetensors"

export LOGDIR="${tree_dir}/runs/${DGXSYSTEM}"
export TIMED=1 # a submission: an interrupted run is recorded as aborted, never continued
export MLPERF_SUBMISSION_ORG="Inventec Corporation"
export MLPERF_DIVISION=closed

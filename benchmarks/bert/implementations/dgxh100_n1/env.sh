# Site settings of one DGX H100: image, paths and srun arguments. Edit this file for your site, not the configs.
# shellcheck shell=bash source-path=SCRIPTDIR source=../pytorch/launch/begin_system.sh
source "$(dirname "${BASH_SOURCE[0]:-$0}")/../pytorch/launch/begin_system.sh"

# The image built as in docs/docker.md; without this line, jobs use the nodes' Python.
export CONT=/data/images/mlbert.sqsh
export SRUN_ARGS=--gres=gpu:8

# Written by launch/prepare_data.sh --outputdir /data/bert --packed.
data_dir=/data/bert
export DATADIR_PHASE2="${data_dir}/packed"
export EVALDIR="${data_dir}/eval"
export INIT_CHECKPOINT="${data_dir}/checkpoint/model.safetensors"

export LOGDIR="${tree_dir}/runs/${DGXSYSTEM}"
export TIMED=1 # a submission: an interrupted run is recorded as aborted, never continued
export MLPERF_SUBMISSION_ORG=your_organization
export MLPERF_SUBMISSION_PLATFORM=dgxh100_n1
export MLPERF_DIVISION=closed

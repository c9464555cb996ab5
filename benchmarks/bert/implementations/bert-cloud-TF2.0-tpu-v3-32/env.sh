# Site settings of one cloud machine and its TPU v3-32: name and paths. Edit this file for your site.
# shellcheck shell=bash source-path=SCRIPTDIR source=../pytorch/launch/begin_system.sh
source "$(dirname "${BASH_SOURCE[0]:-$0}")/../pytorch/launch/begin_system.sh"

export TPU=your_tpu

data_dir=/data
export INPUT_FILES="${data_dir}/tfrecords3_500_parts/part-*"
export EVAL_FILES="${data_dir}/eval_10k"
export DATADIR_PHASE2="${data_dir}/tfrecords3_500_parts"
export EVALDIR="${data_dir}/tfrecords3_500_parts"
export INIT_CHECKPOINT="${data_dir}/bert_mlperf_data/model.ckpt-28252"

export LOGDIR="${tree_dir}/runs/${DGXSYSTEM}"
export TIMED=1 # a submission: an interrupted run is recorded as aborted, never continued
export MLPERF_SUBMISSION_ORG=your_organization
export MLPERF_SUBMISSION_PLATFORM=bert-cloud-TF2.0-tpu-v3-32
export MLPERF_DIVISION=closed

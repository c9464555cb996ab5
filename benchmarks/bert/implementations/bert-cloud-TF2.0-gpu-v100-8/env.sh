# Site settings of one cloud machine with 8 V100: image, paths and srun arguments. Edit this file for your site.
# shellcheck shell=bash source-path=SCRIPTDIR source=../pytorch/launch/begin_system.sh
source "$(dirname "${BASH_SOURCE[0]:-$0}")/../pytorch/launch/begin_system.sh"

# An image with TensorFlow for CUDA; without this line, runs use the machine's Python.
export CONT=/data/images/mlbert_tensorflow.sqsh
export SRUN_ARGS=--gres=gpu:8

data_dir=/data
export INPUT_FILES="${data_dir}/tfrecords3_500_parts/part-*"
export EVAL_FILES="${data_dir}/eval_10k"
export DATADIR_PHASE2="${data_dir}/tfrecords3_500_parts"
export EVALDIR="${data_dir}/tfrecords3_500_parts"
export INIT_CHECKPOINT="${data_dir}/bert_mlperf_data/model.ckpt-28252"

export LOGDIR="${tree_dir}/runs/${DGXSYSTEM}"
export TIMED=1 # a submission: an interrupted run is recorded as aborted, never continued
export MLPERF_SUBMISSION_ORG=your_organization
export MLPERF_SUBMISSION_PLATFORM=bert-cloud-TF2.0-gpu-v100-8
export MLPERF_DIVISION=closed

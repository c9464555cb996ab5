# Site settings of ModernBERT's systems: image, paths and srun arguments. Edit this file for your site, not the configs.
# shellcheck shell=bash source-path=SCRIPTDIR source=../pytorch/launch/begin_system.sh
source "$(dirname "${BASH_SOURCE[0]:-$0}")/../pytorch/launch/begin_system.sh"

# The image built as in docs/docker.md; without this line, jobs use the nodes' Python.
export CONT=/data/images/mlbert.sqsh
export SRUN_ARGS=--gres=gpu:8

# Texts or token ids in MDS shards, and the tokenizer that they are read with.
data_dir=/data/modernbert
export DATADIR_PHASE2="${data_dir}/train"
export EVALDIR="${data_dir}/validation"
export TOKENIZER="${data_dir}/tokenizer"
export INIT_CHECKPOINT=none

export LOGDIR="${tree_dir}/runs/${DGXSYSTEM}"
export MAX_RESTARTS=100 # a run of days continues after a lost rank, if it made progress
export MLPERF_SUBMISSION_ORG=your_organization
export MLPERF_DIVISION=open

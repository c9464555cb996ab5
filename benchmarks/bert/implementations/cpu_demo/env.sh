# Paths and submitter for a CPU machine that runs the demonstration. Sourced by the configs of this folder.
# shellcheck shell=bash source-path=SCRIPTDIR source=../pytorch/launch/begin_system.sh
source "$(dirname "${BASH_SOURCE[0]:-$0}")/../pytorch/launch/begin_system.sh"

export DATADIR_PHASE2="${tree_dir}/runs/quickstart/data/train"
export EVALDIR="${tree_dir}/runs/quickstart/data/eval"
export LOGDIR="${tree_dir}/runs/${DGXSYSTEM}"
export MLPERF_SUBMISSION_ORG=mlbert
export MLPERF_SUBMISSION_PLATFORM=cpu_demo
export MLPERF_DIVISION=open

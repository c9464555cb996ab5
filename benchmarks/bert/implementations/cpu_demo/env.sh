# Site facts of a CPU machine that runs the demonstration: where things lie. Sourced by the configs beside it.
# shellcheck shell=bash disable=SC2034  # the configs use pytorch_dir

system_dir="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
pytorch_dir="$(cd "${system_dir}/../pytorch" && pwd)"
tree_dir="$(cd "${system_dir}/../../../.." && pwd)"
# shellcheck source-path=SCRIPTDIR source=../pytorch/launch/reset_settings.sh
source "${pytorch_dir}/launch/reset_settings.sh"

# A config sources this file, so the next entry of the call stack is that config: its name is the run's name.
export CONFIG_FILE="${system_dir}/${BASH_SOURCE[1]##*/}"
DGXSYSTEM="$(basename "${CONFIG_FILE}" .sh)"
export DGXSYSTEM="${DGXSYSTEM#config_}"

export DATADIR_PHASE2="${tree_dir}/runs/quickstart/data/train"
export EVALDIR="${tree_dir}/runs/quickstart/data/eval"
export LOGDIR="${tree_dir}/runs/${DGXSYSTEM}"
export MLPERF_SUBMISSION_ORG=mlbert
export MLPERF_SUBMISSION_PLATFORM=cpu_demo
export MLPERF_DIVISION=open

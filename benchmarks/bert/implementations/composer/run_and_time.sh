#!/bin/bash
# Run one of MosaicML's configs of MLPerf Training v2.1 ten times, and collect the logs as a submission in DIR.
#   run_and_time.sh -c|--config baseline|methods [-o|--mlperf_root_dir DIR] [-s|--seed N] [-t|--timestamp T]
#                   [--skip_env_setup] [--skip_data_setup] [--wandb]
#   -o   folder for results/8xA100_80GB-<config>/bert/result_<i>.txt (default: runs/composer of the tree)
#   -s   seed of run 0, incremented for each further run (default: each run draws its own)
#   -t   part of the runs' names (default: the current time)
#   --skip_env_setup    use the active Python, and install nothing
#   --skip_data_setup   do not check for data and weights first
#   --wandb             log to Weights & Biases, project WANDB_PROJECT or mlperf
# Exported settings (NEXP, DGXNGPU, DATADIR_PHASE2, LR ...) win over config and setup.sh.
# shellcheck disable=SC2034,SC2329  # common.sh reads these variables, and calls start, collected and mlbert_once
set -euo pipefail

here="$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
pytorch_dir="$(cd "${here}/../pytorch" && pwd)"
config="" results_root="" timestamp="" env_setup=1 data_setup=1

usage_error() {
    echo "error: run_and_time.sh: $*. Usage: run_and_time.sh -c baseline|methods [-o DIR] [-s N] [-t T] [--skip_env_setup] [--skip_data_setup] [--wandb]" >&2
    exit 2
}

while (($#)); do
    word="$1"
    shift
    case "${word}" in
    -c | --config | -o | --mlperf_root_dir | -s | --seed | -t | --timestamp)
        (($#)) || usage_error "${word} needs a value"
        case "${word}" in
        -c | --config) config="$1" ;;
        -o | --mlperf_root_dir) results_root="$1" ;;
        -s | --seed) export SEED="$1" ;;
        -t | --timestamp) timestamp="$1" ;;
        esac
        shift
        ;;
    --skip_env_setup) env_setup=0 ;;
    --skip_data_setup) data_setup=0 ;;
    --wandb) export WANDB_PROJECT="${WANDB_PROJECT:-mlperf}" ;;
    *) usage_error "${word} is unknown" ;;
    esac
done
[[ -n "${config}" ]] || usage_error "--config is missing"
config_file="${here}/../8xA100_80GB-${config}/config.yaml"
[[ "${config}" != */* && -f "${config_file}" ]] || usage_error "there is no config ${config}"
[[ "${SEED:-0}" =~ ^[0-9]+$ ]] || usage_error "--seed ${SEED} is not a whole number"
timestamp="${timestamp:-$(date +%Y%m%d%H%M%S)}"
[[ "${timestamp}" =~ ^[A-Za-z0-9._-]+$ ]] || usage_error "--timestamp ${timestamp} is not allowed in a file name"
[[ -z "${CONFIG_FILE:-}" ]] || usage_error "${CONFIG_FILE} is sourced in this shell; start this from another one"

# shellcheck source-path=SCRIPTDIR source=setup.sh
source "${here}/setup.sh"
results_root="${results_root:-${here}/../../../../runs/composer}"
export LOGDIR="${LOGDIR:-${results_root}/runs/bert-${config}-${timestamp}}"
RECIPE=masked_lm MLPERF_SUBMISSION_PLATFORM="8xA100_80GB-${config}" COLLECT_RESULTS=1
CONFIG_FILE="${here}/../8xA100_80GB-${config}/config.yaml" # not exported: the trainer gets it with --config
# shellcheck source-path=SCRIPTDIR source=../pytorch/launch/common.sh
source "${pytorch_dir}/launch/common.sh"
config_file="${system_dir}/config.yaml"

collected() {
    echo "${results_root}/results/${MLPERF_SUBMISSION_PLATFORM}/bert/result_$1.txt"
}

mlbert_once() {
    "${PYTHON:-python3}" -m mlbert "$@"
}

# Start the ranks of one run.
start() {
    export CACHES_CLEARED=false RUN_NAME="bert-${config}-${timestamp}-${EXPERIMENT}"
    if enabled CLEAR_CACHES 1 && "${launch_dir}/drop_caches.sh"; then
        CACHES_CLEARED=true
    fi
    mlbert_once launch local -n "${DGXNGPU}" "${here}/train.py" --config "${config_file}"
}

if ((env_setup)) && [[ -z "${PYTHON:-}${VIRTUAL_ENV:-}" ]]; then
    # shellcheck source-path=SCRIPTDIR source=../pytorch/launch/setup_venv.sh
    source "${launch_dir}/setup_venv.sh"
    setup_venv "${tree_dir}" bert || exit 2
fi
if ((data_setup)); then
    for name in DATADIR_PHASE2 EVALDIR INIT_CHECKPOINT BERT_CONFIG; do
        [[ "${!name}" == none || -e "${!name}" ]] || fail "${name}=${!name} does not exist. Create it (composer/README.md), or export ${name}."
    done
fi
check_settings
choose_python
((DGXNGPU == 8)) || say "warning: ${DGXNGPU} ranks, but the published batch of 448 is 8 ranks x 56."
for i in "${experiments[@]}"; do
    if is_finished "${i}"; then
        say "run ${i} is already finished."
        continue
    fi
    train_on "${i}" "$(hostname)" start
done
mlbert_once report "${LOGDIR}" || failed=1
exit "${failed}"

#!/bin/bash
# One experiment: empties the page cache where that is permitted, then trains with the sourced configuration.
#   source config_<system>.sh && ../pytorch/launch/run_and_time.sh [flags of `mlbert train`]
# Under srun or mpirun it is one rank; otherwise it starts all ranks of this machine.
set -euo pipefail

for name in CONFIG_FILE DGXNGPU RECIPE LOGDIR; do
    if [[ -z "${!name:-}" ]]; then
        echo "error: ${name} is not set. Source a config first: cd benchmarks/bert/implementations/<system> && source config_<system>_<...>.sh" >&2
        exit 2
    fi
done
system_dir="$(dirname "${CONFIG_FILE}")"
if [[ ! -f "${system_dir}/run_pretraining.py" ]]; then
    echo "error: ${system_dir}/run_pretraining.py does not exist. CONFIG_FILE must lie in a system folder." >&2
    exit 2
fi

launch_dir="$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source-path=SCRIPTDIR source=processes.sh
source "${launch_dir}/processes.sh"

# A launcher that dropped the caches of every host has said so; one task of a node is enough, and rank 0, whose log it
# is, is always the first of its node.
if [[ -z "${CACHES_CLEARED:-}" && "${LOCAL_RANK:-${SLURM_LOCALID:-${OMPI_COMM_WORLD_LOCAL_RANK:-0}}}" == 0 ]]; then
    export CACHES_CLEARED=false
    if [[ "${CLEAR_CACHES:-1}" =~ ^(1|yes|true|on)$ ]] && "${launch_dir}/drop_caches.sh"; then
        CACHES_CLEARED=true
    fi
fi

python="${PYTHON:-python3}"
command=("${python}" "${system_dir}/run_pretraining.py")
if [[ "${BIND_CPUS:-$((processes > 1))}" =~ ^(1|yes|true|on)$ ]]; then
    command=("${launch_dir}/bind.sh" "${command[@]}")
fi
# A rank that is stopped does not hear that Slurm asks it to leave, and Slurm's own patience (KillWait) is half a minute.
if [[ -n "${SLURM_STEP_ID:-}" ]]; then
    (
        trap '' USR1
        trap 'timeout 8 tail --pid=$$ --sleep-interval=0.5 --follow /dev/null || kill -KILL $$' TERM
        tail --pid=$$ --sleep-interval=5 --follow /dev/null &
        wait
    ) </dev/null &>/dev/null &
fi
# Nobody else has started the ranks of this machine: torchrun does. NODE_RANK says which one of several machines it is.
if [[ -z "${SLURM_STEP_ID:-}${OMPI_COMM_WORLD_SIZE:-}${PMI_SIZE:-}${WORLD_SIZE:-}" ]]; then
    if [[ -n "${NODE_RANK:-}" && "${RECIPE}" == tensorflow2 ]] && ((DGXNNODES > 1)); then
        command+=("--worker_hosts=${HOSTS//,/:${MASTER_PORT},}:${MASTER_PORT}" "--task_index=${NODE_RANK}")
    elif [[ -n "${NODE_RANK:-}" ]] && ((DGXNNODES > 1)); then
        nodes=(--nnodes="${DGXNNODES}" --node-rank="${NODE_RANK}" --master-addr="${MASTER_ADDR}" --master-port="${MASTER_PORT}")
        command=("${python}" -m mlbert launch ranks "${nodes[@]}" --nproc-per-node="${processes}" --no-python "${command[@]}")
    elif ((processes > 1)); then
        command=("${python}" -m mlbert launch ranks --standalone --nproc-per-node="${processes}" --no-python "${command[@]}")
    fi
fi
exec "${command[@]}" "$@"

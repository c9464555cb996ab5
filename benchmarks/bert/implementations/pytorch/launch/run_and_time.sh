#!/bin/bash
# Run one experiment: drop the page cache if permitted, then train with the sourced configuration.
#   source config_<system>.sh && ../pytorch/launch/run_and_time.sh [flags of `mlbert train`]
# Under srun or mpirun this is one rank; otherwise it starts all ranks of this machine.
set -euo pipefail

for name in CONFIG_FILE DGXNGPU RECIPE LOGDIR; do
    if [[ -z "${!name:-}" ]]; then
        echo "error: ${name} is not set. Source a config first: cd benchmarks/bert/implementations/<system> && source config_<system>_<...>.sh" >&2
        exit 2
    fi
done
system_dir="$(dirname "${CONFIG_FILE}")"
if [[ ! -f "${system_dir}/run_pretraining.py" ]]; then
    echo "error: ${system_dir}/run_pretraining.py does not exist. CONFIG_FILE must be in a system folder." >&2
    exit 2
fi

launch_dir="$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source-path=SCRIPTDIR source=processes.sh
source "${launch_dir}/processes.sh"

# CACHES_CLEARED is set if the launcher dropped the caches of every host. Otherwise the first task of each node does; rank 0,
# which writes the log, is always the first of its node.
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
# A suspended rank does not react to Slurm's SIGTERM, and Slurm itself waits half a minute (KillWait) before it kills.
if [[ -n "${SLURM_STEP_ID:-}" ]]; then
    (
        trap '' USR1
        trap 'timeout 8 tail --pid=$$ --sleep-interval=0.5 --follow /dev/null || kill -KILL $$' TERM
        tail --pid=$$ --sleep-interval=5 --follow /dev/null &
        wait
    ) </dev/null &>/dev/null &
fi
# No launcher has started the ranks of this machine, so torchrun does. NODE_RANK is the machine's index among several.
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

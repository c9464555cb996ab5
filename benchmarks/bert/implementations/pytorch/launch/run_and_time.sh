#!/bin/bash
# One experiment: empties the page cache where that is permitted, then trains with the sourced configuration.
#   source config_<system>.sh && ../pytorch/launch/run_and_time.sh [flags of `mlbert train`]
# Under srun it is one rank; otherwise it starts DGXNGPU ranks on this machine.
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

# Drops the operating system's page cache on this node and exports what happened: the log event carries it.
clear_caches() {
    export CACHES_CLEARED=false
    [[ "${CLEAR_CACHES:-1}" == 1 ]] || return 0
    sync
    if { echo 3 >/proc/sys/vm/drop_caches; } 2>/dev/null || sudo --non-interactive /sbin/sysctl -q vm.drop_caches=3 2>/dev/null; then
        CACHES_CLEARED=true
    else
        echo "The page cache was not dropped, which needs root on the host; the log's cache_clear event says false." >&2
    fi
}

# One task of a node is enough; rank 0, whose log it is, is always the first task of its node.
if [[ "${SLURM_LOCALID:-0}" == 0 ]]; then
    clear_caches
fi

command=(python3 "${system_dir}/run_pretraining.py")
if [[ -z "${SLURM_STEP_ID:-}" ]] && ((DGXNGPU > 1)); then
    command=(python3 -m torch.distributed.run --standalone --nproc_per_node="${DGXNGPU}" "${system_dir}/run_pretraining.py")
fi
exec "${command[@]}" "$@"

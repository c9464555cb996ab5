#!/bin/bash
# Run NEXP experiments on several machines without Slurm, one after another:
#   source config_<system>.sh && HOSTS=node1,node2 ../pytorch/launch/run_multinode.sh [--mpirun]
# Over ssh each host starts its own ranks (torchrun); with --mpirun, Open MPI starts them all. The tree, the data and LOGDIR
# must have the same paths everywhere, also here, where settings and data are checked first, and ssh must not ask for a
# password. To use containers, start this inside them.
# shellcheck disable=SC2329  # train_on calls over_ssh or over_mpirun by name
set -euo pipefail

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    sed -n '2,6s/^# //p' "${BASH_SOURCE[0]}"
    exit 0
fi
: "${CONFIG_FILE:?is not set: source a config_<system>.sh first}"
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

over_mpirun() {
    local words=() name host slots=()
    for name in "${exported[@]}" PATH PYTHONPATH; do
        words+=(-x "${name}")
    done
    for host in "${hosts[@]}"; do
        slots+=("${host}:${processes}")
    done
    mpirun --np "$((DGXNNODES * processes))" --host "$(joined "${slots[@]}")" --map-by "ppr:${processes}:node" --bind-to none \
        "${words[@]}" "${launch_dir}/run_and_time.sh" "$@"
}

# Name the hosts on which ssh cannot run a command, before the ranks on the others would wait for them.
reach_hosts() {
    local host node pids=() unreachable=()
    for host in "${hosts[@]}"; do
        ssh -o BatchMode=yes "${host}" true &
        pids+=($!)
    done
    for node in "${!pids[@]}"; do
        wait "${pids[node]}" || unreachable+=("${hosts[node]}")
    done
    ((${#unreachable[@]} == 0)) ||
        fail "ssh cannot run a command on ${unreachable[*]}; see its message above. It must connect without a password: ssh ${unreachable[0]} true"
}

# One ssh per host. The first one that fails ends the others; their ranks detect the lost peers themselves.
over_ssh() {
    local node name line pids=() status=0
    for ((node = 0; node < DGXNNODES; node++)); do
        line="cd $(printf %q "${system_dir}") && exec env NODE_RANK=${node}"
        for name in "${exported[@]}" PATH PYTHONPATH; do
            line+=" $(printf '%s=%q' "${name}" "${!name}")"
        done
        line+=" $(printf '%q ' "${launch_dir}/run_and_time.sh" "$@")"
        ssh -o BatchMode=yes "${hosts[node]}" "${line}" &
        pids+=($!)
    done
    for node in "${!pids[@]}"; do
        wait -n || status=$?
        ((status == 0)) || break
    done
    # A run that misses its target ends with 1 everywhere; let rank 0 finish writing the results.
    if ((status > 1)); then
        kill "${pids[@]}" 2>/dev/null || true
    fi
    wait
    if ((status == 255)); then
        echo "error: ssh lost the connection to a host; see its message above. The run counts as one that lost a rank." >&2
        status=3
    fi
    return "${status}"
}

mlbert_once() {
    "${PYTHON:-python3}" -m mlbert "$@"
}

over=over_ssh
if [[ "${1:-}" == --mpirun ]]; then
    over=over_mpirun
    shift
fi
check_settings
IFS=, read -r -a hosts <<<"${HOSTS:-}"
((${#hosts[@]} == DGXNNODES)) || fail "HOSTS names ${#hosts[@]} hosts, the config has DGXNNODES=${DGXNNODES}. Name them: HOSTS=node1,node2 ../pytorch/launch/run_multinode.sh"
choose_python
check_training "${PYTHON:-python3}" "${system_dir}/run_pretraining.py" "$@"
[[ "${over}" != over_ssh ]] || reach_hosts
export MASTER_ADDR="${MASTER_ADDR:-${hosts[0]}}" MASTER_PORT="${MASTER_PORT:-29500}"
for i in "${experiments[@]}"; do
    train_on "${i}" "${HOSTS}" "${over}" "$@"
done
mlbert_once report "${LOGDIR}" || failed=1
exit "${failed}"

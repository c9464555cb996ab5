#!/bin/bash
# Start a rank on the cores near its GPU, with memory of the same NUMA node:
#   bind.sh [--show] [--sysfs DIR] [--allowed LIST] COMMAND...
# The topology is read from the machine. CPUs that the job may not use (another job's, or dedicated to a storage client) are
# excluded, since numactl would reject them. Without GPUs the ranks spread over the NUMA nodes. LOCAL_RANK and
# LOCAL_WORLD_SIZE, or Slurm's or mpirun's names for them, identify the rank; DGXHT is the number of hardware threads used
# per core (1). --show prints the CPUs instead of starting; the other two replace /sys and the CPUs of this process.
set -euo pipefail

sysfs=/sys
allowed="$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status)"
show=0
while [[ "${1:-}" == --* ]]; do
    case "$1" in
    --show) show=1 && shift ;;
    --sysfs) sysfs="$2" && shift 2 ;;
    --allowed) allowed="$2" && shift 2 ;;
    *) echo "error: bind.sh: unknown option $1" >&2 && exit 2 ;;
    esac
done
local_rank="${LOCAL_RANK:-${SLURM_LOCALID:-${OMPI_COMM_WORLD_LOCAL_RANK:-0}}}"
local_size="${LOCAL_WORLD_SIZE:-${DGXNGPU:-1}}"

# Set `expanded`: 0-2,8 -> 0 1 2 8
expand() {
    local part cpu
    expanded=()
    for part in ${1//,/ }; do
        for ((cpu = ${part%-*}; cpu <= ${part#*-}; cpu++)); do
            expanded+=("${cpu}")
        done
    done
}

joined() {
    local IFS=,
    echo "$*"
}

# Index, UUID and bus of each GPU of the machine. One call, because nvidia-smi is slow on a large machine.
mapfile -t gpus < <(nvidia-smi --query-gpu=index,uuid,pci.bus_id --format=csv,noheader 2>/dev/null)
IFS=, read -r -a visible <<<"${CUDA_VISIBLE_DEVICES:-}"

# Print the NUMA node of this job's GPU number $1; nothing if there is none or it is unknown.
gpu_node() {
    local wanted="${visible[$1]:-$1}" gpu index uuid bus="" node=-1
    for gpu in "${gpus[@]}"; do
        IFS=', ' read -r index uuid gpu <<<"${gpu}"
        if [[ "${wanted}" == "${index}" || "${uuid}" == "${wanted}"* ]]; then
            bus="${gpu,,}"
            break
        fi
    done
    [[ -n "${bus}" ]] || return 0
    # nvidia-smi writes eight digits of the domain, sysfs four.
    { read -r node <"${sysfs}/bus/pci/devices/${bus: -12}/numa_node"; } 2>/dev/null || return 0
    ((node < 0)) || echo "${node}"
}

declare -A may_use cores_of
expand "${allowed}"
for cpu in "${expanded[@]}"; do
    may_use[${cpu}]=1
done

# Set `core`: the usable threads of a CPU's core, at most DGXHT of them; empty if an earlier CPU represents the core.
usable_core() {
    local cpu="$1" siblings="$1" thread
    core=()
    { read -r siblings <"${sysfs}/devices/system/cpu/cpu${cpu}/topology/thread_siblings_list"; } 2>/dev/null || true
    expand "${siblings}"
    for thread in "${expanded[@]}"; do
        [[ -n "${may_use[${thread}]:-}" ]] || continue
        ((${#core[@]} > 0 || thread == cpu)) || return 0
        ((${#core[@]} >= ${DGXHT:-1})) || core+=("${thread}")
    done
}

# For each NUMA node with usable CPUs: its cores, each as a list of usable threads (3,51).
nodes=()
for folder in "${sysfs}"/devices/system/node/node[0-9]*; do
    read -r list <"${folder}/cpulist" || continue
    node="${folder##*node}"
    cores=()
    expand "${list}"
    for cpu in "${expanded[@]}"; do
        usable_core "${cpu}"
        ((${#core[@]} == 0)) || cores+=("$(joined "${core[@]}")")
    done
    if ((${#cores[@]})); then
        nodes+=("${node}")
        cores_of[${node}]="${cores[*]}"
    fi
done

if ((${#nodes[@]} == 0)); then
    echo "bind.sh: ${sysfs} shows no NUMA topology; rank ${local_rank} runs unbound." >&2
    ((show)) || exec "$@"
    exit 0
fi

# The number of ranks on this rank's node, and its position among them.
place=0 sharers=0
for ((rank = 0; rank < local_size; rank++)); do
    node="$(gpu_node "${rank}")"
    if [[ -z "${node}" || -z "${cores_of[${node}]:-}" ]]; then
        node="${nodes[rank * ${#nodes[@]} / local_size]}"
    fi
    node_of[rank]="${node}"
done
own="${node_of[local_rank]}"
for ((rank = 0; rank < local_size; rank++)); do
    [[ "${node_of[rank]}" == "${own}" ]] || continue
    ((rank >= local_rank)) || ((place += 1))
    ((sharers += 1))
done

read -r -a cores <<<"${cores_of[${own}]}"
first=$((place * ${#cores[@]} / sharers))
count=$(((place + 1) * ${#cores[@]} / sharers - first))
((count > 0)) || count=1 # more ranks than cores: some share a core
list="$(joined "${cores[@]:first:count}")"
if ((show)); then
    echo "rank ${local_rank}: node ${own} cpus ${list}"
    exit 0
fi
# Otherwise the package would divide these cores among the local ranks again. A single rank may choose one thread.
if ((local_size > 1 || ${DGXHT:-1} > 1)); then
    export CPU_THREADS="${CPU_THREADS:-${count}}"
fi
for binder in "numactl --physcpubind=${list} --localalloc" "taskset --cpu-list ${list}"; do
    read -r -a words <<<"${binder}"
    if "${words[@]}" true 2>/dev/null; then
        exec "${words[@]}" "$@"
    fi
done
echo "bind.sh: neither numactl nor taskset can bind here; rank ${local_rank} runs unbound." >&2
exec "$@"

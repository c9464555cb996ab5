# Functions of run.sub that choose the nodes for the ranks, and continue the job without a node that the log names as lost
# (docs/how_a_run_ends.md).
#   nodes, spares   nodes that run the ranks, and nodes that can replace one of them
#   lost            nodes that are not used again; lost_file keeps them for a requeued job
# shellcheck shell=bash disable=SC2034,SC2154  # variables of run.sub and common.sh

# Divide the job's nodes, in Slurm's order, into `nodes`, which run the ranks, `spares` and lost ones.
choose_nodes() {
    local all without usable
    all="$(scontrol show hostnames "${SLURM_JOB_NODELIST}")"
    mapfile -t without < <(grep --line-regexp --fixed-strings "$(printf '%s\n' "${lost[@]}")" <<<"${all}")
    mapfile -t usable < <(grep --line-regexp --fixed-strings --invert-match "$(printf '%s\n' "${lost[@]}")" <<<"${all}")
    ((${#usable[@]} >= DGXNNODES)) || fail "Slurm gave the job ${#without[@]} nodes that it lost before (${without[*]})."
    nodes=("${usable[@]:0:DGXNNODES}") spares=("${usable[@]:DGXNNODES}") num_usable=${#usable[@]}
    usable_args=() rank_nodes=()
    ((${#without[@]} == 0)) || usable_args=(--exclude="$(joined "${without[@]}")")
    without+=("${spares[@]}")
    ((${#without[@]} == 0)) || rank_nodes=(--nodes="${DGXNNODES}" --exclude="$(joined "${without[@]}")")
    choose_master "${nodes[0]}"
}

# Set the address of the first rank's node. Only possible on the host: a container has no scontrol.
choose_master() {
    local first="$1" address="$1"
    if [[ "${first}" != "${master_node:-${first}}" ]]; then
        unset MASTER_ADDR
    fi
    master_node="${first}"
    if ! getent hosts "${first}" >/dev/null; then
        address="$(scontrol --oneliner show node "${first}" | grep -o 'NodeAddr=[^ ]*')"
        address="${address#NodeAddr=}"
    fi
    export MASTER_ADDR="${MASTER_ADDR:-${address}}"
    # Below Linux's ports for outgoing connections, and different for each job on a shared machine.
    export MASTER_PORT="${MASTER_PORT:-$((15000 + SLURM_JOB_ID * 31 % 16384))}"
}

# Print the state of job $1, or GONE if Slurm no longer knows it. If Slurm does not answer, print why and return 1.
job_state() {
    local answer
    answer="$(scontrol --oneliner show job "$1" 2>&1)" || true
    if [[ "${answer}" =~ JobState=([A-Z_]+) ]]; then
        echo "${BASH_REMATCH[1]}"
    elif [[ "${answer}" == *"Invalid job id"* || "${answer}" == "Job $1 not found" ]]; then
        echo GONE
    else
        echo "${answer##*$'\n'}"
        return 1
    fi
}

# Return whether a job in state $1 has ended or has not started (again).
is_over() {
    case "$1" in
    GONE | PENDING | COMPLETED | CANCELLED | FAILED | TIMEOUT | NODE_FAIL | PREEMPTED | BOOT_FAIL | DEADLINE | OUT_OF_MEMORY) return 0 ;;
    *) return 1 ;;
    esac
}

# Print field $1 of this job in Slurm.
job_field() {
    scontrol --oneliner show job "${job}" | grep --only-matching --perl-regexp " $1=\K[^ ]*"
}

# Keep the requeued job off its lost nodes. Slurm permits it only while the job does not run.
exclude_lost_nodes() {
    local before
    ((${#lost[@]})) || return 0
    before="$(job_field ExcNodeList)" || true
    [[ "${before}" != "(null)" ]] || before=""
    scontrol update JobId="${job}" ExcNodeList="${before:+${before},}$(joined "${lost[@]}")" ||
        say "Slurm may give the job its lost nodes again (${lost[*]})."
}

# Return whether Slurm can run this job elsewhere: it may be requeued, and its partition has enough nodes without the lost
# ones.
can_move() {
    local others
    [[ "$(job_field Requeue)" == 1 ]] || return 1
    others="$(sinfo --noheader --Node --partition="${SLURM_JOB_PARTITION:-}" --states=idle,alloc,mix,comp --format=%N |
        sort --unique | grep --line-regexp --fixed-strings --invert-match --count "$(printf '%s\n' "${lost[@]}" "$1")")"
    ((others >= job_nodes))
}

# Print the node that is lost or hangs according to the reason $1 of an aborted run; nothing for other failures.
named_node() {
    if [[ "$1" =~ ^rank\ [0-9]+\ on\ ([^ ]+)\ (died|is\ silent|hangs|stood\ still)\  && " ${nodes[*]} " == *" ${BASH_REMATCH[1]} "* ]]; then
        echo "${BASH_REMATCH[1]}"
    fi
}

# Decide where run $1 continues after the loss with reason $2; $3 is the newest checkpoint before the attempt.
# Returns 1 if it does not.
recover() {
    local i="$1" reason="$2" before="$3" node progress=0
    node="$(named_node "${reason}")"
    [[ "$(newest_checkpoint "${i}")" == "${before}" ]] || progress=1
    if [[ -n "${node}" ]] && ((${#lost[@]} >= ${SPARES:-0} + ${MAX_RESTARTS:-0})); then
        ((${#lost[@]} == 0)) || say "the job has already lost ${#lost[@]} nodes (${lost[*]}), as many as SPARES and MAX_RESTARTS allow, and ends."
        return 1
    elif [[ -n "${node}" ]] && ((${#spares[@]})); then
        exclude "${node}" "${reason}"
        choose_nodes
        return 0
    fi
    # Without a new checkpoint a restart would fail the same way.
    ((left > 0 && progress)) || return 1
    if [[ -n "${node}" ]] && can_move "${node}"; then
        exclude "${node}" "${reason}"
        requeue "${i}"
    fi
    left=$((left - 1))
}

# Do not use node $1 again, because of reason $2.
exclude() {
    lost+=("$1")
    printf '%s\n' "${lost[@]}" >"${lost_file}"
    say "$1 is excluded from this job: $2."
}

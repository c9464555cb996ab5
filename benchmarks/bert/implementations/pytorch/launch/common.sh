# Functions of all launchers. run.sub, run_with_docker.sh, run_with_apptainer.sh and run_multinode.sh source this after CONFIG_FILE is set.
# shellcheck shell=bash disable=SC2034  # launchers use the variables

system_dir="$(cd "$(dirname "${CONFIG_FILE}")" && pwd)"
tree_dir="$(cd "${system_dir}/../../../.." && pwd)"
pytorch_dir="$(cd "${system_dir}/../pytorch" && pwd)"
launch_dir="${pytorch_dir}/launch"
first_seed="${SEED:-}"
failed=0

fail() {
    echo "error: $*" >&2
    exit 2
}

say() {
    echo "$(date +%T) $*"
}

# Print the words with commas between them.
joined() {
    local IFS=,
    echo "$*"
}

# Return whether the yes/no setting $1, with default $2, is on.
enabled() {
    local value="${!1:-$2}"
    case "${value,,}" in
    1 | yes | true | on) return 0 ;;
    0 | no | false | off) return 1 ;;
    *) fail "$1=${value} is neither yes nor no." ;;
    esac
}

# Check the settings that a config must have; create LOGDIR and make it absolute. Sets `experiments`: the runs of this job.
check_settings() {
    local name i
    NEXP="${NEXP:-1}"
    for name in DGXNNODES DGXNGPU RECIPE LOGDIR; do
        [[ -n "${!name:-}" ]] || fail "${name} is not set. Source a config first: source config_<system>.sh"
    done
    # shellcheck source-path=SCRIPTDIR source=processes.sh
    source "${launch_dir}/processes.sh"
    for name in TIMED NCCL_TEST CLEAR_CACHES CHECK_COMPLIANCE COLLECT_RESULTS BIND_CPUS RESUME; do
        enabled "${name}" 0 || true
    done
    if enabled COLLECT_RESULTS 0 && [[ -z "${MLPERF_SUBMISSION_PLATFORM:-}" ]]; then
        fail "COLLECT_RESULTS=1 needs MLPERF_SUBMISSION_PLATFORM. Set it in env.sh."
    fi
    mkdir -p "${LOGDIR}" 2>/dev/null || fail "LOGDIR=${LOGDIR} cannot be created on $(hostname). Set it in env.sh."
    LOGDIR="$(cd "${LOGDIR}" && pwd)"
    mapfile -t experiments < <(seq 0 $((NEXP - 1)))
    [[ -z "${SLURM_ARRAY_TASK_ID:-}" ]] || experiments=("${SLURM_ARRAY_TASK_ID}")
    for i in "${experiments[@]}"; do
        if enabled COLLECT_RESULTS 0 && [[ -e "$(collected "${i}")" ]] && ! is_finished "${i}"; then
            fail "$(collected "${i}") already exists and is not overwritten. Move it away, or set COLLECT_RESULTS=0."
        fi
    done
}

# Use PYTHON, else the active virtual environment, else the tree's .venv. A container has its own Python.
choose_python() {
    if [[ -z "${CONT:-}" && -n "${PYTHON:-}" ]]; then
        PYTHON="$(realpath --no-symlinks "$(command -v "${PYTHON}" || echo missing)")"
        [[ -x "${PYTHON}" ]] || fail "PYTHON is not an executable program."
        export PYTHON
    elif [[ -z "${CONT:-}" && -z "${VIRTUAL_ENV:-}" && -x "${tree_dir}/.venv/bin/python3" ]]; then
        export PATH="${tree_dir}/.venv/bin:${PATH}"
    fi
}

# Let the trainer report mistakes in settings, flags, data or weights, and exports that only resemble a setting, before any
# run, and check that no run is finished. TensorFlow's trainer has no such check.
check_training() {
    local i
    for i in "${experiments[@]:1}"; do # the trainer checks the first one
        [[ ! -e "${LOGDIR}/run_${i}/summary.json" ]] || fail "${LOGDIR}/run_${i}: contains a finished run. Set another LOGDIR, or remove it."
    done
    [[ "${RECIPE}" != tensorflow2 ]] || return 0
    EXPERIMENT="${experiments[0]}" "$@" --print-config > >(sed -n '/^warning: /p' >&2) || exit 2
}

# Set `mounts`: the tree, the data and LOGDIR, each under its own path, and CONT_MOUNTS.
choose_mounts() {
    local path more globs
    mounts=("${tree_dir}:${tree_dir}")
    IFS=, read -r -a globs <<<"${INPUT_FILES:-},${EVAL_FILES:-}"
    for path in "${DATADIR_PHASE2:-}" "${EVALDIR:-}" "${INIT_CHECKPOINT:-}" "${LOGDIR}" "${globs[@]%/*}"; do
        # A TensorFlow checkpoint is named by the common prefix of its files.
        if [[ ! -e "${path}" && -e "${path}.index" ]]; then
            path="${path%/*}"
        fi
        if [[ "${path}" == /* && "${path}/" != "${tree_dir}/"* && " ${mounts[*]} " != *" ${path}:${path} "* ]]; then
            [[ "${path}" != *[,:]* ]] || fail "${path} contains a comma or a colon, which a mount does not allow."
            mounts+=("${path}:${path}")
        fi
    done
    IFS=, read -r -a more <<<"${CONT_MOUNTS:-}"
    mounts+=("${more[@]}")
}

# Set `apptainer_command`, which runs a command in the image CONT, in folder $1, with `mounts` and this environment.
choose_apptainer_command() {
    local folder="$1" mount program
    apptainer_command=()
    for program in apptainer singularity; do
        if ((${#apptainer_command[@]} == 0)) && command -v "${program}" >/dev/null; then
            apptainer_command=("${program}" exec --no-home --writable-tmpfs --pwd "${folder}")
        fi
    done
    ((${#apptainer_command[@]} > 0)) || fail "CONT=${CONT} needs Apptainer or Singularity, and neither is on PATH here."
    [[ ! -e /proc/driver/nvidia/version ]] || apptainer_command+=(--nv)
    for mount in "${mounts[@]}"; do
        apptainer_command+=(--bind "${mount}")
    done
    apptainer_command+=("${CONT}")
}

# Set `exported`: the names of all settings that are set. reset_settings.sh lists every setting.
list_settings() {
    local name
    exported=()
    # shellcheck disable=SC2013  # splits into words on purpose
    for name in $(grep --invert-match '^#' "${launch_dir}/reset_settings.sh"); do
        if [[ "${name}" =~ ^[A-Z] && -n "${!name:-}" ]]; then
            exported+=("${name}")
        fi
    done
}

# Print the path in results/ for the log of run $1.
collected() {
    echo "${tree_dir}/results/${MLPERF_SUBMISSION_PLATFORM}/bert/result_$1.txt"
}

# Select run $1 for the trainer. SEED, if given, is that of run 0, and run i gets SEED + i; otherwise each run draws its own.
select_run() {
    export EXPERIMENT="$1"
    if [[ "${first_seed}" =~ ^[0-9]+$ ]]; then
        export SEED="$((first_seed + $1))"
    fi
}

# Export the digest of a .sqsh or .sif for the log: from the file that make_sqsh.sh wrote, else computed once per job.
identify_image() {
    local digest=""
    if [[ -r "${CONT}.sha256" ]]; then
        read -r digest _ <"${CONT}.sha256"
    elif [[ -f "${CONT}" ]]; then
        say "reading ${CONT} for its digest; to store it: sha256sum ${CONT} >${CONT}.sha256"
        read -r digest _ < <(sha256sum "${CONT}")
    elif [[ "${CONT}" == *@sha256:* ]]; then
        digest="${CONT##*@sha256:}"
    fi
    export MLBERT_IMAGE_DIGEST="${digest:+sha256:${digest}}"
}

# Return whether run $1 reached its target, even if its results are incomplete.
is_success() {
    grep --quiet '"status": "success"' "${LOGDIR}/run_$1/summary.json" 2>/dev/null ||
        grep --quiet '"run_stop".*"status": "success"' "${LOGDIR}/result_$1.txt" 2>/dev/null
}

# Return whether run $1 reached its target or a limit.
is_finished() {
    [[ -e "${LOGDIR}/run_$1/summary.json" ]] || is_success "$1"
}

# Print a value that changes with every write to the log of run $1.
log_stamp() {
    stat --format=%i:%s:%y "${LOGDIR}/result_$1.txt" 2>/dev/null || true
}

# Print why run $1 was aborted; nothing without a log of this attempt ($2: its stamp before the attempt).
abort_reason() {
    [[ "$(log_stamp "$1")" == "$2" ]] ||
        sed -n 's/.*"key": "run_stop".*"reason": "\(\([^"\\]\|\\.\)*\)".*/\1/p' "${LOGDIR}/result_$1.txt" 2>/dev/null | tail -n 1
}

# Print the exit status of a run that was aborted for reason $1 and whose launcher ended with $2. That may be the status of a
# rank that the launcher ended by a signal, so the reason is better. Without one, a signal means a lost rank, unless $3 is 1.
run_status() {
    local reason="$1" status="$2" is_expected="$3"
    local wrong_input='^rank [0-9]+ on [^ ]+ failed after step [0-9]+: .* \[[a-z-]+\.[a-z-]+\]$' # ends with its code
    case "${reason}" in
    "rank "*)
        status=3
        [[ ! "${reason}" =~ ${wrong_input} ]] || status=2
        ;;
    SIG*) status=$((128 + $(kill -l "${reason#SIG}"))) ;;
    "") ((status <= 128)) || ((is_expected)) || status=3 ;;
    esac
    echo "${status}"
}

# Judge an attempt of run $1, whose launcher ended with `status`, by its log, the reason $2 and, as above, $3. Sets `status`.
judge() {
    if is_success "$1"; then
        ((status == 0)) || say "run $1 is a success; writing its results failed with status ${status}."
        status=0
    elif ! is_finished "$1"; then
        status="$(run_status "$2" "${status}" "$3")"
    fi
    say "run $1 ended with status ${status}."
}

# Run a command that trains run $1 on the hosts $2, and handle its end (docs/how_a_run_ends.md).
train_on() {
    local i="$1" where="$2" status=0 stamp is_expected=0
    shift 2
    select_run "${i}"
    list_settings
    say "run ${i} starts on ${where}."
    stamp="$(log_stamp "${i}")"
    "$@" || status=$?
    [[ ! "${status}" =~ ^(129|130|138|143)$ ]] || is_expected=1 # a rank exits so by itself, after a signal
    judge "${i}" "$(abort_reason "${i}" "${stamp}")" "${is_expected}"
    is_finished "${i}" || exit "$((status ? status : 1))"
    conclude "${i}" "${status}"
}

# Record the status $2 of the finished run $1, check its log, and collect it. The launcher defines `mlbert_once`.
conclude() {
    local i="$1" status="$2" log="${LOGDIR}/result_$1.txt"
    ((status == 0)) || failed=1
    if enabled CHECK_COMPLIANCE 1; then
        mlbert_once submission check "${log}" || failed=1
    fi
    enabled COLLECT_RESULTS 0 || return 0
    local target
    target="$(collected "${i}")"
    mkdir -p "${target%/*}"
    [[ -e "${target}" ]] || cp "${log}" "${target}" || failed=1
    if ! cmp -s "${log}" "${target}"; then
        echo "error: ${target} belongs to another run; the log of this run stays in ${LOGDIR}." >&2
        failed=1
    fi
}

# Train the runs of this job on this machine and exit with the job's status. The words run a command in the container.
train_on_this_machine() {
    local i
    "$@" "${launch_dir}/check_node.sh" || fail "the container lacks what a run needs; see above."
    for i in "${experiments[@]}"; do
        export CACHES_CLEARED=false
        if enabled CLEAR_CACHES 1 && "${launch_dir}/drop_caches.sh"; then
            CACHES_CLEARED=true
        fi
        train_on "${i}" "$(hostname)" "$@" "${launch_dir}/run_and_time.sh"
    done
    mlbert_once report "${LOGDIR}" || failed=1
    exit "${failed}"
}

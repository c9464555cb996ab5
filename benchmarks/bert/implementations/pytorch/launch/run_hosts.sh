# Sourced by a system's run_multinode.sh after it has set `hosts`: sources config_${DGXSYSTEM}.sh and runs on the hosts, over
# ssh or, with --mpirun, through Open MPI. Further arguments are flags of `mlbert train`.
#   DGXSYSTEM              name of a config in the folder of run_multinode.sh
#   INPUT_DIR              training set; replaces DATADIR_PHASE2
#   EVAL_DIR               evaluation set; replaces EVALDIR
#   CHECKPOINTDIR_PHASE1   folder of model.ckpt-28252.pt or model.safetensors; replaces INIT_CHECKPOINT
# Any other exported setting (NEXP, PYTHON, LOGDIR, SEED ...) wins over the config, HOSTS over `hosts`.
# shellcheck shell=bash disable=SC2034,SC2154  # settings are read by name; the sourcing file sets `hosts`

system_dir="$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)"
launch_dir="$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

fail() {
    echo "error: $*" >&2
    exit 2
}

# Print the folder of setting $1 as an absolute path.
folder() {
    [[ -n "${!1:-}" ]] || fail "$1 is not set. It names the $2."
    [[ -d "${!1}" ]] || fail "$1=${!1} is not a folder. It names the $2."
    (cd "${!1}" && pwd)
}

# Print the path of the starting weights: in the folder, or the output of convert_tf_checkpoint.py.
weights() {
    local file
    for file in "$1/model.ckpt-28252.pt" "$1/model.safetensors" "${system_dir}/model.ckpt-28252.pt"; do
        if [[ -f "${file}" ]]; then
            echo "${file}"
            return 0
        fi
    done
    fail "CHECKPOINTDIR_PHASE1=$1 contains neither model.ckpt-28252.pt nor model.safetensors. convert_tf_checkpoint.py makes the first."
}

[[ -z "${CONFIG_FILE:-}" ]] || fail "${CONFIG_FILE} is sourced in this shell. Start this from another one, or HOSTS=... ../pytorch/launch/run_multinode.sh from here."
config="${system_dir}/config_${DGXSYSTEM:-}.sh"
if [[ ! -f "${config}" ]]; then
    known=("${system_dir}"/config_*.sh)
    known=("${known[@]##*/config_}")
    fail "DGXSYSTEM=${DGXSYSTEM:-} has no config here. There are: ${known[*]%.sh}."
fi
DATADIR_PHASE2="$(folder INPUT_DIR "training set")" || exit 2
EVALDIR="$(folder EVAL_DIR "evaluation set")" || exit 2
CHECKPOINTDIR_PHASE1="$(folder CHECKPOINTDIR_PHASE1 "folder of the starting weights")" || exit 2
INIT_CHECKPOINT="$(weights "${CHECKPOINTDIR_PHASE1}")" || exit 2
export DATADIR_PHASE2 EVALDIR INIT_CHECKPOINT
unset INPUT_DIR EVAL_DIR CHECKPOINTDIR_PHASE1 # not settings: the trainer would warn that they resemble its own

# shellcheck source-path=SCRIPTDIR source=source_config.sh
source "${launch_dir}/source_config.sh"
source_config "${config}"
[[ -z "${PYTHON:-}" ]] || unset CONT # use the hosts' Python and no image

if [[ -z "${HOSTS:-}" ]]; then
    ((${#hosts[@]} == DGXNNODES)) || fail "hosts in run_multinode.sh names ${#hosts[@]}, config_${DGXSYSTEM}.sh has DGXNNODES=${DGXNNODES}."
    printf -v HOSTS '%s,' "${hosts[@]}"
    export HOSTS="${HOSTS%,}"
fi
exec "${launch_dir}/run_multinode.sh" "$@"

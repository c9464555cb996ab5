#!/bin/bash
# Check on one node, inside its container if there is one, that a run finds its files and its Python.
# Prints one line for each missing item; exit status 2 if there is any.
set -euo pipefail

node="${SLURMD_NODENAME:-$(hostname)}"
missing=0

complain() {
    echo "error: ${node}: $*" >&2
    missing=2
}

given() {
    case "${!1:-none}" in
    none | None | NONE) return 1 ;;
    *) return 0 ;;
    esac
}

case "${SYNTH_DATA:-0}" in
0 | no | false | off)
    for name in DATADIR_PHASE2 EVALDIR; do
        # The trainer checks the format of the set.
        if given "${name}" && [[ -z "$(ls "${!name}" 2>/dev/null)" ]]; then
            complain "${name}=${!name} cannot be read here, or is empty. Mount the data on every node (CONT_MOUNTS for a container), or set ${name} in env.sh."
        fi
    done
    ;;
esac
for name in BERT_CONFIG INIT_CHECKPOINT; do
    # A TensorFlow checkpoint is named by the common prefix of its files.
    if given "${name}" && [[ ! -e "${!name}" && ! -e "${!name}.index" ]]; then
        complain "${name}=${!name} does not exist here. Mount it on every node, or set ${name} in env.sh."
    fi
done
if given LOGDIR && ! mkdir -p "${LOGDIR}" 2>/dev/null; then
    complain "LOGDIR=${LOGDIR} cannot be created here. Name a folder that every node can write."
elif given LOGDIR && [[ ! -w "${LOGDIR}" ]]; then
    complain "LOGDIR=${LOGDIR} is not writable here. Name a folder that every node can write."
fi
modules=(mlbert torch omegaconf mlperf_logging)
if [[ "${RECIPE:-}" == tensorflow2 ]]; then
    modules=(mlbert tensorflow omegaconf mlperf_logging)
fi
if ! "${PYTHON:-python3}" -c 'import importlib.util as u, sys; sys.exit(not all(u.find_spec(m) for m in sys.argv[1:]))' "${modules[@]}" 2>/dev/null; then
    complain "$(command -v "${PYTHON:-python3}" || echo "${PYTHON:-python3}") lacks one of: ${modules[*]}. Run ./quickstart.sh once, which makes .venv, or activate the right environment before sbatch."
fi
exit "${missing}"

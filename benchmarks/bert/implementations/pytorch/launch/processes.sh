# Set `processes`, the number per node: one per accelerator, or one for TensorFlow's recipe, which drives them all. Adds the
# implementations to PYTHONPATH, so the tree's packages win over installed ones. Exits if a count is invalid.
# shellcheck shell=bash disable=SC2034  # the sourcing script uses it
for name in DGXNNODES DGXNGPU NEXP; do
    if [[ ! "${!name:-1}" =~ ^[1-9][0-9]{0,4}$ ]]; then
        echo "error: ${name}=${!name} is not a whole number from 1 to 99999." >&2
        exit 2
    fi
done
processes="${DGXNGPU:-1}"
if [[ "${RECIPE:-}" == tensorflow2 ]]; then
    processes=1
fi
implementations_dir="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
export PYTHONPATH="${implementations_dir}/pytorch:${implementations_dir}/tensorflow2${PYTHONPATH:+:${PYTHONPATH}}"

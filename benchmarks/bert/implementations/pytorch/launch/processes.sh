# Sets `processes`: how many a node runs. One an accelerator, except where the recipe is TensorFlow's, whose one process
# drives them all. Adds the implementations to PYTHONPATH: the packages are the tree's own, whichever ones are installed.
# Ends the program that sources it where a count is none.
# shellcheck shell=bash disable=SC2034  # those who source it use it
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

# Sets `processes`: how many a node runs. One an accelerator, except where the recipe is TensorFlow's, whose one process
# drives them all. Adds the implementations to PYTHONPATH: the packages are the tree's own, whichever ones are installed.
# shellcheck shell=bash disable=SC2034  # those who source it use it
processes="${DGXNGPU:-1}"
if [[ "${RECIPE:-}" == tensorflow2 ]]; then
    processes=1
fi
implementations_dir="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
export PYTHONPATH="${implementations_dir}/pytorch:${implementations_dir}/tensorflow2${PYTHONPATH:+:${PYTHONPATH}}"

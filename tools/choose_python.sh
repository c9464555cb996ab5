# Set `python`, the interpreter of gpu_check.sh and site_check.sh, which source this: PYTHON, else the .venv of this tree, else
# python3. Their `root` is the root of the tree.
# shellcheck shell=bash disable=SC2034,SC2154  # the sourcing script uses and sets them
python="${PYTHON:-}"
if [[ -z "${python}" ]]; then
    python=python3
    [[ -x "${root}/.venv/bin/python" ]] && python="${root}/.venv/bin/python"
fi
export PYTHONPATH="${root}/benchmarks/bert/implementations/pytorch:${root}/tools${PYTHONPATH:+:${PYTHONPATH}}"
export PYTHONUNBUFFERED=1

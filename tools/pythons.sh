#!/bin/bash
# Install the tree's last commit with each Python, and train a small model on docs/ with it.
#   tools/pythons.sh [PYTHON...]      default: python3.11 to python3.13, if they are on PATH
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if (($# == 0)); then
    for python in python3.11 python3.12 python3.13; do
        "${python}" -c "" 2>/dev/null && set -- "$@" "${python}"
    done
fi
if (($# == 0)); then
    echo "pythons.sh: none of python3.11 to python3.13 is on PATH. Name a Python." >&2
    exit 2
fi
folder="$(mktemp -d)"
trap 'rm -rf "${folder}"' EXIT

failed=()
for python; do
    echo "== ${python}"
    tree="${folder}/tree"
    rm -rf "${tree}"
    git clone --quiet "${root}" "${tree}"
    # setup_venv installs into an existing virtual environment.
    (cd "${tree}" && bash -euo pipefail -c '
        "$1" -m venv .venv
        source benchmarks/bert/implementations/pytorch/launch/setup_venv.sh
        setup_venv "${PWD}"
        python -c "import platform, torch; print(\"Python\", platform.python_version(), \"torch\", torch.__version__)"
        mlbert pretrain docs/*.md --minutes 0.2 --size tiny --out model' bash "${python}") </dev/null || failed+=("${python}")
done
if ((${#failed[@]})); then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi

#!/bin/bash
# Installs the tree's last commit with each Python given, or with those of 3.11 to 3.13 on PATH, and trains a small model
# on docs/ with each.
#   tools/pythons.sh [PYTHON...]
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if (($# == 0)); then
    for python in python3.11 python3.12 python3.13; do
        "${python}" -c "" 2>/dev/null && set -- "$@" "${python}"
    done
fi
if (($# == 0)); then
    echo "pythons.sh: no Python of 3.11 to 3.13 on PATH. Name one." >&2
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
    # setup_venv fills the virtual environment that it finds.
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

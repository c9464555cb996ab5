#!/bin/bash
# Set up .venv with the test tools, then run every check of the tree and the test suite.
#   ./run_tests.sh [--slow]           all tests, with --slow also those marked slow
#   ./run_tests.sh --fast [COMMIT]    only the unit tests nearest to the changes since a commit (default: the last one)
#   ./run_tests.sh ARGUMENT...        the tests selected by these arguments of pytest
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
source benchmarks/bert/implementations/pytorch/launch/setup_venv.sh
setup_venv "${PWD}" test || exit 2

# The tests outside tests/gpu, which tools/gpu_check.sh runs, are those of a CPU.
[[ $* == *tests/gpu* ]] || export CUDA_VISIBLE_DEVICES=
# Tests use only files in the repository and the virtual environment; one slow test installs packages with pip.
export HF_HUB_OFFLINE=1
# Tests start hundreds of processes, which should share the tree's compiled modules.
unset PYTHONDONTWRITEBYTECODE

failed=()
check() {
    echo "== $*"
    "$@" || failed+=("${*:1:4}")
}

shell_files=(.ci/run)
while IFS= read -r -d '' file; do
    shell_files+=("${file}")
done < <(find . -name '.?*' -prune -o -path ./runs -prune -o \( -name '*.sh' -o -name '*.sub' \) -type f -print0 | sort -z)

check ruff check .
check ruff format --check .
check lint-imports --config=.importlinter
check mypy
check shellcheck --external-sources --source-path=SCRIPTDIR "${shell_files[@]}"
check shfmt -i 4 -d "${shell_files[@]}"
workers=$(nproc)
# One worker more than processors, up to eight, because some of them wait for programs that they started.
side_by_side=(--timeout=300 --numprocesses=$((workers < 8 ? workers + 1 : 8)) --dist=loadfile --no-loadscope-reorder)
if [[ ${1:-} == --fast ]]; then
    found=$(python tools/affected_tests.py --since "${2:-HEAD}")
    nearest=()
    [[ -z ${found} ]] || mapfile -t nearest <<<"${found}"
    check python -m pytest "${side_by_side[@]}" tests/golden tests/tree/test_sources.py "${nearest[@]}"
elif (($#)) && [[ $* != --slow ]]; then
    check python -m pytest --timeout=300 "$@"
else
    # Tests that start ranks, daemons or jobs mostly wait for them, so they run at the same time as the other tests. On a
    # busy machine such a process may not get enough time, so only a second failure in a row counts. The tests of models
    # and of TensorFlow run in the workers of the ranks' tests, so that the others import neither transformers nor it.
    of_ranks=(tests/dist tests/unit/tensorflow2 tests/unit/models)
    declare -A ran=([dist]="${of_ranks[*]}" [slurm]=tests/slurm)
    of_processes=(python -m pytest --timeout=300 --reruns=1 -rR "$@") outputs="$(mktemp -d)"
    "${of_processes[@]}" "${ran[slurm]}" &>"${outputs}/slurm" &
    slurm=$!
    "${of_processes[@]}" --numprocesses=$(((workers + 3) / 4)) --dist=loadfile "${of_ranks[@]}" &>"${outputs}/dist" &
    dist=$!
    trap 'kill "${slurm}" "${dist}" 2>/dev/null || true; rm -rf "${outputs}"' EXIT
    check python -m pytest "${side_by_side[@]}" "${of_ranks[@]/#/--ignore=}" --ignore="${ran[slurm]}" "$@"
    for name in dist slurm; do
        wait "${!name}" || failed+=("${ran[${name}]}")
        echo "== ${of_processes[*]} ${ran[${name}]}"
        cat "${outputs}/${name}"
    done
fi

if ((${#failed[@]})); then
    printf "failed: %s\n" "${failed[@]}" >&2
    exit 1
fi

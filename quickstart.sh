#!/bin/bash
# Train a small BERT on Python's documentation, check the MLPerf log with the official tools, and print a report.
#   ./quickstart.sh [--out DIR] [--runs N] [--venv DIR]
# --out DIR   folder for the results (default runs/quickstart); finished runs in it are kept and not repeated
# --runs N    number of runs (default 1); with 10, DIR becomes a complete submission tree of the open division
# --venv DIR  folder for the Python environment (default .venv); for a repository that cannot be written
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "${root}/benchmarks/bert/implementations/pytorch/launch/setup_venv.sh"
config="${root}/benchmarks/bert/implementations/cpu_demo/config_cpu_1x1x32x1_demo.sh"
out="${root}/runs/quickstart"
venv="${root}/.venv"
runs=1
usage="Usage: ./quickstart.sh [--out DIR] [--runs N] [--venv DIR]"

fail() {
    echo "error: $*" >&2
    exit 2
}

# Sentences in which the trained model fills in a word, and the word that a person would choose for each.
questions=(
    "The file is opened for reading and [MASK]."
    "Names are bound in the current [MASK]."
    "It must be a string or a [MASK] of strings."
    "The [MASK] statement is used for conditional execution."
)
answers=("writing" "scope or namespace" "list" "if")

while (($#)); do
    case "$1" in
    --out | --runs | --venv)
        (($# > 1)) || fail "$1 needs a value. ${usage}"
        case "$1" in
        --out) out="$2" ;;
        --runs) runs="$2" ;;
        --venv) venv="$(realpath --canonicalize-missing "$2")" ;;
        esac
        shift 2
        ;;
    -h | --help) sed -n '2,6s/^# //p' "${BASH_SOURCE[0]}" && exit 0 ;;
    *) fail "unknown argument $1. ${usage}" ;;
    esac
done
[[ "${runs}" =~ ^[1-9][0-9]{0,2}$ ]] || fail "--runs ${runs} is not a number from 1 to 999."
if [[ ! -w "${root}" && ("${out}" == "${root}"/* || "${venv}" == "${root}"/*) ]]; then
    fail "${root} cannot be written. Choose folders elsewhere: ./quickstart.sh --out DIR --venv DIR"
fi
out="$(realpath --canonicalize-missing "${out}")"
mkdir -p "${out}" 2>/dev/null || fail "${out} cannot be created. Choose another folder with --out."
[[ -w "${out}" ]] || fail "${out} is not writable. Choose another folder with --out."
contents="${out}/CONTENTS.txt"
if [[ "$(head -n 1 "${contents}" 2>/dev/null)" != *" by quickstart.sh." ]]; then # "Made by" until version 0.2.0
    [[ -z "$(ls -A "${out}")" ]] || fail "${out} contains other files. Choose a new folder with --out."
    cat 2>/dev/null >"${contents}" <<'TEXT' || { rm -f "${contents}" && fail "${contents} cannot be written. Choose another folder with --out, or free space."; }
Created by quickstart.sh.
report.html       results of the runs, with figures
result_<i>.txt    MLPerf log of run i
run_<i>/          resolved configuration, metrics, curve, weights and checkpoints of run i
data/             the prepared text: vocabulary, training and evaluation set
systems/ benchmarks/ results/    with more than one run: the submission tree
Result not verified by MLCommons Association.
TEXT
fi

# Train run $1, unless it is finished. An interrupted single run continues from its last checkpoint. In a series it starts
# over, because an interrupted time is not a valid result; the files of the interrupted run are kept under another name.
train() {
    local i="$1"
    if [[ -e "${out}/run_${i}/summary.json" ]]; then
        echo "Run ${i} is finished: ${out}/result_${i}.txt. To repeat it, remove that file and run_${i}, or give another --out."
        return 0
    fi
    if [[ -e "${out}/result_${i}.txt" ]] && ((runs == 1)); then
        export RESUME=1
    elif [[ -e "${out}/result_${i}.txt" ]]; then
        local aside
        aside="${out}/interrupted_${i}_$(date +%s)"
        mkdir "${aside}" && mv "${out}/result_${i}.txt" "${aside}/" || return 2
        [[ ! -e "${out}/run_${i}" ]] || mv "${out}/run_${i}" "${aside}/" || return 2
    fi
    EXPERIMENT="${i}" "${root}/benchmarks/bert/implementations/pytorch/launch/run_and_time.sh"
}

# Say what the same command does after Ctrl-C. The program that was interrupted has said what it saved,
# and with RESUME=1 also how to go on.
# shellcheck disable=SC2329 # trap calls it
interrupted() {
    if ((runs == 1)); then
        [[ -n "${RESUME:-}" ]] || echo "The same command continues." >&2
    else
        echo "The same command repeats the run that was interrupted, and keeps those that are finished." >&2
    fi
    exit 130
}

# Create the submission tree: system description, code, and the sealed logs and files of all runs.
make_tree() {
    local system="${MLPERF_SUBMISSION_PLATFORM}"
    rm -rf "${out}/export" "${out}/results"
    mkdir -p "${out}/systems"
    mlbert submission describe-system --out "${out}/systems/${system}.json" \
        --submitter "${MLPERF_SUBMISSION_ORG}" --division "${MLPERF_DIVISION}"
    mlbert submission export "${out}/export"
    rm -rf "${out}/benchmarks"
    mv "${out}/export/benchmarks" "${out}/export/source.json" "${out}/"
    rm -rf "${out}/export"
    mlbert submission seal "${system}" --tree "${out}" --from "${out}"
}

# Print a path as it can be typed in the current folder.
quoted() {
    printf '%q' "$(realpath --no-symlinks --relative-base="${PWD}" "$1")"
}

# Copy the output of fill-mask, a question and then the guesses, and add the answer to each question.
show_answers() {
    local question guesses number=0
    while IFS= read -r question && IFS= read -r guesses; do
        printf '%s  (%s)\n%s\n' "${question}" "${answers[number]}" "${guesses}"
        number=$((number + 1))
    done
}

if [[ -n "${PYTHONPATH:-}" ]]; then
    echo "PYTHONPATH is ignored here, because its packages would replace the installed ones."
    unset PYTHONPATH
fi
setup_venv "${root}" "" "${venv}" || exit 2

shown="$(realpath --relative-base="${PWD}" "${out}")" # as short as the user may type it
trap interrupted INT
mlbert prepare python-text --out "${shown}/data"

# shellcheck source=benchmarks/bert/implementations/cpu_demo/config_cpu_1x1x32x1_demo.sh
source "${config}"
export DATADIR_PHASE2="${out}/data/train" EVALDIR="${out}/data/eval" LOGDIR="${out}" NEXP="${runs}"
for ((i = 0; i < runs; i++)); do
    status=0
    train "${i}" || status=$?
    # Status 1 with a summary means that the run missed its target. The official tools accept one such run in ten.
    if ((status > 1)) || [[ ! -e "${out}/run_${i}/summary.json" ]]; then
        exit "$((status ? status : 2))"
    fi
done

verdict=0
if ((runs == 1)); then
    mlbert submission check "${shown}/result_0.txt" --division open || verdict=$?
else
    make_tree
    mlbert submission check "${shown}" --division open || verdict=$?
fi
printf "\nGuesses for [MASK] with their probabilities; in brackets a person's choice.\n"
printf 'Expect one word in four to be right after a minute, mostly frequent ones.\n'
mlbert fill-mask "${out}/run_0" --top 3 "${questions[@]}" | show_answers || verdict=1
printf '\n'
mlbert report "${shown}" --html "${shown}/report.html" || ((runs > 1)) || verdict=1
cat <<TEXT

next:
  source $(quoted "${venv}/bin/activate")
  mlbert pretrain TEXT --out my-model --minutes 10    # a model of your own text
  mlbert submission check $(quoted "${out}/result_0.txt") --division open
  and open ${shown}/report.html
TEXT
exit "${verdict}"

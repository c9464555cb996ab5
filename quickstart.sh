#!/bin/bash
# Train a small BERT on Python's documentation, check the MLPerf log with the official tools, and print a report.
#   ./quickstart.sh [--out DIR] [--runs N]
# --out DIR   folder for everything (default runs/quickstart); finished runs in it are kept and not repeated
# --runs N    number of runs (default 1); with 10, DIR becomes a complete submission tree of the open division
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "${root}/benchmarks/bert/implementations/pytorch/launch/setup_venv.sh"
config="${root}/benchmarks/bert/implementations/cpu_demo/config_cpu_1x1x32x1_demo.sh"
out="${root}/runs/quickstart"
runs=1

fail() {
    echo "error: $*" >&2
    exit 2
}

# Sentences in which the trained model fills in a word, and the words that a person would expect.
questions=(
    "The file is opened for reading and [MASK]."
    "Names are bound in the current [MASK]."
    "It must be a string or a [MASK] of strings."
    "The [MASK] statement is used for conditional execution."
)
answers="writing; scope or namespace; list; if"

while (($#)); do
    case "$1" in
    --out | --runs)
        (($# > 1)) || fail "$1 needs a value. Usage: ./quickstart.sh [--out DIR] [--runs N]"
        if [[ "$1" == --out ]]; then out="$2"; else runs="$2"; fi
        shift 2
        ;;
    -h | --help) sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}" && exit 0 ;;
    *) fail "unknown argument $1. Usage: ./quickstart.sh [--out DIR] [--runs N]" ;;
    esac
done
[[ "${runs}" =~ ^[1-9][0-9]{0,2}$ ]] || fail "--runs ${runs} is not a number from 1 to 999."
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

setup_venv "${root}" || exit 2

mlbert prepare python-text --out "${out}/data"

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
    mlbert submission check "${out}/result_0.txt" --division open || verdict=$?
else
    make_tree
    mlbert submission check "${out}" --division open || verdict=$?
fi
printf '\nWhat the model fills in for [MASK]; a person would say: %s.\n' "${answers}"
printf 'After a minute of training, expect one word in four to be right, mostly frequent ones.\n'
mlbert fill-mask "${out}/run_0" --top 3 "${questions[@]}" || verdict=1
printf '\n'
mlbert report "${out}" --html "${out}/report.html" || ((runs > 1)) || verdict=1
cat <<TEXT

next:
  source ${root@Q}/.venv/bin/activate
  mlbert pretrain TEXT --out my-model --minutes 10    # a model of your own text
  mlbert submission check ${out@Q}/result_0.txt --division open
  and open ${out}/report.html
TEXT
exit "${verdict}"

#!/bin/bash
# Does pre-training on the text of a field pay, for a classifier with few labels?
# usage: run.sh WORK [STEP [ARGUMENT]]
#   WORK: a folder that the steps share; needs mlbert with its extras bert-cpu and s3
#   STEP: text | pretrain [MINUTES] | finetune SEED | scores; without one, all of them
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$1
step=${2:-all}
mkdir -p "$work/finetuned"
cd "$work"
export CPU_THREADS=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

make_text() {
    python "$here/make_text.py" . | tee text.log
}

# Both at once, a thread each, so that what else the machine does slows both alike; then
# transformers' ModernBERT on as many tokens.
pretrain() {
    mlbert pretrain domain.txt --size tiny --minutes "$1" --out domain >domain.log 2>&1 &
    mlbert pretrain general.txt --size tiny --minutes "$1" --out general >general.log 2>&1
    wait
    python "$here/baselines.py" random domain/model random/model
    tokens=$(python -c 'import json; print(json.load(open("domain/run_0/summary.json"))["tokens"])')
    python "$here/baselines.py" modernbert domain/model domain.txt "$tokens" modernbert/model \
        >modernbert.log 2>&1
}

# fine_tune SIDE SEED: on few and on more labeled rows, ten passes, and on few also 80; the seed
# also chooses the rows.
fine_tune() {
    for run in 120_10 1200_10 120_80; do
        size=${run%_*}
        name=$1_${run}_$2
        grep -q '^next:' "finetuned/$name.log" 2>/dev/null && continue
        mlbert finetune --from "$1/model" --train "train_${size}_$2.csv" --eval eval.csv \
            --seed "$2" --epochs "${run#*_}" --patience 0 --out "finetuned/$name" >"finetuned/$name.log" 2>&1
    done
}

# all_sides SEED: three at a time, a thread each
all_sides() {
    { fine_tune domain "$1" && fine_tune random "$1"; } &
    first=$!
    fine_tune general "$1" &
    second=$!
    fine_tune modernbert "$1"
    wait $first
    wait $second
}

case $step in
text) make_text ;;
pretrain) pretrain "${3:-4}" ;;
finetune) all_sides "$3" ;;
scores) python "$here/summarize.py" . | tee scores.txt ;;
all)
    make_text
    pretrain 4
    for seed in 1 2 3; do all_sides $seed; done
    python "$here/summarize.py" . | tee scores.txt
    ;;
esac

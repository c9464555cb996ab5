#!/bin/bash
# Time a ModernBERT step, ours against transformers' plain and expert, on an idle machine.
# usage: run.sh TEXTS VOCAB [CASE...]   CASE: 1024 8192 1024-full 128
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
texts=$1
vocab=$2
shift 2
cases=("${@:-}")
[ -n "${cases[0]}" ] || cases=(1024 8192 1024-full 128)
for case in "${cases[@]}"; do
    options=(--length "${case%-full}" --tokens 4096 --layers 6 --pairs 3)
    case $case in
    # At 8,192 the plain side's logits at every position do not fit the memory.
    8192) options=(--length 8192 --tokens 12000 --layers 3 --pairs 3 --no-plain) ;;
    *-full) options+=(--full --no-plain) ;;
    esac
    echo "== $case: $(date +%T), load $(cut -d ' ' -f 1 /proc/loadavg)"
    python ../../tools/bench_modernbert.py --texts "$texts" --vocab "$vocab" "${options[@]}" \
        --json "$case.json" 2>&1 | tee "$case.txt"
done

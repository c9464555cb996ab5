#!/bin/bash
# pairs.sh BEFORE AFTER TREE: five times, each side in turn; BEFORE and AFTER are folders with the package of the two commits.
set -euo pipefail
for i in 1 2 3 4 5; do
    for side in before after; do
        folder="$1"
        [[ "${side}" == after ]] && folder="$2"
        PYTHONPATH="${folder}" /usr/bin/time -f "${i} ${side} %e s, processor %U + %S s" \
            mlbert submission check "$3" 2>&1 >/dev/null | tail -1
    done
done

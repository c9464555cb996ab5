#!/bin/bash
# The demonstration in PyTorch and in TensorFlow 2, from the same weights, on the same steps. Run in the tree's root, after
# ./quickstart.sh, with TensorFlow installed:  records/<this folder>/curves.sh FOLDER
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="$1"
systems="${PWD}/benchmarks/bert/implementations"
python "${here}/curves.py" start "${systems}/pytorch/configs/demo.json" "${out}/start"
for system in cpu_demo tf2_cpu_demo; do
    (
        # shellcheck source=/dev/null
        source "${systems}/${system}"/config_*.sh
        export LOGDIR="${out}/${system}" INIT_CHECKPOINT="${out}/start" SEED=7 PRECISION=fp32 SAVE_CHECKPOINT_STEPS=0
        export LOG_FREQ=1 TARGET_MLM_ACCURACY=0.26 MAX_SECONDS=600 MAX_STEPS=3000 LR_DECAY_END=4300
        "${systems}/pytorch/launch/run_and_time.sh" || (($? == 1)) # the end is the limit
    )
done
python "${here}/curves.py" draw "${out}/cpu_demo/run_0/metrics.jsonl" "${out}/tf2_cpu_demo/run_0/metrics.jsonl" "${here}"

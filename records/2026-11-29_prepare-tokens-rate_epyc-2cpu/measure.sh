#!/bin/bash
# Usage: PYTHON=python ./measure.sh   (from this folder)
set -euo pipefail
here=${PWD}
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
work=$(mktemp -d)
"${python}" - "${work}" <<'END'
import pathlib, sys
sys.path.insert(0, "tools")
import bench_tokens
bench_tokens.make_text(pathlib.Path(sys.argv[1]), 20_000_000)
END
"${python}" -m mlbert prepare tokenizer "${work}" --size 50368 --out "${work}/bpe"
for run in 1 2 3; do
    "${python}" tools/bench_tokens.py --tokenizer "${work}/bpe" --bytes 8e7 --workers 2 --json "${here}/100_MB_${run}.json"
done
"${python}" tools/bench_tokens.py --tokenizer bert-base-uncased --bytes 2e9 --workers 2 --json "${here}/2_GB_wordpiece.json"
RAYON_NUM_THREADS=1 "${python}" "${here}/one_thread.py" "${work}/bpe" "${work}/000.jsonl" >"${here}/one_thread.txt"

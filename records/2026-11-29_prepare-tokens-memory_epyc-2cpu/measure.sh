#!/bin/bash
# Usage: PYTHON=python ./measure.sh   (from this folder)
set -euo pipefail
here=${PWD}
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
work=$(mktemp -d)
mkdir "${work}/large" "${work}/small"
"${python}" - "${work}" <<'END'
import pathlib, sys
sys.path.insert(0, "tools")
import bench_tokens
work = pathlib.Path(sys.argv[1])
bench_tokens.make_text(work / "large", 120_000_000)
bench_tokens.make_text(work / "small", 49_000_000)
END
"${python}" -m mlbert prepare tokenizer "${work}/small" --size 50368 --out "${work}/bpe"
"${python}" "${here}/memory.py" bert-base-uncased "${work}/large" 2,16,64 >"${here}/wordpiece.txt"
"${python}" "${here}/memory.py" "${work}/bpe" "${work}/small" 2,16,64 >"${here}/byte_pairs.txt"

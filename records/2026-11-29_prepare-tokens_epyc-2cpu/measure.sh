#!/bin/bash
# Usage: PYTHON=python ./measure.sh   (from this folder)
set -euo pipefail
cd "$(dirname "$0")/../.."
here=${OLDPWD}
work=$(mktemp -d)
"${PYTHON:-python}" - "${work}" <<'END'
import pathlib, sys
sys.path.insert(0, "tools")
import bench_tokens
bench_tokens.make_text(pathlib.Path(sys.argv[1]), 20_000_000)
END
"${PYTHON:-python}" -m mlbert prepare tokenizer "${work}" --size 50368 --out "${work}/own-bpe-50368"
"${PYTHON:-python}" tools/bench_tokens.py --tokenizer "${work}/own-bpe-50368" --bytes 3e7 --workers 1,2 --json "${here}/30_MB.json"

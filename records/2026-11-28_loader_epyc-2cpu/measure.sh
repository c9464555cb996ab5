#!/bin/bash
# Time the loader at three lengths on one core, and on two; write the records next to this file.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
PYTHON=${PYTHON:-python}
for length in 1024 128 8192; do
    "$PYTHON" -m mlbert bench loader --length "$length" --json "$here/length_$length.json"
done
"$PYTHON" -m mlbert bench loader --cores 2 --json "$here/two_cores.json"

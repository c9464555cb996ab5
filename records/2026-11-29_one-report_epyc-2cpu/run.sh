#!/bin/bash
# Count the lines that 256 ranks print for one cause: run.sh FOLDER. From the repository's root.
set -euo pipefail
export MLBERT_RANKS=256
python -m pytest -n 0 -q --slow --timeout 900 --basetemp="$1" tests/dist/test_one_report.py

#!/bin/bash
# ./input_preprocessing/prepare_data.sh --outputdir DIR --packed-data [--skip-download]
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/../../pytorch/launch/prepare_data.sh" "$@"

#!/bin/bash
# Run the tree's download_code.sh.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/../../../../download_code.sh" "$@"

#!/bin/bash
# Drop this host's page cache, so that a run reads its data from disk. Exits with status 1 if that is not permitted.
set -euo pipefail

drop=(sudo --non-interactive /sbin/sysctl -q vm.drop_caches=3)
if [[ -w /proc/sys/vm/drop_caches ]]; then
    drop=(tee /proc/sys/vm/drop_caches)
fi
# sync can take minutes on a busy host, so first check that dropping is permitted.
if [[ "${drop[0]}" == tee ]] || sudo --non-interactive --list "${drop[@]:2}" &>/dev/null; then
    sync
    if "${drop[@]}" <<<3 &>/dev/null; then
        exit 0
    fi
fi
echo "Page cache not cleared (needs root). Harmless unless you submit the result; the log's cache_clear event says false." >&2
exit 1

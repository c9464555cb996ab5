#!/bin/bash
# Drops this host's page cache, so that a run reads its data from the disks. Exit status 1 where that is not permitted.
set -euo pipefail

sync
if { echo 3 >/proc/sys/vm/drop_caches; } 2>/dev/null || sudo --non-interactive /sbin/sysctl -q vm.drop_caches=3 2>/dev/null; then
    exit 0
fi
echo "The page cache was not dropped, which needs root on the host; the log's cache_clear event says false." >&2
exit 1

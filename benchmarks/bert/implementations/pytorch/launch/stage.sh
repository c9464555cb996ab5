#!/bin/bash
# Copy a data set to this node's local disk: stage.sh SOURCE TARGET. Each copied file is read back, and its SHA-256 compared
# with that of the source. A complete copy of an unchanged source is reused if all files in TARGET.staged still exist, because
# clusters delete old files from such disks.
set -euo pipefail

source_dir="$(realpath -m "$1")"
target="$2"

complain() {
    echo "error: ${SLURMD_NODENAME:-$(hostname)}: $1 was not copied to ${target}: $2" >&2
    exit 2
}

# Print path, size and time of each file in folder $1.
list_files() {
    (cd "$1" && find -L . -type f -printf '%P\t%s\t%T@\n' | LC_ALL=C sort)
}

# Return whether each of the listed files has a copy of the same size.
is_complete() {
    local copies
    copies="$(list_files "${target}" 2>/dev/null)" || return 1
    [[ -z "$(LC_ALL=C comm -23 <(cut -f 1,2 <<<"${files}" | LC_ALL=C sort) <(cut -f 1,2 <<<"${copies}" | LC_ALL=C sort))" ]]
}

# Copy the file $1.
# shellcheck disable=SC2317,SC2329  # called by xargs
copy_file() {
    local from="${source_dir}/$1" to="${target}/$1" sum
    mkdir -p "${to%/*}"
    sum="$(set -o pipefail && tee "${to}" <"${from}" | sha256sum)" || exit 255
    if [[ "$(sha256sum <"${to}")" != "${sum}" ]]; then
        echo "the copy of $1 differs" >&2
        exit 255 # ends xargs
    fi
    touch -r "${from}" "${to}"
}
export -f copy_file
export source_dir target

[[ -d "${source_dir}" ]] || complain "$1" "not a folder"
files="$(list_files "${source_dir}")" || complain "$1" "it cannot be read"
[[ -n "${files}" ]] || complain "$1" "it is empty"
{ mkdir -p "${target%/*}" && exec 9>"${target}.lock" && flock 9; } 2>/dev/null || complain "$1" "the folder cannot be written"
if [[ "$(cat "${target}.staged" 2>/dev/null)" == "${files}" ]] && is_complete; then
    exit 0
fi
rm -rf "${target}" "${target}.staged"
# shellcheck disable=SC2016  # the inner bash expands it
if ! reason="$(cut -f 1 <<<"${files}" | tr '\n' '\0' | xargs -0 -P 8 -I {} bash -c 'copy_file "$1"' _ {} 2>&1)"; then
    rm -rf "${target}"
    complain "$1" "${reason%%$'\n'*}"
fi
{ sync -f "${target}" && echo "${files}" >"${target}.staged"; } || complain "$1" "the disk is full"

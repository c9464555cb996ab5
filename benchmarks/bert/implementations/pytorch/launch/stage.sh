#!/bin/bash
# Copy a data set to this node's local disk: stage.sh [--check] SOURCE TARGET. Each copied file is read back, and its SHA-256
# compared with that of the source. A complete copy of an unchanged source is reused if all its files still exist, because
# clusters delete old files from such disks. --check only checks that the two folders are apart.
#
# TARGET/.mlbert_staged marks a folder that this program made: only such a folder, or an empty one, is ever emptied. Its
# first line is MARK; the others list the copied files once all of them are complete.
set -euo pipefail

readonly MARK="Made by stage.sh of mlbert, which deletes this folder when its source changes."
readonly MARK_FILE=.mlbert_staged
check_only=0
if [[ "$1" == --check ]]; then
    check_only=1
    shift
fi
source_dir="$(realpath -m "$1")"
target="$(realpath -m "$2")"

complain() {
    echo "error: ${SLURMD_NODENAME:-$(hostname)}: ${source_dir} was not copied to ${target}: $1" >&2
    exit 2
}

# Return whether $1 is $2 or below it. Compares the folders themselves, because a mount can give one folder two names.
is_within() {
    local folder="$1" outer="$2"
    while [[ "${folder}" != "${outer}" && ! "${folder}" -ef "${outer}" ]]; do
        [[ "${folder}" != / ]] || return 1
        folder="$(dirname "${folder}")"
    done
}

# Print path, size and time of each file in folder $1.
list_files() {
    (cd "$1" && find -L . -type f ! -name "${MARK_FILE}" -printf '%P\t%s\t%T@\n' | LC_ALL=C sort)
}

# Return whether each of the listed files has a copy of the same size.
is_complete() {
    local copies
    copies="$(list_files "${target}" 2>/dev/null)" || return 1
    [[ -z "$(LC_ALL=C comm -23 <(cut -f 1,2 <<<"${files}" | LC_ALL=C sort) <(cut -f 1,2 <<<"${copies}" | LC_ALL=C sort))" ]]
}

# Delete all files in the target; the mark remains, so that an interruption does not leave unmarked files.
empty_target() {
    (cd "${target}" && find . -xdev -mindepth 1 ! -path "./${MARK_FILE}" -delete)
}

# Mark the target as ours; the further arguments are the list of its files. A failed write leaves the old mark.
write_mark() {
    if ! printf '%s\n' "${MARK}" "$@" 2>/dev/null >"${mark}.new" || ! mv "${mark}.new" "${mark}"; then
        rm -f "${mark}.new"
        return 1
    fi
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

if is_within "${target}" "${source_dir}"; then
    complain "the target is the source, or is inside it. Set STAGE_DIR to a folder on the node's own disk."
elif is_within "${source_dir}" "${target}"; then
    complain "the source is inside the target. Set STAGE_DIR to a folder on the node's own disk."
fi
((check_only == 0)) || exit 0

[[ -d "${source_dir}" ]] || complain "the source is not a folder"
files="$(list_files "${source_dir}")" || complain "the source cannot be read"
[[ -n "${files}" ]] || complain "the source is empty"
mark="${target}/${MARK_FILE}"
# Appends, because it might be somebody's file.
{ mkdir -p "${target%/*}" && exec 9>>"${target}.lock" && flock 9; } 2>/dev/null || complain "the target cannot be written"
if [[ -e "${target}" ]]; then
    [[ -d "${target}" ]] || complain "the target is a file. Move it away, or set another STAGE_DIR."
    if [[ -n "$(ls -A "${target}")" && "$(head -n 1 "${mark}" 2>/dev/null)" != "${MARK}" ]]; then
        complain "the target already exists, and stage.sh did not make it. Move it away, or set another STAGE_DIR."
    fi
    if [[ "$(tail -n +2 "${mark}" 2>/dev/null)" == "${files}" ]] && is_complete; then
        touch "${mark}" # clusters delete old files
        exit 0
    fi
fi
reason="$(mkdir -p "${target}" 2>&1 && empty_target 2>&1)" || complain "${reason%%$'\n'*}"
write_mark || complain "the target cannot be written, or the disk is full"
# shellcheck disable=SC2016  # the inner bash expands it
if ! reason="$(cut -f 1 <<<"${files}" | tr '\n' '\0' | xargs -0 -P 8 -I {} bash -c 'copy_file "$1"' _ {} 2>&1)"; then
    empty_target && rm "${mark}" && rmdir "${target}"
    complain "${reason%%$'\n'*}"
fi
{ sync -f "${target}" && write_mark "${files}"; } || complain "the disk is full"

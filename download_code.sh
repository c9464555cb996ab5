#!/bin/bash
# Download optional sources that are not in any package index into third_party/<name>, and verify them.
#   ./download_code.sh [--mirror URL] [NAME ...]      default: all of them
# --mirror URL   download URL/<name>-<version>.tar.gz instead of the listed address (file:///... works)
# If a host cannot be reached or a checksum differs, nothing is written and the exit status is 2.
set -euo pipefail

# Print name, version, SHA-256 of the archive and address of each source.
# apex: fused LAMB and distributed LAMB of the published GPU runs; nothing here needs it. Its SHA-256 is the one that the
# package manager Spack pins for the same archive (py-nvidia-apex 24.04.01).
pinned() {
    cat <<'LIST'
apex 24.04.01 065bc5c0146ee579d5db2b38ca3949da4dc799b871961a2c9eb19e18892166ce https://github.com/NVIDIA/apex/archive/refs/tags/24.04.01.tar.gz
LIST
}

root="$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
mirror=""
wanted=()

fail() {
    echo "error: $*" >&2
    exit 2
}

while (($#)); do
    case "$1" in
    --mirror)
        (($# > 1)) || fail "--mirror needs an address."
        mirror="$2" && shift 2
        ;;
    -h | --help) sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}" && exit 0 ;;
    -*) fail "unknown argument $1. Usage: ./download_code.sh [--mirror URL] [NAME ...]" ;;
    *) wanted+=("$1") && shift ;;
    esac
done
for name in "${wanted[@]}"; do
    pinned | grep -q "^${name} " || fail "${name} is not in the list. Known: $(pinned | cut -d' ' -f1 | xargs)."
done
for tool in curl git sha256sum tar; do
    command -v "${tool}" >/dev/null || fail "${tool} is missing. Install its package (Debian: curl, git, coreutils, tar)."
done

mkdir -p "${root}/third_party" || fail "${root}/third_party cannot be created."
# Work in a scratch folder on the same file system, and move the finished result into place with one rename.
scratch="$(mktemp -d "${root}/third_party/.download.XXXXXX")"
trap 'rm -rf "${scratch}"; rmdir --ignore-fail-on-non-empty "${root}/third_party"' EXIT

fetch() {
    local name="$1" version="$2" sha256="$3" url="$4" archive="${scratch}/archive.tar.gz" got commit
    local target="${root}/third_party/${name}"
    if [[ "$(cat "${target}/.sha256" 2>/dev/null)" == "${sha256}" ]]; then
        echo "${name} ${version} is already there: ${target}"
        return 0
    fi
    [[ ! -e "${target}" ]] || fail "${target} contains another version. Remove it and run this again."
    [[ -z "${mirror}" ]] || url="${mirror%/}/${name}-${version}.tar.gz"
    echo "Fetching ${url} ..."
    curl --fail --silent --show-error --location --connect-timeout 15 --retry 2 --output "${archive}" "${url}" ||
        fail "${url} cannot be downloaded; see curl's message above. Check the network or use --mirror. ${name} is optional."
    got="$(sha256sum "${archive}" | cut -d' ' -f1)"
    [[ "${got}" == "${sha256}" ]] || fail "${url} has SHA-256 ${got} instead of ${sha256}. Nothing was written."
    commit="$(gzip -dc "${archive}" | git get-tar-commit-id 2>/dev/null || true)"
    mkdir "${scratch}/${name}"
    tar -xzf "${archive}" -C "${scratch}/${name}" --strip-components=1
    echo "${sha256}" >"${scratch}/${name}/.sha256"
    mv --no-target-directory "${scratch}/${name}" "${target}"
    echo "${name} ${version}, commit ${commit:-not named in the archive}: ${target}"
}

while read -r name version sha256 url; do
    if ((${#wanted[@]} == 0)) || [[ " ${wanted[*]} " == *" ${name} "* ]]; then
        fetch "${name}" "${version}" "${sha256}" "${url}"
    fi
done < <(pinned)

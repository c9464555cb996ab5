#!/bin/bash
# Make a .sqsh for pyxis from an image, with enroot. Does not need root.
#   launch/make_sqsh.sh IMAGE FOLDER
# IMAGE   dockerd://mlbert (the local Docker), podman://mlbert (the local podman), docker://REGISTRY#NAME:TAG (a registry)
# FOLDER  on a file system that every node sees
# The file is FOLDER/NAME-<first 12 digits of its SHA-256>.sqsh. Set CONT in env.sh to it: every log records CONT, so a run can
# be traced to its image. The full digest is written to a file next to it.
set -euo pipefail

fail() {
    echo "error: $*" >&2
    exit 2
}

(($# == 2)) || fail "expected two arguments: launch/make_sqsh.sh IMAGE FOLDER"
image="$1" folder="${2%/}"
[[ "${image}" == *://* ]] || fail "${image} lacks the kind of image. Write dockerd://${image}, podman://${image} or docker://REGISTRY#NAME:TAG."
[[ "${folder}" != *.sqsh ]] || fail "${folder} is a file name. Give a folder; the file is named after its digest."
command -v enroot >/dev/null || fail "enroot is not installed. See https://github.com/NVIDIA/enroot."
mkdir -p "${folder}" || fail "${folder} cannot be created."

name="${image##*[/#]}"
name="${name%%[:@]*}"
partial="${folder}/.${name}.partial-$$.sqsh"
trap 'rm -f "${partial}"' EXIT
enroot import --output "${partial}" "${image}"
digest="$(sha256sum "${partial}")"
digest="${digest%% *}"
out="${folder}/${name}-${digest:0:12}.sqsh"
echo "${digest}  ${out##*/}" >"${out}.sha256"
mv "${partial}" "${out}"
echo "made ${out}. In env.sh: export CONT=${out}"

#!/bin/bash
# Build the image of this tree with docker, podman or buildah, and store the commit in it.
#   launch/build_image.sh NAME[:TAG] [arguments of the builder]
#   launch/build_image.sh mlbert --build-arg BASE_IMAGE=docker.io/pytorch/pytorch:2.11.0-cuda12.8-cudnn9-devel
#   launch/build_image.sh mlbert --build-arg CUDA_ARCHS="9.0"
# BUILDER=... selects the program; the default is the first one found.
set -euo pipefail

if (($# == 0)) || [[ "$1" == -* ]]; then
    echo "error: no name. Usage: launch/build_image.sh NAME[:TAG] [arguments of the builder]" >&2
    exit 2
fi
name="$1"
shift

pytorch_dir="$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
tree_dir="$(cd "${pytorch_dir}/../../../.." && pwd)"

builder="${BUILDER:-}"
for candidate in docker podman buildah; do
    if [[ -z "${builder}" ]] && command -v "${candidate}" >/dev/null; then
        builder="${candidate}"
    fi
done
if [[ -z "${builder}" ]]; then
    echo "error: none of docker, podman and buildah is installed. Install one, or set BUILDER." >&2
    exit 2
fi

commit=unknown dirty=false
if git -C "${tree_dir}" rev-parse --verify --quiet HEAD >/dev/null 2>&1; then
    commit="$(git -C "${tree_dir}" rev-parse HEAD)"
    [[ -z "$(git -C "${tree_dir}" status --porcelain)" ]] || dirty=true
fi

exec "${builder}" build --file "${pytorch_dir}/Dockerfile" --tag "${name}" \
    --build-arg GIT_COMMIT="${commit}" --build-arg GIT_DIRTY="${dirty}" "$@" "${tree_dir}"

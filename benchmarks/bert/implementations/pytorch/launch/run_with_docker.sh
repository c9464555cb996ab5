#!/bin/bash
# Run NEXP experiments on this machine in a Docker container, one after another:
#   source config_<system>.sh && CONT=<image> ../pytorch/launch/run_with_docker.sh
# Settings are those of run.sub for one node; DOCKER_ARGS are further arguments of docker run.
set -euo pipefail

case "${1:-}" in
-h | --help) sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}" && exit 0 ;;
?*) echo "error: run_with_docker.sh takes no arguments ($1): export settings, and put arguments of docker run in DOCKER_ARGS." >&2 && exit 2 ;;
esac

: "${CONFIG_FILE:?is not set: source a config_<system>.sh first}"
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

in_container() {
    local words=() name
    for name in "${exported[@]}"; do
        words+=(--env "${name}")
    done
    docker exec "${words[@]}" --env PYTHONPATH --env MLBERT_IMAGE_DIGEST --workdir "${system_dir}" "${container}" "$@"
}

mlbert_once() {
    in_container "${PYTHON:-python3}" -m mlbert "$@"
}

check_settings
((DGXNNODES == 1)) || fail "DGXNNODES=${DGXNNODES}, but Docker starts one node. Use run.sub or run_multinode.sh."
[[ -n "${CONT:-}" ]] || fail "CONT is not set. Name the image: CONT=<image> ../pytorch/launch/run_with_docker.sh"
[[ "${CONT}" != *.sqsh && "${CONT}" != *.sif ]] || fail "CONT=${CONT} is a file for other launchers. Name Docker's image: CONT=<image> ../pytorch/launch/run_with_docker.sh"
choose_python
choose_mounts
list_settings
container="mlbert_${DGXSYSTEM:-run}_$$"
gpus=()
[[ ! -e /proc/driver/nvidia/version ]] || gpus=(--gpus all)
volumes=()
for mount in "${mounts[@]}"; do
    volumes+=(--volume "${mount}")
done
read -r -a site_args <<<"${DOCKER_ARGS:-}"
docker run --rm --init --detach --name "${container}" "${gpus[@]}" --net=host --uts=host --ipc=host \
    --user "$(id -u):$(id -g)" --security-opt=seccomp=unconfined --ulimit=stack=67108864 --ulimit=memlock=-1 \
    "${site_args[@]}" "${volumes[@]}" "${CONT}" sleep infinity >/dev/null || fail "the container of CONT=${CONT} did not start."
# shellcheck disable=SC2064  # expand the name now
trap "docker container rm --force '${container}' >/dev/null" EXIT
# The registry's digest, or the image's own if it was never pushed or pulled.
MLBERT_IMAGE_DIGEST="$(docker image inspect --format '{{if .RepoDigests}}{{index .RepoDigests 0}}{{else}}{{.Id}}{{end}}' "${CONT}")"
export MLBERT_IMAGE_DIGEST
train_on_this_machine in_container

# Create or update a virtual environment and put it first in PATH. Sourced by quickstart.sh and run_tests.sh:
#   setup_venv ROOT [EXTRA [VENV]]
# EXTRA is a comma-separated list of pyproject's optional dependencies; VENV is the folder of the environment, by default
# .venv in the root of the repository.
# PYTHON is the interpreter to create it with; by default the oldest supported one.
# TORCH_INDEX is the package index to install torch from, such as https://download.pytorch.org/whl/cu128
# shellcheck shell=bash

if [[ "${OSTYPE}" != linux* ]]; then
    echo "error: Linux is required, but this is ${OSTYPE}. Try: docker run -it --rm -v \"\$PWD:/tree\" -w /tree python:3.11 $0" >&2
    exit 2
fi

# Print the first interpreter from 3.11 on that can create a virtual environment with pip; PYTHON is tried first.
find_python() {
    local candidate version="" newest=""
    for candidate in ${PYTHON:+"${PYTHON}"} python3.11 python3.12 python3.13 python3; do
        version="$("${candidate}" -c 'import sys; print("%d.%d" % sys.version_info[:2], sys.version_info >= (3, 11))' 2>/dev/null)" || continue
        [[ "${version}" == *True ]] || continue
        if "${candidate}" -c 'import ensurepip, venv' 2>/dev/null; then
            command -v "${candidate}"
            return 0
        fi
        newest="${newest:-${version% *}}"
    done
    if [[ -n "${newest}" ]]; then
        echo "error: Python ${newest} has no venv and ensurepip. Install the package python${newest}-venv (Debian: apt install python${newest}-venv)." >&2
    else
        echo "error: no Python 3.11 or newer found. Install the packages python3.11 and python3.11-venv (Debian 12: apt install python3 python3-venv)." >&2
    fi
    return 2
}

# Print an additional index for torch, if any. PyPI's torch for Linux includes CUDA's libraries, so a machine without an
# NVIDIA driver also uses PyTorch's CPU index if it is reachable. pip prefers 2.13.0+cpu to 2.13.0 if it sees both.
torch_index() {
    local python="$1" url="https://download.pytorch.org/whl/cpu"
    if [[ -n "${TORCH_INDEX:-}" ]]; then
        echo "${TORCH_INDEX}"
        return 0
    fi
    [[ -e /proc/driver/nvidia/version ]] && return 0
    "${python}" - "${url}/torch/" <<'PYTHON' && echo "${url}"
import sys
import urllib.request

try:
    urllib.request.urlopen(sys.argv[1], timeout=5).close()
except OSError:
    sys.exit(1)
PYTHON
    return 0
}

# Print the size of the torch download from the index $1 (see torch_index).
torch_size() {
    case "$1" in
    */cpu) printf 'torch for the CPU from %s:\n  0.2 GB to download, 1 GB on disk; TORCH_INDEX=URL chooses another one\n' "$1" ;;
    ?*) echo "torch from $1" ;;
    *) echo "torch with CUDA: 3 GB to download, 5 GB on disk; TORCH_INDEX=URL chooses another one" ;;
    esac
}

# pip keeps what is complete, so the next call of setup_venv continues.
interrupted_installation() {
    echo >&2
    echo "interrupted while installing; the same command continues" >&2
    exit 130
}

setup_venv() {
    local root="$1" extra="${2:-}" venv="${3:-$1/.venv}"
    local mark=mlbert-made-this stamp want python index source messages pip_output
    stamp="${venv}/mlbert-installed${extra:+-${extra//,/-}}"
    # The stamp includes the path because neither a virtual environment nor an editable install can be moved.
    want="$({ echo "${root}" && cat "${root}/pyproject.toml" "${root}/constraints.txt"; } | sha256sum | cut -d' ' -f1)"
    if [[ -x "${venv}/bin/python" && -f "${stamp}" && "$(cat "${stamp}")" == "${want}" ]]; then
        export PATH="${venv}/bin:${PATH}"
        return 0
    fi
    trap interrupted_installation INT
    if ! "${venv}/bin/python" -m pip --version >/dev/null 2>&1; then
        # Somebody's own environment may have no pip, such as one that uv made.
        if [[ ! -e "${venv}/${mark}" && -n "$(ls -A "${venv}" 2>/dev/null)" ]] && ! compgen -G "${venv}/mlbert-installed*" >/dev/null; then
            echo "error: ${venv} is not an environment with pip, and was not made by this program. Move it away." >&2
            return 2
        fi
        python="$(find_python)" || return 2
        if ! { mkdir -p "${venv}" && touch "${venv}/${mark}"; } 2>/dev/null; then
            echo "error: ${venv} cannot be written. Name a folder for the virtual environment with --venv DIR." >&2
            return 2
        fi
        find "${venv}" -xdev -mindepth 1 ! -name "${mark}" -delete || return 2
        messages="$("${python}" -m venv "${venv}" 2>&1)" || { echo "${messages}" >&2 && return 2; }
    fi
    echo "Installing into ${venv} with $("${venv}/bin/python" --version); a few minutes the first time."
    export PATH="${venv}/bin:${PATH}"
    # A CUDA torch brings the Triton it was built with; the pin is for builds without one.
    local pins="${venv}/constraints.txt"
    # Building writes next to the sources, so a repository that cannot be written is copied first.
    source="${root}"
    if [[ ! -w "${root}" ]]; then
        source="${venv}/mlbert-source"
        rm -rf "${source}" && mkdir "${source}" || return 2
        cp -r "${root}/"{pyproject.toml,setup.py,README.md,LICENSE,NOTICE,audit,benchmarks} "${source}" || return 2
        chmod -R u+w "${source}"
    fi
    grep -v '^triton==' "${root}/constraints.txt" >"${pins}"
    index="$(torch_index python)"
    torch_size "${index}"
    # What pip prints is shown if it fails, but not if it is interrupted.
    pip_output="${venv}/messages.txt"
    pip_install() {
        python -m pip install --quiet --quiet --disable-pip-version-check --constraint "${pins}" "$@" 2>"${pip_output}"
    }
    # Install setuptools first, so that the build does not download a second, unpinned copy.
    if ! { echo "1/3 setuptools ..." && pip_install setuptools &&
        echo "2/3 torch ..." && pip_install ${index:+"--extra-index-url=${index}"} torch &&
        echo "3/3 mlbert and the rest ..." &&
        { python -c 'import triton' 2>/dev/null || cp "${root}/constraints.txt" "${pins}"; } &&
        pip_install --no-build-isolation --editable "${source}${extra:+[${extra}]}"; }; then
        cat "${pip_output}" >&2
        echo "error: the installation failed; see pip's message above. Fix the cause (network, disk space) and run the same command again." >&2
        return 2
    fi
    echo "${want}" >"${stamp}"
    trap - INT
}

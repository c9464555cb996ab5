# For programs that source a config themselves, so that their user can only export settings before that:
#   source_config CONFIG     source it; settings exported before win over it
# Sourcing a config in a shell does the opposite: it clears every setting, and settings exported afterwards win.
# shellcheck shell=bash

source_config() {
    local name given=()
    # shellcheck disable=SC2013  # splits into words on purpose; reset_settings.sh lists every setting
    for name in $(grep --invert-match '^#' "$(dirname "${BASH_SOURCE[0]}")/reset_settings.sh"); do
        if [[ "${name}" =~ ^[A-Z] && "$(declare -p "${name}" 2>/dev/null)" == "declare -x"* ]]; then
            given+=("${name}=${!name}")
        fi
    done
    # shellcheck source=/dev/null
    source "$1"
    ((${#given[@]} == 0)) || export "${given[@]}"
}

# For programs that source a config themselves, because whoever starts them can only export before that:
#   source_config CONFIG     sources it; the settings that were exported before win over it
# A person who sources a config in a shell has it the other way round: that forgets every setting, and what is exported
# afterwards wins.
# shellcheck shell=bash

source_config() {
    local name given=()
    # shellcheck disable=SC2013  # words are wanted; reset_settings.sh is made from the table of all settings
    for name in $(grep --invert-match '^#' "$(dirname "${BASH_SOURCE[0]}")/reset_settings.sh"); do
        if [[ "${name}" =~ ^[A-Z] && "$(declare -p "${name}" 2>/dev/null)" == "declare -x"* ]]; then
            given+=("${name}=${!name}")
        fi
    done
    # shellcheck source=/dev/null
    source "$1"
    ((${#given[@]} == 0)) || export "${given[@]}"
}

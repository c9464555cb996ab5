# Sourced by the first line of every system's env.sh: clears the settings of other configs, names this config (or, without
# one, the folder), and sets the paths that env.sh and the configs use.
#   system_dir   the system's folder            pytorch_dir   the code next to it           tree_dir   the root of the tree
# shellcheck shell=bash disable=SC2034,SC2154  # env.sh uses them; funcfiletrace is zsh's stack of sourcing files

if [[ -n "${ZSH_VERSION:-}" ]]; then
    site_file="${funcfiletrace[1]%:*}" config_file="${funcfiletrace[2]%:*}"
else
    site_file="${BASH_SOURCE[1]}" config_file="${BASH_SOURCE[2]:-}"
fi
system_dir="$(cd "$(dirname "${site_file}")" && pwd)"
# A link to the folder from elsewhere has no code next to it.
[[ -d "${system_dir%/*}/pytorch" ]] || system_dir="$(cd "${system_dir}" && pwd -P)"
pytorch_dir="${system_dir%/*}/pytorch"
tree_dir="$(cd "${system_dir}/../../../.." && pwd)"
# shellcheck source-path=SCRIPTDIR source=reset_settings.sh
source "${pytorch_dir}/launch/reset_settings.sh"

if [[ "${config_file##*/}" == config_*.sh ]]; then
    export CONFIG_FILE="${system_dir}/${config_file##*/}"
    DGXSYSTEM="$(basename "${CONFIG_FILE}" .sh)"
    export DGXSYSTEM="${DGXSYSTEM#config_}"
else
    export DGXSYSTEM="${system_dir##*/}"
fi
unset site_file config_file

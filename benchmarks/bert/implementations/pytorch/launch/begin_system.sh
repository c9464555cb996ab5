# The first line of every system's env.sh sources this: it forgets the settings of any other config, names this one and
# sets what env.sh and the configs build paths from.
#   system_dir   the system's folder            pytorch_dir   the code beside it            tree_dir   the whole tree
# shellcheck shell=bash disable=SC2034

# Sourced by env.sh, which is sourced by a config: the call stack has them in this order.
config_file="${BASH_SOURCE[2]:?source a config_<system>.sh, which sources env.sh}"
system_dir="$(cd "$(dirname "${config_file}")" && pwd)"
pytorch_dir="$(cd "${system_dir}/../pytorch" && pwd)"
tree_dir="$(cd "${system_dir}/../../../.." && pwd)"
# shellcheck source-path=SCRIPTDIR source=reset_settings.sh
source "${pytorch_dir}/launch/reset_settings.sh"

export CONFIG_FILE="${system_dir}/${config_file##*/}"
DGXSYSTEM="$(basename "${CONFIG_FILE}" .sh)"
export DGXSYSTEM="${DGXSYSTEM#config_}"

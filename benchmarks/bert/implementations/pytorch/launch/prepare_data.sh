#!/bin/bash
# Prepare training data from text parts, TFRecords, NVIDIA's shards or a WikiExtractor folder. Started again, it continues
# after the last finished step. docs/data.md describes each step and its time.
#   prepare_data.sh --outputdir DIR (--input DIR | --download) [--packed | --bins] [options]
#   prepare_data.sh --slurm N [--workers N] -- COMMAND    one step, such as: mlbert prepare pack --input DIR --out DIR
# --outputdir DIR      output folder
# --input DIR          text parts, TFRecord files, HDF5 shards of NVIDIA's scripts, or a WikiExtractor folder
# --download           fetch the benchmark's text, vocabulary and checkpoint; --mirror: a URL or folder to fetch from
# --vocab FILE         vocabulary (default: vocab.txt of the download or of the input folder)
# --checkpoint PREFIX  TensorFlow 1 checkpoint to start from, without .index (default: that of the download)
# --eval PATH          evaluation text, or a folder of TFRecords or HDF5 shards (default: eval.txt of the text)
# --packed             store packs of up to 512 tokens; --bins: a folder for each range of lengths; default: neither
# --packed-data        published name of --download --packed; with --skip-download it uses the files in DIR/download
# --shards N           shards of the packed set or of each bin
# --workers N          processes (default: one per core; with --slurm 8 in each job)
# --slurm N            submit the steps to Slurm, each after the one before; those that can be divided run as arrays of N
#                      jobs. A job that is killed runs again, up to 3 times. SBATCH_PARTITION etc. apply to all
# --parts N            text parts to make of a WikiExtractor folder (default 500)
# --eval-articles N    articles to withhold from a WikiExtractor folder (default 10000)
# --eval-samples N     samples of the evaluation set (default 10000)
set -euo pipefail

slurm=0 last="" submitted=() outputdir="" input="" download=0 published=0 skip=0 mirror="" vocab="" checkpoint="" evaluation="" layout="" shards="" workers=0
parts=500 eval_articles=10000 eval_samples=10000

fail() {
    echo "error: $*" >&2
    exit 2
}

while (($#)); do
    case "$1" in
    --packed | --packed-data | --bins)
        [[ "$1" != --packed-data ]] || published=1
        word="${1%-data}"
        [[ -z "${layout}" || "${layout}" == "${word#--}" ]] || fail "--packed and --bins exclude each other."
        layout="${word#--}" && shift
        continue
        ;;
    --skip-download) skip=1 && shift && continue ;;
    --download) download=1 && shift && continue ;;
    -h | --help) sed -n '2,22s/^# //p' "${BASH_SOURCE[0]}" && exit 0 ;;
    --) shift && break ;;
    esac
    (($# > 1)) || fail "$1 needs a value, or is unknown. See prepare_data.sh --help."
    case "$1" in
    --outputdir) outputdir="$2" ;;
    --input) input="$2" ;;
    --mirror) mirror="$2" ;;
    --vocab) vocab="$2" ;;
    --checkpoint) checkpoint="$2" ;;
    --eval) evaluation="$2" ;;
    --shards) shards="$2" ;;
    --workers) workers="$2" ;;
    --slurm) slurm="$2" ;;
    --parts) parts="$2" ;;
    --eval-articles) eval_articles="$2" ;;
    --eval-samples) eval_samples="$2" ;;
    *) fail "unknown argument $1. See prepare_data.sh --help." ;;
    esac
    shift 2
done
[[ "${slurm}" =~ ^(0|[1-9][0-9]{0,3})$ ]] || fail "--slurm ${slurm}: not a number of jobs from 1 to 9999."
if ((slurm)); then
    command -v sbatch >/dev/null || fail "--slurm: sbatch is not in PATH. Run this where jobs are submitted."
    ((workers)) || workers=8
    # Ask before anything is submitted; the largest index of an array is one less.
    most="$(scontrol show config 2>/dev/null | sed -n 's/^MaxArraySize *= *//p' || true)"
    [[ -z "${most}" ]] || ((slurm <= most)) || fail "--slurm ${slurm}: this Slurm allows arrays of at most ${most} jobs (MaxArraySize)."
fi

# Print a command and run it, or submit it.
run() {
    local passes=0 pass share="--task \${SLURM_ARRAY_TASK_ID}/${slurm}"
    echo "+ $*"
    if ((slurm == 0)); then
        "$@"
        return
    fi
    case " $* " in
    *" prepare bins "*) passes=3 ;;
    *" prepare pack "* | *" prepare shuffle "* | *convert_dataset.py*) passes=2 ;;
    *" prepare instances "* | *" prepare import "* | *" tfrecord-to-hdf5 "* | *" hdf5-to-tfrecord "*) passes=1 ;;
    esac
    for ((pass = 0; pass < passes; pass++)); do
        submit "${*@Q} ${share}" "--array=0-$((slurm - 1))"
    done
    submit "${*@Q} $( ((passes == 0)) || echo --merge)"
}

# Cancel the jobs submitted so far, because one that they need or that needs them was refused.
withdraw() {
    ((${#submitted[@]})) || fail "sbatch refused a job; see its message above."
    scancel "${submitted[@]}"
    fail "sbatch refused a job; see its message above. The jobs submitted before it are canceled: ${submitted[*]}."
}

# Submit the shell command $1 to run after the last job, with further options of sbatch. A killed command is lost, not
# wrong: the job runs again. So does a share that ends with 75, because its node does not see yet what the pass before it
# wrote. The name of an array's job needs its index, because one of them has the id of the array.
submit() {
    local id command="$1" job="\${SLURM_ARRAY_JOB_ID:-\${SLURM_JOB_ID}}\${SLURM_ARRAY_TASK_ID:+_\${SLURM_ARRAY_TASK_ID}}"
    id="$(sbatch --parsable --requeue --kill-on-invalid-dep=yes --cpus-per-task="${workers}" --job-name=prepare \
        ${last:+--dependency="afterok:${last}"} ${outputdir:+--output="${outputdir}/slurm-%j.out"} "${@:2}" --wrap "status=0
${command} || status=\$?
[ \${status} -le 128 ] && [ \${status} -ne 75 ] || [ \${SLURM_RESTART_COUNT:-0} -ge 3 ] || { scontrol requeue ${job} && sleep 600; }
exit \${status}")" || withdraw
    last="${id%%;*}" # without the cluster's name
    submitted+=("${last}")
    echo "job ${last}: ${command}"
}

if (($#)); then
    ((slurm)) || fail "a command after -- needs --slurm N."
    [[ -z "${outputdir}" ]] || mkdir -p "${outputdir}"
    run "$@" --workers "${workers}"
    exit 0
fi
[[ -n "${outputdir}" ]] || fail "--outputdir is missing. See prepare_data.sh --help."
if ((published)) && [[ -z "${input}" ]]; then
    download=$((1 - skip))
    # As `prepare download` leaves it, or as NVIDIA's script does.
    if ((skip)) && [[ -d "${outputdir}/download/results4" ]]; then
        input="${outputdir}/download/results4" first="${outputdir}/phase1"
        vocab="${vocab:-${first}/vocab.txt}" checkpoint="${checkpoint:-${first}/model.ckpt-28252}"
    elif ((skip)); then
        input="${outputdir}/download/text" first="${outputdir}/download"
        [[ -d "${input}" ]] || fail "${outputdir}/download contains neither text nor results4. Leave --skip-download out."
        vocab="${vocab:-${first}/vocab.txt}" checkpoint="${checkpoint:-${first}/tf1_ckpt/model.ckpt-28252}"
    fi
fi
((download)) || [[ -n "${input}" ]] || fail "--input is missing (or --download). See prepare_data.sh --help."
((download == 0)) || [[ -z "${input}" ]] || fail "--input and --download exclude each other."
command -v mlbert >/dev/null || fail "mlbert is not in PATH. Run ./quickstart.sh once and source .venv/bin/activate, or pip install the tree."
mkdir -p "${outputdir}" 2>/dev/null || fail "${outputdir} cannot be created. Choose another --outputdir."
outputdir="$(realpath "${outputdir}")"

step() {
    run mlbert "$@"
}

# Convert the data at $1 to a prepared set in $2; the generator makes one from text, as `clean` leaves it.
take_over() {
    local kind=text
    [[ ! -e "$1" ]] || kind="$(mlbert prepare recognize "$1")"
    case "${kind}" in
    text) step prepare instances --input "$1" --vocab "${vocab}" --out "$2" --workers "${workers}" ;;
    tfrecord) step prepare tfrecord-to-hdf5 --input "$1" --vocab "${vocab}" --out "$2" --workers "${workers}" ;;
    nvidia) step prepare import --input "$1" --vocab "${vocab}" --out "$2" --workers "${workers}" ;;
    *) fail "$1 is ${kind}: nothing to prepare." ;;
    esac
}

if ((download)); then
    slurm=0 step prepare download --out "${outputdir}/download" ${mirror:+--mirror "${mirror}"}
    input="${outputdir}/download/text"
    vocab="${vocab:-${outputdir}/download/vocab.txt}"
    checkpoint="${checkpoint:-${outputdir}/download/tf1_ckpt/model.ckpt-28252}"
fi
vocab="${vocab:-${input}/vocab.txt}"
[[ -f "${vocab}" ]] || fail "${vocab} does not exist. Name the vocabulary with --vocab."
kind="$(mlbert prepare recognize "${input}")"
echo "${input} is ${kind}."

# First of all, because it needs TensorFlow, which may be missing.
if [[ -n "${checkpoint}" && ! -e "${outputdir}/checkpoint/model.safetensors" ]]; then
    shape="$(dirname "${checkpoint}")/bert_config.json" # the download has it one folder up
    [[ -f "${shape}" ]] || shape="$(dirname "${checkpoint}")/../bert_config.json"
    step convert tf1-to-torch "${checkpoint}" "${outputdir}/checkpoint" --config "${shape}"
fi
if [[ "${kind}" == wikiextractor ]]; then
    step prepare clean --input "${input}" --out "${outputdir}/text" --parts "${parts}" --eval-articles "${eval_articles}" --workers "${workers}"
    input="${outputdir}/text"
fi
if [[ -f "${input}/eval.txt" ]] || { ((slurm && eval_articles)) && [[ "${kind}" == wikiextractor ]]; }; then
    evaluation="${evaluation:-${input}/eval.txt}"
fi

train="${outputdir}/instances"
take_over "${input}" "${train}"
case "${layout}" in
packed) step prepare pack --input "${train}" --out "${outputdir}/packed" ${shards:+--shards "${shards}"} --workers "${workers}" ;;
bins) step prepare bins --input "${train}" --out "${outputdir}/bins" ${shards:+--shards "${shards}"} --workers "${workers}" ;;
esac
train="${outputdir}/${layout:-instances}"

if [[ -n "${evaluation}" ]]; then
    take_over "${evaluation}" "${outputdir}/eval_instances"
    step prepare eval-set --input "${outputdir}/eval_instances" --out "${outputdir}/eval" --num "${eval_samples}"
fi

step prepare verify "${train}" --workers "${workers}"
[[ -z "${evaluation}" ]] || step prepare verify "${outputdir}/eval" --workers "${workers}"
((slurm == 0)) || echo "Job ${last} is the last one; its output and that of the others is in ${outputdir}/slurm-*.out."
[[ -z "${layout}" ]] || echo "Training does not read ${outputdir}/instances; it may be removed."
echo "For the config of your system:"
echo "export DATADIR_PHASE2=\"${train}\""
if [[ -n "${evaluation}" ]]; then echo "export EVALDIR=\"${outputdir}/eval\""; else echo "# EVALDIR: no evaluation data; name it with --eval"; fi
if [[ -n "${checkpoint}" ]]; then
    echo "export INIT_CHECKPOINT=\"${outputdir}/checkpoint\""
    echo "export BERT_CONFIG=\"${outputdir}/checkpoint/bert_config.json\""
fi

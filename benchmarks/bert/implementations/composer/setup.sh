# Site facts of 8 x A100 80 GB: paths, ranks and submitter, each unless it is exported already. Yours will differ: edit this
# file, or export, not the configs. Sourced by run_and_time.sh, which sets `pytorch_dir` and `config`.
# shellcheck shell=bash disable=SC2154

# Samples that were masked at 20 %, of any kind that DATADIR_PHASE2 takes, MDS sets included; and at 15 % for evaluation.
data_dir=/data/bert
export DATADIR_PHASE2="${DATADIR_PHASE2:-${data_dir}/mlm20}"
export EVALDIR="${EVALDIR:-${data_dir}/eval}"
# What scripts/convert_ckpt_baseline.py and convert_ckpt_methods.py make.
export INIT_CHECKPOINT="${INIT_CHECKPOINT:-${data_dir}/bert_large_${config}}"
export BERT_CONFIG="${BERT_CONFIG:-${pytorch_dir}/configs/large.json}"

# As many ranks as this machine has GPUs; one without any.
num_gpus="$(nvidia-smi --list-gpus 2>/dev/null | grep -c GPU || true)"
export DGXNNODES=1 DGXNGPU="${DGXNGPU:-$((num_gpus > 0 ? num_gpus : 1))}"
export NEXP="${NEXP:-10}"
export TIMED="${TIMED:-1}" # a submission: an interrupted run is recorded as aborted, never continued
export MLPERF_SUBMISSION_ORG="${MLPERF_SUBMISSION_ORG:-your_organisation}"

# Site settings of 8 x A100 80 GB: paths, ranks and submitter. Exported settings win over them. Edit this file for your
# site, not the configs. Sourced by run_and_time.sh, which sets `pytorch_dir` and `config`.
# shellcheck shell=bash disable=SC2154

# Samples masked at 20 % for training, in any format of DATADIR_PHASE2 including MDS, and at 15 % for evaluation.
data_dir=/data/bert
export DATADIR_PHASE2="${DATADIR_PHASE2:-${data_dir}/mlm20}"
export EVALDIR="${EVALDIR:-${data_dir}/eval}"
# Written by scripts/convert_ckpt_baseline.py and convert_ckpt_methods.py.
export INIT_CHECKPOINT="${INIT_CHECKPOINT:-${data_dir}/bert_large_${config}}"
export BERT_CONFIG="${BERT_CONFIG:-${pytorch_dir}/configs/large.json}"

# One rank per GPU of this machine, or one rank without GPUs.
num_gpus="$(nvidia-smi --list-gpus 2>/dev/null | grep -c GPU || true)"
export DGXNNODES=1 DGXNGPU="${DGXNGPU:-$((num_gpus > 0 ? num_gpus : 1))}"
export NEXP="${NEXP:-10}"
export TIMED="${TIMED:-1}" # a submission: an interrupted run is recorded as aborted, never continued
export MLPERF_SUBMISSION_ORG="${MLPERF_SUBMISSION_ORG:-your_organization}"

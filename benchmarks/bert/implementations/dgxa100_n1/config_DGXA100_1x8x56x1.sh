# BERT-large, unpacked, on one DGX A100 with 8 x 80 GB.
# 1 node x 8 GPUs x 56 sequences per optimizer step x 1 accumulation step: global batch 448 sequences.
# shellcheck shell=bash source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]:-$0}")/env.sh"

export DGXNNODES=1
export DGXNGPU=8
export NEXP=1
export WALLTIME=75

export RECIPE=packed_lamb
export BERT_CONFIG="${pytorch_dir}/configs/large.json"
export PRECISION=bf16
export BATCHSIZE=56
export GRADIENT_STEPS=1
export PACKING_FACTOR=1
export MAX_SEQUENCES_PER_PACK=1
export DATADIR_PHASE2="${data_dir}/instances"
export EXCHANGE_PADDING=all   # published: --exchange_padding, over all ranks
export SHARDED_OPTIMIZER=node # published: --distributed_lamb, whose groups are a node's GPUs
export WEIGHTS_ALLGATHER=bf16 # published: float16, the weights that its model has

export LR=0.000425
export MAX_STEPS=6700
export WARMUP_PROPORTION=0
export START_WARMUP_STEP=0
export OPT_LAMB_BETA_1=0.9
export OPT_LAMB_BETA_2=0.999
export WEIGHT_DECAY_RATE=0.01

export MAX_SAMPLES_TERMINATION=4500000
export EVAL_ITER_START_SAMPLES=150000
export EVAL_ITER_SAMPLES=150000

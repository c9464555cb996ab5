# BERT-large, packed, FP8 products, on two nodes with 4 GB200 each.
# 2 nodes x 4 GPUs x 48 packs per optimizer step x 1 accumulation step: global batch 768 sequences.
# shellcheck shell=bash source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]:-$0}")/env.sh"

export DGXNNODES=2
export DGXNGPU=4
export NEXP=10
export WALLTIME=85

export RECIPE=packed_lamb
export BERT_CONFIG="${pytorch_dir}/configs/large.json"
export PRECISION=fp8             # published: --use_transformer_engine2
export FP8_FAST_ACCUMULATION=all # published: _2X_ACC_FPROP, _DGRAD and _WGRAD are False
export BATCHSIZE=48
export GRADIENT_STEPS=1
export PACKING_FACTOR=2
export CUDA_GRAPH_MODE=full_iteration # published: segmented, in which our reduction would not overlap backward
export SHARDED_OPTIMIZER=node         # published: --distributed_lamb, whose groups are a node's GPUs
export GRADIENT_REDUCTION=bf16        # published: float16
export WEIGHTS_ALLGATHER=bf16         # published: float16, the weights that its model has
# The three as in the published config_common.sh of v5.0.
export NCCL_NVLS_ENABLE=1
export NCCL_GRAPH_REGISTER=0
export NCCL_LOCAL_REGISTER=0

export LR=0.00096
export MAX_STEPS=3680
export WARMUP_PROPORTION=0
export START_WARMUP_STEP=0
export OPT_LAMB_BETA_1=0.60466
export OPT_LAMB_BETA_2=0.85437
export WEIGHT_DECAY_RATE=0.1

export MAX_SAMPLES_TERMINATION=4500000
export EVAL_ITER_START_SAMPLES=150000
export EVAL_ITER_SAMPLES=150000

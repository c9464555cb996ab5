# BERT-large, packed, FP8 products, on eight DGX H100.
# 8 nodes x 8 GPUs x 36 packs per optimizer step x 1 accumulation step: global batch 4,608 sequences.
# shellcheck shell=bash source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]:-$0}")/env.sh"

export DGXNNODES=8
export DGXNGPU=8
export NEXP=10
export WALLTIME=45

export RECIPE=packed_lamb
export BERT_CONFIG="${pytorch_dir}/configs/large.json"
export PRECISION=fp8             # published: --use_transformer_engine2
export FP8_FAST_ACCUMULATION=all # published: _2X_ACC_FPROP, _DGRAD and _WGRAD are False
export BATCHSIZE=36
export GRADIENT_STEPS=1
export PACKING_FACTOR=2
export CUDA_GRAPH_MODE=full_iteration # published: segmented, in which our reduction would not overlap backward
export SHARDED_OPTIMIZER=node         # published: --distributed_lamb, whose groups are a node's GPUs
export GRADIENT_REDUCTION=bf16        # published: float16
export WEIGHTS_ALLGATHER=bf16         # published: float16, the weights that its model has

export LR=0.00301
export MAX_STEPS=740
export WARMUP_STEPS=200330
export START_WARMUP_STEP=-200000
export OPT_LAMB_BETA_1=0.6
export OPT_LAMB_BETA_2=0.7
export WEIGHT_DECAY_RATE=0.1

export MAX_SAMPLES_TERMINATION=4500000
export EVAL_ITER_START_SAMPLES=200000
export EVAL_ITER_SAMPLES=200000

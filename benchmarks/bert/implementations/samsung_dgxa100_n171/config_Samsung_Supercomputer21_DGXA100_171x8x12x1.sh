# BERT-large, unpacked from bins, on 171 DGX A100: Adam, each bucket of a rank's gradient clipped.
# 171 nodes x 8 GPUs x 12 sequences per optimizer step x 1 accumulation step: global batch 16,416 sequences.
# shellcheck shell=bash source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]:-$0}")/env.sh"

export DGXNNODES=171
export DGXNGPU=8
export NEXP=10
export WALLTIME=60

export RECIPE=ddp_adam
export BERT_CONFIG="${pytorch_dir}/configs/large.json"
export PRECISION=fp16
export BATCHSIZE=12
export GRADIENT_STEPS=1
export PACKING_FACTOR=1
export MAX_SEQUENCES_PER_PACK=1
export BIN_COUNTS="4 2 2 4"
export EXCHANGE_PADDING=group
export GRADIENT_CLIPPING=buckets

export OPTIMIZER=adamw
export LR=0.00039299421615882676
export END_LR=0.0000494549100544884
export OPT_LAMB_BETA_1=0.8003575444254268
export OPT_LAMB_BETA_2=0.8174653681457493
export OPT_EPSILON=1e-9
export WEIGHT_DECAY_RATE=0.0028861703130042965
export SCHEDULE=linear
export WARMUP_STEPS=82
export START_WARMUP_STEP=-16
export LR_FIRST_STEP=1
export LR_DECAY_END=179
export MAX_STEPS=299

export MAX_SAMPLES_TERMINATION=5000000
export EVAL_ITER_START_SAMPLES=325000
export EVAL_ITER_SAMPLES=325000

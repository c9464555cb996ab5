# ModernBERT-base, stage 1, on one node with 8 x H100.
# 1 node x 8 GPUs x 576 rows per optimizer step in 6 accumulation steps: 4,608 rows of 1,024 tokens.
# shellcheck shell=bash source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]:-$0}")/env.sh"

export DGXNNODES=1
export DGXNGPU=8
export NEXP=1
export WALLTIME=2880
export MLPERF_SUBMISSION_PLATFORM=dgxh100_n1

export RECIPE=masked_lm
export BERT_CONFIG="${pytorch_dir}/configs/modernbert_base.json"
export MODEL_OPTIONS=rope_theta=10000
export PRECISION=bf16
export MAX_SEQ_LENGTH=1024
export MAX_SEQUENCES_PER_PACK=32
export PACKING_FACTOR=1
export LONG_TEXTS=split
export SHUFFLE=py1s
export SHUFFLE_SEED=9176
export CANONICAL_NODES=128
export MASKING_RATE=0.3
export EVAL_MASKING_RATE=0.15
export BATCHSIZE=576
export GRADIENT_STEPS=6
export BATCHSIZE_WARMUP_START=96
export BATCHSIZE_WARMUP_STEPS=10597

export OPTIMIZER=decoupled_stableadamw
export LR=0.0008
export OPT_LAMB_BETA_1=0.9
export OPT_LAMB_BETA_2=0.98
export OPT_EPSILON=1e-6
export WEIGHT_DECAY_RATE=1e-5
export DECAY_ALL=no
export SCHEDULE=constant
export STEP_TOKENS=4718592
export MAX_STEPS=364304
export WARMUP_STEPS=636
export LR_FIRST_STEP=0

export TARGET_MLM_ACCURACY=none
export NUM_EVAL_EXAMPLES=none
export EVAL_BATCH_SIZE=128
export EVAL_ITER_START_SAMPLES=18432000
export EVAL_ITER_SAMPLES=18432000
export EVAL_ITER_STEPS=4000
export MAX_SAMPLES_TERMINATION=1000000000000
export SAVE_CHECKPOINT_STEPS=1000
export KEEP_CHECKPOINTS=1000

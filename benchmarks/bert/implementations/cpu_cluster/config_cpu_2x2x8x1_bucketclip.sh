# BERT of 1 layer x 128 from random initialization on bins of the English that Python ships: two nodes, two ranks each.
# 2 nodes x 2 ranks x 8 sequences per optimizer step x 1 accumulation step.
# shellcheck shell=bash source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]:-$0}")/env.sh"

export DGXNNODES=2
export DGXNGPU=2
export NEXP=10
export WALLTIME=120

export RECIPE=ddp_adam
export BERT_CONFIG="${pytorch_dir}/configs/demo.json"
export BATCHSIZE=8
export GRADIENT_STEPS=1
export PACKING_FACTOR=1
export MAX_SEQUENCES_PER_PACK=1
export DATADIR_PHASE2="${tree_dir}/runs/quickstart/data/bins"
export BIN_COUNTS="1 1 1 5"
export EXCHANGE_PADDING=group
export GRADIENT_CLIPPING=buckets
export BUCKET_MIB=1 # three buckets; 25 MiB would be one

export OPTIMIZER=adamw
export LR=4e-3
export OPT_LAMB_BETA_1=0.9
export OPT_LAMB_BETA_2=0.98
export OPT_EPSILON=1e-6
export WEIGHT_DECAY_RATE=0.01
export WARMUP_STEPS=100
export START_WARMUP_STEP=0
export MAX_STEPS=6500

export TARGET_MLM_ACCURACY=0.235
export MAX_SAMPLES_TERMINATION=400000
export NUM_EVAL_EXAMPLES=2000
export EVAL_BATCH_SIZE=64
export EVAL_ITER_START_SAMPLES=10000
export EVAL_ITER_SAMPLES=10000
export SAVE_CHECKPOINT_STEPS=500

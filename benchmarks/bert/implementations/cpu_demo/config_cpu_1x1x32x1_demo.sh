# BERT of 1 layer x 128 from random initialization on the English that Python ships: one node, one rank, minutes.
# 1 node x 1 rank x 32 packs per optimizer step x 1 accumulation step.
# shellcheck shell=bash source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]:-$0}")/env.sh"

export DGXNNODES=1
export DGXNGPU=1
export NEXP=10
export WALLTIME=60

export RECIPE=packed_lamb
export BERT_CONFIG="${pytorch_dir}/configs/demo.json"
export BATCHSIZE=32
export GRADIENT_STEPS=1
export PACKING_FACTOR=1.05

export LR=5e-3
export MAX_STEPS=4300
export WARMUP_STEPS=100
export START_WARMUP_STEP=0
export OPT_LAMB_BETA_1=0.9
export OPT_LAMB_BETA_2=0.98
export WEIGHT_DECAY_RATE=0.01

export TARGET_MLM_ACCURACY=0.235
export MAX_SAMPLES_TERMINATION=400000
export NUM_EVAL_EXAMPLES=2000
export EVAL_BATCH_SIZE=64
export EVAL_ITER_START_SAMPLES=10000
export EVAL_ITER_SAMPLES=10000
export SAVE_CHECKPOINT_STEPS=500

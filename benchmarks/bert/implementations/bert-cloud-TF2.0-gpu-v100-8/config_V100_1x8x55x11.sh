# BERT-large on 8 V100, in TensorFlow 2 with Google's hyper-parameters of MLPerf v0.7.
# 1 node x 8 replicas x 55 sequences per optimizer step x 11 accumulation steps: global batch 440 sequences.
# shellcheck shell=bash source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]:-$0}")/env.sh"

export DGXNNODES=1
export DGXNGPU=8
export NEXP=1
export WALLTIME=330

export RECIPE=tensorflow2
export DISTRIBUTION_STRATEGY=mirrored
export BERT_CONFIG="${pytorch_dir}/configs/large.json"
export PRECISION=fp16
export ALL_REDUCE_ALG=nccl
export BATCHSIZE=55
export GRADIENT_STEPS=11
export PACKING_FACTOR=1
export MAX_SEQ_LENGTH=512
export MAX_PREDICTIONS_PER_SEQ=76

export LR=0.0004
export MAX_STEPS=8103
export WARMUP_STEPS=0
export OPTIMIZER=lamb
export OPT_LAMB_BETA_1=0.9
export OPT_LAMB_BETA_2=0.999
export WEIGHT_DECAY_RATE=0.01
export SCALE_LOSS=1
export DEVICE_WARMUP=1
export STEPS_PER_LOOP=1137

export TARGET_MLM_ACCURACY=0.720
export MAX_SAMPLES_TERMINATION=4500000
export EVAL_BATCH_SIZE=6
export EVAL_SCHEDULE=mlperf
export EVAL_ITER_START_SAMPLES=150000
export EVAL_ITER_SAMPLES=150000

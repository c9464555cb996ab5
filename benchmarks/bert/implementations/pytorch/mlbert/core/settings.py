"""The one table of settings: environment name, flag, field, type, unit and meaning.

`TrainConfig` is the table of what the program reads; `LAUNCH_SETTINGS` lists the names that only the shell launchers
read. Together they are every name that a ``config_*.sh`` or a YAML file may set. There are no defaults here: a recipe
gives them, or the user has to.
"""

# ruff: noqa: RUF009 - row() is dataclasses.field with the table's columns

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from mlbert.core.setting import METADATA_KEY, Limits, Setting, row
from mlbert.core.tensorflow2_settings import TensorFlow2Settings
from mlbert.core.text_settings import TextSettings

# No number is without a sane upper bound: a slip of the keyboard must not take a machine down, or hang.
MOST_STEPS, MOST_SAMPLES, MOST_SECONDS = 10**9, 10**15, 10**9
MOST_PACKS, MOST_IN_PACK, MOST_CPUS = 2**20, 512, 4096


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TextSettings, TensorFlow2Settings):
    """Everything that decides a training run, resolved. Made by `mlbert.core.config.resolve`."""

    recipe: str = row("RECIPE", "Method: a module of mlbert.recipes.")
    bert_config_file: Path = row("BERT_CONFIG", "Model shape, a bert_config.json.")
    input_dir: Path = row(
        "DATADIR_PHASE2", "Training set: a prepared one, TFRecords, or HDF5 shards of NVIDIA's scripts."
    )
    eval_dir: Path = row("EVALDIR", "Evaluation set, in one of the same forms.")
    data_reader: str = row(
        "DATA_READER", "dali reads a training set of TFRecords by NVIDIA DALI.", choices=("auto", "dali")
    )
    init_checkpoint: Path | None = row(
        "INIT_CHECKPOINT",
        "model.safetensors, its folder, a run or its checkpoint, or a .pt of NVIDIA's or Composer's; none: random.",
    )
    output_dir: Path = row("LOGDIR", "Run folder: MLPerf log, metrics, checkpoints, final weights.")
    train_batch_size: int = row(
        "BATCHSIZE", "Packs of one optimizer step.", "packs per rank and step", at_least=1, at_most=MOST_PACKS
    )
    gradient_accumulation_steps: int = row(
        "GRADIENT_STEPS", "Parts of a step's batch; divides BATCHSIZE.", "micro-batches", at_least=1, at_most=MOST_PACKS
    )
    average_packing_rate: float = row(
        "PACKING_FACTOR",
        "Nominal value; global_batch_size is BATCHSIZE * ranks * PACKING_FACTOR.",
        "sequences per pack",
        at_least=1,
        at_most=MOST_IN_PACK,
    )
    max_sequences_per_pack: int = row(
        "MAX_SEQUENCES_PER_PACK",
        "Most that share a pack; 1 trains unpacked.",
        "sequences",
        at_least=1,
        at_most=MOST_IN_PACK,
    )
    bin_counts: str | None = row(
        "BIN_COUNTS",
        "How many of a rank's BATCHSIZE come from each length bin, shortest first: 6 3 2 5; none: in proportion.",
        "sequences",
    )
    exchange_padding: str = row(
        "EXCHANGE_PADDING",
        "Ranks that deal out each micro-batch's packs by length, for as many tokens each: none, a node's, or all.",
        choices=("off", "group", "all"),
    )
    exchange_by: str = row(
        "EXCHANGE_BY",
        "lengths: each rank reads what it is dealt; gather: it reads its own share, and the ranks exchange theirs.",
        choices=("lengths", "gather"),
    )
    learning_rate: float = row("LR", "Base learning rate.", above=0, at_most=100)
    max_steps: int = row(
        "MAX_STEPS", "Length of the schedule; training ends there.", "steps", at_least=1, at_most=MOST_STEPS
    )
    max_samples_termination: int = row(
        "MAX_SAMPLES_TERMINATION", "Training ends after so many.", "sequences", at_least=1, at_most=MOST_SAMPLES
    )
    max_seconds: float | None = row(
        "MAX_SECONDS", "Time limit counted from run_start; none for no limit.", "seconds", above=0, at_most=MOST_SECONDS
    )
    warmup_steps: int = row("WARMUP_STEPS", "Length of the warm-up.", "steps", at_least=0, at_most=MOST_STEPS)
    warmup_proportion: float | None = row(
        "WARMUP_PROPORTION",
        "Length of the warm-up, instead of WARMUP_STEPS.",
        "share of MAX_STEPS",
        at_least=0,
        at_most=1,
    )
    start_warmup_step: int = row(
        "START_WARMUP_STEP",
        "Where the warm-up ramp begins; negative to start part of the way up.",
        "steps",
        at_least=-MOST_STEPS,
        at_most=0,
    )
    schedule: str = row(
        "SCHEDULE",
        "The learning rate after the warm-up; polynomial is the benchmark's, its decay counts from step 0.",
        choices=("polynomial", "linear", "cosine", "wsd", "multistep", "constant"),
    )
    poly_power: float = row("LR_POLY_POWER", "Exponent of the polynomial decay.", above=0, at_most=100)
    end_lr: float | None = row(
        "END_LR", "Rate at the end of the decay (all but multistep, constant); none for 0.", at_least=0, at_most=100
    )
    lr_decay_end: int | None = row(
        "LR_DECAY_END",
        "Where the decay ends (all but multistep, constant); none for MAX_STEPS.",
        "steps",
        at_least=1,
        at_most=MOST_STEPS,
    )
    lr_decay_steps: int | None = row(
        "LR_DECAY_STEPS", "Length of the decay after the plateau of wsd.", "steps", at_least=1, at_most=MOST_STEPS
    )
    lr_milestones: str | None = row(
        "LR_MILESTONES", "Where multistep multiplies the rate, with commas between.", "steps"
    )
    lr_gamma: float | None = row("LR_GAMMA", "What multistep multiplies the rate by.", above=0, at_most=1)
    lr_first_step: int = row(
        "LR_FIRST_STEP",
        "Number of the first update in the schedule; with -1 the second repeats it, as in Composer.",
        at_least=-1,
        at_most=1,
    )
    optimizer: str = row(
        "OPTIMIZER",
        "Method of the update; decoupled: the decay does not depend on the size of LR.",
        choices=(
            "lamb",
            "adamw",
            "decoupled_adamw",
            "stableadamw",
            "decoupled_stableadamw",
            "acclip",
            "madgrad",
            "sgd",
        ),
    )
    opt_lamb_beta_1: float = row(
        "OPT_LAMB_BETA_1",
        "Decay of the first moment, whichever the optimizer; the momentum of madgrad and sgd.",
        above=0,
        below=1,
    )
    opt_lamb_beta_2: float = row(
        "OPT_LAMB_BETA_2",
        "Decay of the second moment, whichever the optimizer; madgrad and sgd do not read it.",
        above=0,
        below=1,
    )
    opt_epsilon: float = row(
        "OPT_EPSILON", "Added to what an update is divided by; sgd does not read it.", above=0, at_most=1e9
    )
    weight_decay_rate: float = row(
        "WEIGHT_DECAY_RATE", "Weight decay; none on biases and LayerNorm, unless DECAY_ALL.", at_least=0, at_most=100
    )
    max_grad_norm: float | None = row(
        "MAX_GRAD_NORM", "Limit of the global gradient norm; none for no clipping.", above=0, at_most=1e9
    )
    gradient_clipping: str = row(
        "GRADIENT_CLIPPING",
        "What is clipped: the gradient's sum over the ranks, each rank's own before that, or each bucket of its own.",
        choices=("after", "before", "buckets"),
    )
    gradient_reduction: str = row(
        "GRADIENT_REDUCTION",
        "How gradients travel to be summed over the ranks; sums are added up in float32 either way.",
        choices=("fp32", "bf16"),
    )
    bucket_mib: int = row(
        "BUCKET_MIB", "Size of the buckets in which gradients travel.", "MiB", at_least=1, at_most=4096
    )
    optimizer_implementation: str = row(
        "OPTIMIZER_IMPLEMENTATION",
        "Which implementation of the optimizer runs; ops takes the one that goes with OPS.",
        choices=("ops", "auto", "plain", "native", "triton", "apex"),
    )
    sharded_optimizer: str = row(
        "SHARDED_OPTIMIZER",
        "Ranks over which the optimizer's state and update are shared out: none, those of a node, or all.",
        choices=("off", "node", "all"),
    )
    weights_allgather: str = row(
        "WEIGHTS_ALLGATHER",
        "How a sharded optimizer hands out new weights; the exact ones stay with the rank that owns them.",
        choices=("fp32", "bf16", "e5m2"),
    )
    seed: int | None = row("SEED", "Random seed; none draws one from the system.", at_least=0, at_most=2**32 - 1)
    target_mlm_accuracy: float | None = row(
        "TARGET_MLM_ACCURACY",
        "Masked-token accuracy, or a task's metric, at which the run succeeds; none: it does at its limit.",
        above=0,
        below=1,
    )
    num_eval_examples: int | None = row(
        "NUM_EVAL_EXAMPLES",
        "Size of the evaluation; none for all that there are.",
        "sequences",
        at_least=1,
        at_most=MOST_SAMPLES,
    )
    eval_batch_size: int = row(
        "EVAL_BATCH_SIZE", "Packs of one evaluation batch.", "packs per rank", at_least=1, at_most=MOST_PACKS
    )
    eval_iter_start_samples: int = row(
        "EVAL_ITER_START_SAMPLES", "First evaluation after so many.", "sequences", at_least=1, at_most=MOST_SAMPLES
    )
    eval_iter_samples: int = row(
        "EVAL_ITER_SAMPLES", "Distance between evaluations.", "sequences", at_least=1, at_most=MOST_SAMPLES
    )
    precision: str = row(
        "PRECISION",
        "Number format of the matrix products; fp8 is the encoder's, fp8-forward without those of gradients.",
        choices=("auto", "fp32", "bf16", "fp16", "fp8", "fp8-forward"),
    )
    fp8_fast_accumulation: str = row(
        "FP8_FAST_ACCUMULATION",
        "Which FP8 products let the tensor cores of Hopper add with fewer bits; all adds those of gradients.",
        choices=("forward", "all"),
    )
    loss_scale: float = row(
        "LOSS_SCALE", "What fp16 multiplies the loss by at first; halved at an overflow.", above=0, at_most=2**24
    )
    loss_scale_window: int = row(
        "LOSS_SCALE_WINDOW",
        "Steps without an overflow after which it doubles.",
        "steps",
        at_least=1,
        at_most=MOST_STEPS,
    )
    join_timeout: float | None = row(
        "JOIN_TIMEOUT",
        "Longest that a rank waits for the others at start-up; none: 120 * (1 + (ranks / 1024)^2).",
        "seconds",
        at_least=1,
        at_most=86400,
    )
    cpu_threads: int | None = row(
        "CPU_THREADS", "none takes every core that the rank may use.", "threads per rank", at_least=1, at_most=MOST_CPUS
    )
    ops: str = row(
        "OPS",
        "Which implementation of the ops runs.",
        choices=("auto", "plain", "native", "triton", "cublaslt", "flash", "fmha"),
    )
    cuda_graph_mode: str = row(
        "CUDA_GRAPH_MODE",
        "What is replayed as a CUDA graph: forward and backward of a micro-batch, or the whole step.",
        choices=("none", "segmented", "full_iteration"),
    )
    save_checkpoint_steps: int = row(
        "SAVE_CHECKPOINT_STEPS", "Distance between checkpoints; 0 saves none.", "steps", at_least=0, at_most=MOST_STEPS
    )
    keep_checkpoints: int = row(
        "KEEP_CHECKPOINTS", "Newest ones that are kept.", "checkpoints", at_least=0, at_most=MOST_STEPS
    )
    resume: bool = row("RESUME", "Continue from the newest good checkpoint in LOGDIR.")
    max_skipped_steps: int = row(
        "MAX_SKIPPED_STEPS", "Non-finite losses tolerated before the run ends.", "steps", at_least=0, at_most=MOST_STEPS
    )
    synthetic_data: bool = row("SYNTH_DATA", "Train on generated tokens; needs no files.")
    log_freq: int = row(
        "LOG_FREQ", "Distance between metric lines; 0 writes none.", "steps", at_least=0, at_most=MOST_STEPS
    )
    experiment: int = row("EXPERIMENT", "Index i of result_<i>.txt.", at_least=0, at_most=9999)
    caches_cleared: bool = row("CACHES_CLEARED", "Set by the launcher when it dropped the page caches before this run.")
    submission_org: str = row("MLPERF_SUBMISSION_ORG", "Submitter named in the MLPerf log.")
    submission_platform: str = row("MLPERF_SUBMISSION_PLATFORM", "Platform named in the MLPerf log.")
    submission_division: str = row("MLPERF_DIVISION", "Division named in the MLPerf log.", choices=("open", "closed"))

    @property
    def num_warmup_steps(self) -> int:
        """Length of the warm-up in steps, from whichever of the two settings gives it."""
        if self.warmup_proportion:
            return int(self.max_steps * self.warmup_proportion)
        return self.warmup_steps

    @property
    def counts_of_bins(self) -> tuple[int, ...] | None:
        """BIN_COUNTS as numbers. Raises ValueError: they are not whole numbers above 0 with blanks or commas between,
        which `core.config.validate` has seen to."""
        if self.bin_counts is None:
            return None
        words = self.bin_counts.replace(",", " ").split()
        counts = tuple(int(word) for word in words if word.isdecimal())
        if not words or len(counts) < len(words) or 0 in counts:
            raise ValueError(self.bin_counts)
        return counts


def _launch(env: str, kind: type, meaning: str, unit: str = "", **limits: Any) -> Setting:
    return Setting(env, "", "", kind, False, unit, meaning, Limits(**limits))


LAUNCH_SETTINGS: tuple[Setting, ...] = (
    _launch("DGXSYSTEM", str, "Name of the system: the config's file name without config_ and .sh."),
    _launch("DGXNNODES", int, "Nodes of the job.", "nodes", at_least=1, at_most=100_000),
    _launch(
        "DGXNGPU",
        int,
        "Ranks on each node, one an accelerator (one in all on a CPU).",
        "ranks",
        at_least=1,
        at_most=1024,
    ),
    _launch("WALLTIME", str, "Time limit of the job, as sbatch -t takes it.", "minutes"),
    _launch("NEXP", int, "Runs of one job.", "runs", at_least=1, at_most=1000),
    _launch("CONFIG_FILE", Path, "The config_*.sh that was sourced, named in errors."),
    _launch("CONT", str, "Container image (a .sqsh or what enroot and docker take); not set: no container."),
    _launch("CONT_MOUNTS", str, "Further mounts, SRC:DST[:ro] with commas; tree, data and LOGDIR are mounted anyway."),
    _launch("SRUN_ARGS", str, "Words for every srun of the job, such as --gres=gpu:8."),
    _launch("SLURM_MPI_TYPE", str, "srun's --mpi; not set: pmi2 where Slurm has it."),
    _launch(
        "SLURM_CPUS",
        int,
        "CPUs of a node that its ranks share; not set: all of the job's.",
        at_least=1,
        at_most=MOST_CPUS,
    ),
    _launch("DGXHT", int, "Hardware threads of a core that a rank is bound to.", at_least=1, at_most=8),
    _launch("BIND_CPUS", bool, "Bind each rank to the cores and memory beside its GPU."),
    _launch("CLEAR_CACHES", bool, "Drop the page cache before each run."),
    _launch("NCCL_TEST", bool, "Measure the network before the first run and name the slowest node."),
    _launch(
        "NCCL_NVLS_ENABLE", int, "For NCCL: sums in NVLink switches; not set: where it can.", at_least=0, at_most=2
    ),
    _launch("NCCL_GRAPH_REGISTER", int, "For NCCL: registers the buffers of captured sums.", at_least=0, at_most=1),
    _launch("NCCL_LOCAL_REGISTER", int, "For NCCL: lets PyTorch register buffers.", at_least=0, at_most=1),
    _launch("CHECK_COMPLIANCE", bool, "Check each run's log inside the job."),
    _launch("COLLECT_RESULTS", bool, "Copy the logs to results/<platform>/bert of the tree."),
    _launch("TIMED", bool, "Runs count as results: an interrupted one is recorded as aborted, never continued."),
    _launch(
        "MAX_RESTARTS",
        int,
        "Times that a job starts a run again after losing a rank; never a timed one.",
        at_least=0,
        at_most=1000,
    ),
    _launch("HOSTS", str, "Hosts of run_multinode.sh, with commas; the first one runs rank 0."),
    _launch("PYTHON", Path, "Python that runs everything; not set: that of the tree's virtual environment or of PATH."),
    _launch("MASTER_ADDR", str, "Host of rank 0."),
    _launch("MASTER_PORT", int, "Port of rank 0.", at_least=1, at_most=65535),
)


@cache
def train_settings() -> Mapping[str, Setting]:
    """The rows of `TrainConfig`, field name to `Setting`, in table order."""
    hints = typing.get_type_hints(TrainConfig)
    rows = {}
    for item in fields(TrainConfig):
        env, meaning, unit, limits = item.metadata[METADATA_KEY]
        kind, optional = _split_optional(hints[item.name])
        rows[item.name] = Setting(env, item.name, f"--{item.name}", kind, optional, unit, meaning, limits)
    return types.MappingProxyType(rows)


@cache
def settings_by_env() -> Mapping[str, Setting]:
    """Every legal export, environment name to `Setting`."""
    rows = [*train_settings().values(), *LAUNCH_SETTINGS]
    return types.MappingProxyType({row.env: row for row in rows})


def _split_optional(hint: Any) -> tuple[type, bool]:
    arguments = typing.get_args(hint)
    if not arguments:
        return hint, False
    kinds = [argument for argument in arguments if argument is not types.NoneType]
    assert len(kinds) == 1, f"a setting has one type or none: {hint}"
    return kinds[0], True

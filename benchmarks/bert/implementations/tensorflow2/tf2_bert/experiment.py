"""Run one experiment from settings and a strategy; write the MLPerf log and the run folder.

LOGDIR/result_<i>.txt              MLPerf log
LOGDIR/training_summary.txt        steps, last loss and last metrics, as in the published program
LOGDIR/run_<i>/config.json         resolved configuration, origin of each value, provenance
LOGDIR/run_<i>/metrics.jsonl       one line per log point and per evaluation
LOGDIR/run_<i>/curve.png           loss and accuracy over samples and time
LOGDIR/run_<i>/weights/            safetensors and bert_config.json
LOGDIR/run_<i>/tf2/                the same weights as a TensorFlow 2 checkpoint
LOGDIR/run_<i>/summary.json        numbers that ``mlbert report`` prints
LOGDIR/run_<i>/checkpoints/        if SAVE_CHECKPOINT_STEPS is not 0
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple

import tensorflow as tf
from rich.console import Console

from mlbert.config.configuration import Configuration
from mlbert.config.resolution import Resolved
from mlbert.config.tensorflow import TensorFlowConfig
from mlbert.data.loading.config import DataConfig
from mlbert.distributed.config import DistributedConfig
from mlbert.host.errors import UserError
from mlbert.host.machine import NONE
from mlbert.host.provenance import tree_root
from mlbert.mlperf import rules
from mlbert.mlperf.config import SubmissionConfig
from mlbert.mlperf.keys import ELAPSED
from mlbert.mlperf.mllog import MLPerfLogger
from mlbert.models.config import ModelConfig
from mlbert.ops.config import ComputeConfig
from mlbert.optim import schedules
from mlbert.optim.config import OptimizerConfig, ScheduleConfig
from mlbert.runs.config import RunConfig
from mlbert.runs.events import EventFanout, MLPerfEvents
from mlbert.runs.identity import (
    RunIdentity,
    RuntimeFacts,
    identify,
    log_batch_size,
    log_ends,
    log_identity,
    log_submission,
)
from mlbert.runs.monitor import Monitor
from mlbert.runs.progress import Limits, RunOutcome, TrainState
from mlbert.runs.run_folder import RunFolder, choose_seed, summarize, write_curve
from mlbert.training.config import EvaluationConfig
from tf2_bert import checkpoints, optimizers
from tf2_bert.data import Data, Inputs
from tf2_bert.endings import guard
from tf2_bert.loop import Callback, Run, train
from tf2_bert.loss_scale import LossScale
from tf2_bert.model import BertPretrainer
from tf2_bert.step import TrainStep
from tf2_bert.summaries import Summaries
from tf2_bert.workers import Workers

COMPUTE_DTYPES = {"fp32": tf.float32, "bf16": tf.bfloat16, "fp16": tf.float16}


class Trained(NamedTuple):
    """A training step and the objects that it updates."""

    model: BertPretrainer
    optimizer: optimizers.Optimizer
    loss_scale: LossScale | None
    step: TrainStep


def run_experiment(
    resolved: Resolved,
    strategy: tf.distribute.Strategy,
    console: Console,
    callbacks: Sequence[Callback] = (),
    notes: Sequence[str] = (),
) -> RunOutcome:
    """Print a summary of the settings and the notes, train once, and write the files listed in the
    module docstring. Raises UserError for user mistakes.
    """
    config = resolved.config
    settings = config[RunConfig]
    data_settings = config[DataConfig]
    evaluation = config[EvaluationConfig]
    tensorflow = config[TensorFlowConfig]
    paths = RunFolder.of(settings)
    workers = Workers(strategy)
    inputs = resolved.recipe.inspect(config)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    seed = _start(resolved, workers, paths, say, notes)
    log = MLPerfLogger(paths.log if workers.is_chief else None, rank=workers.task, root=tree_root())
    with guard(log, workers, paths.log) as warned:
        log.event("cache_clear", settings.caches_cleared)
        log.start("init_start")
        log_submission(log.event, config[SubmissionConfig])
        log.event("seed", seed)
        trained = make_trained(config, inputs, strategy, seed, say)
        schedule = schedules.make(config[ScheduleConfig])
        facts = runtime_facts(
            data_settings, config[ComputeConfig], tensorflow, inputs, strategy, workers
        )
        if workers.is_chief:
            identity = log_run(log, resolved, facts, trained.optimizer, schedule)
            paths.write_record(resolved, seed, identity)
        data = Data(data_settings, evaluation, tensorflow, inputs, strategy, seed)
        state = TrainState(next_eval_samples=evaluation.eval_iter_start_samples)
        folder = checkpoint_folder(paths, trained, config, inputs, workers)
        _prepare(config, trained, folder, state, data, log, say)
        limits = _limits(config)
        limits.check_resumed(state)
        monitor = _monitor(paths, workers, limits, settings, console)
        boards = (
            [Summaries(settings.tensorboard_dir)]
            if settings.tensorboard_dir and workers.is_chief
            else []
        )
        monitor.open(state)
        log.end("init_stop")
        run = Run(
            step=trained.step,
            shape=inputs.shape,
            data=data,
            workers=workers,
            schedule=schedule,
            checkpoints=folder,
            events=EventFanout(
                [MLPerfEvents(log, lambda: data.num_eval_samples), monitor, *boards]
            ),
            log=log,
            limits=limits,
            warned=warned,
            state=state,
            global_batch_size=sequences_of_step(data_settings, workers.replicas),
            steps_per_loop=tensorflow.steps_per_loop,
            eval_every_samples=evaluation.eval_iter_samples if tensorflow.do_eval else None,
            save_every_steps=settings.save_checkpoint_steps,
            callbacks=callbacks,
        )
        with closing(data), closing(monitor):
            outcome = train(run)
    if workers.is_chief:
        summary = summarize(
            outcome,
            packs_per_rank=outcome.state.updates * data_settings.train_batch_size,
            target_accuracy=evaluation.target_metric,
            seed=seed,
            ranks=workers.replicas,
        )
        write_outputs(paths, trained.model, outcome, summary, evaluated=tensorflow.do_eval)
    workers.sum([0])  # wait: the first worker to exit would stop the others
    return outcome


def _start(
    resolved: Resolved,
    workers: Workers,
    paths: RunFolder,
    say: Callable[[str], None],
    notes: Sequence[str],
) -> int:
    """Create the run's folder, print a summary of the settings and the notes,
    and return the seed.
    """
    settings = resolved.config[RunConfig]
    if workers.is_chief:
        paths.prepare(settings.resume)
        paths.write_settings(resolved)
        if settings.resume:
            paths.set_log_aside()
    for line in paths.settings_summary(resolved, notes):
        say(line)
    return workers.of_chief(choose_seed(settings, paths))


def _limits(config: Configuration) -> Limits:
    return Limits.of(
        config[RunConfig],
        target_accuracy=config[EvaluationConfig].target_metric,
        max_steps=config[ScheduleConfig].max_steps,
    )


def _monitor(
    paths: RunFolder, workers: Workers, limits: Limits, settings: RunConfig, console: Console
) -> Monitor:
    metrics = paths.folder / "metrics.jsonl" if workers.is_chief else None
    return Monitor(metrics, limits, settings.log_freq, console, append=settings.resume)


def _prepare(
    config: Configuration,
    trained: Trained,
    folder: checkpoints.CheckpointFolder,
    state: TrainState,
    data: Data,
    log: MLPerfLogger,
    say: Callable[[str], None],
) -> None:
    """Load the newest checkpoint of a resumed run, and compile the step if DEVICE_WARMUP is set."""
    if config[RunConfig].resume and folder.restore_newest(state, say):
        elapsed = {ELAPSED: round(state.elapsed_seconds, 3)}
        log.event("resumed_from_step", state.step, elapsed)
        note = f"; {data.resume_note}" if data.resume_note else ""
        say(f"resumed at step {state.step}, {state.samples} samples{note}")
    if config[TensorFlowConfig].device_warmup:
        trained.step.warm_up(data.warm_up_rows())


def make_trained(
    config: Configuration,
    inputs: Inputs,
    strategy: tf.distribute.Strategy,
    seed: int,
    say: Callable[[str], None],
) -> Trained:
    """Create the model with its initial weights, the optimizer, the loss scale and the step;
    pass notes to ``say``.

    Raises UserError: an unsupported clipping, precision or optimizer, or weights that do not fit.
    """
    compute = config[ComputeConfig]
    tensorflow = config[TensorFlowConfig]
    clipping = config[DistributedConfig].gradient_clipping
    if clipping == "buckets":
        reason = "buckets is not supported in TensorFlow 2"
        raise UserError("config.conflict", "GRADIENT_CLIPPING", reason, "Use before or after")
    if compute.precision not in COMPUTE_DTYPES:
        reason = f"{compute.precision} is not supported in TensorFlow 2"
        raise UserError("config.choice", "PRECISION", reason, "Use a supported one", COMPUTE_DTYPES)
    for note in inputs.notes:
        say(note)
    with strategy.scope():
        model = BertPretrainer(inputs.shape, COMPUTE_DTYPES[compute.precision], seed)
        parameters = model.parameters()
        compiled = tensorflow.enable_xla
        optimizer = optimizers.make_optimizer(
            config[OptimizerConfig], parameters, compiled=compiled
        )
        loss_scale = LossScale.of(compute, tensorflow)
    start = config[ModelConfig].init_checkpoint
    if start is not None:
        values, notes = checkpoints.initial_values(start, model)
        for note in notes:
            say(note)
        model.assign(values)
    step = TrainStep(
        strategy,
        model,
        optimizer,
        loss_scale,
        tensorflow,
        accumulation=config[DataConfig].gradient_accumulation_steps,
        gradient_clipping=clipping,
        seed=seed,
    )
    return Trained(model, optimizer, loss_scale, step)


def checkpoint_folder(
    paths: RunFolder, trained: Trained, config: Configuration, inputs: Inputs, workers: Workers
) -> checkpoints.CheckpointFolder:
    """Return the run's checkpoint folder; a resumed run must match the identity that it stores."""
    objects = {
        "model": trained.model,
        "optimizer": trained.optimizer,
        "loss_scale": trained.loss_scale,
    }
    identity = {
        "model": inputs.shape.to_json(),
        "optimizer": config[OptimizerConfig].optimizer,
        "train_batch_size": config[DataConfig].train_batch_size,
        "replicas": workers.replicas,
        "train_data": inputs.train_data,
        "eval_data": inputs.eval_data,
        **config.fixed_on_resume(),
    }
    return checkpoints.CheckpointFolder(
        paths.folder / "checkpoints",
        {name: item for name, item in objects.items() if item is not None},
        keep=config[RunConfig].keep_checkpoints,
        identity=identity,
        is_chief=workers.is_chief,
    )


def sequences_of_step(data: DataConfig, replicas: int) -> int:
    """Return the nominal sequences of an optimizer step over all replicas."""
    return rules.global_batch_size(data.train_batch_size, replicas, data.average_packing_rate)


def runtime_facts(
    data: DataConfig,
    compute: ComputeConfig,
    tensorflow: TensorFlowConfig,
    inputs: Inputs,
    strategy: tf.distribute.Strategy,
    workers: Workers,
) -> RuntimeFacts:
    """Return the run's facts about data and TensorFlow."""
    visible = tf.config.get_visible_devices("GPU")  # selected by `strategies.prepare_devices`
    gpus = [tf.config.experimental.get_device_details(gpu) for gpu in visible]
    built = tf.sysconfig.get_build_info() if gpus else {}
    return RuntimeFacts(
        train_data=inputs.train_data,
        eval_data=inputs.eval_data,
        max_sequence_length=inputs.max_sequence_length,
        sequences_per_pack=inputs.sequences_per_pack(data.max_sequences_per_pack),
        precision=compute.precision,
        ops=(
            f"TensorFlow {tf.__version__}{' with XLA' if tensorflow.enable_xla else ''}, "
            f"{type(strategy).__name__}"
        ),
        ranks=strategy.num_replicas_in_sync,
        threads_per_rank=tf.config.threading.get_intra_op_parallelism_threads()
        or len(os.sched_getaffinity(0)),
        hosts=workers.hosts,
        gpus=dict(Counter(str(gpu.get("device_name", "unknown")) for gpu in gpus)),
        cuda=str(built.get("cuda_version", NONE)),
        cudnn=str(built.get("cudnn_version", NONE)),
        nccl="unknown"
        if gpus
        else NONE,  # linked into TensorFlow, which does not report its version
    )


def log_run(
    log: MLPerfLogger,
    resolved: Resolved,
    facts: RuntimeFacts,
    optimizer: optimizers.Optimizer,
    schedule: schedules.Schedule,
) -> RunIdentity:
    """Log the run's provenance, full configuration and all hyperparameters."""
    config = resolved.config
    data = resolved.config[DataConfig]
    model = config[ModelConfig]
    identity = identify(
        resolved, facts, shape=model.bert_config_file, init_checkpoint=model.init_checkpoint
    )
    log_identity(log.event, identity, resolved)
    log_batch_size(
        log.event, sequences_of_step(data, facts.ranks), data.gradient_accumulation_steps
    )
    evaluation = config[EvaluationConfig]
    log_ends(
        log.event,
        _limits(config),
        first_evaluation_samples=evaluation.eval_iter_start_samples,
        evaluation_interval_samples=evaluation.eval_iter_samples,
        evaluation_size=evaluation.num_eval_examples,
    )
    log.event("opt_implementation", "tensorflow")
    optimizer.hyperparameters(log.event)
    schedule.hyperparameters(log.event)
    return identity


def write_outputs(
    paths: RunFolder,
    model: BertPretrainer,
    outcome: RunOutcome,
    summary: Mapping[str, object],
    *,
    evaluated: bool,
) -> None:
    """Write weights, curve and finally ``summary``, which marks the run folder as complete."""
    state = outcome.state
    checkpoints.write_weights(paths.folder, model, summary)
    write_curve(paths.folder, summary)
    lines = (paths.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [point["loss"] for point in map(json.loads, lines) if point["kind"] == "step"]
    facts = {
        "total_training_steps": state.step,
        "train_loss": losses[-1] if losses else None,
        "last_train_metrics": state.accuracy if evaluated else None,
    }
    (paths.log.parent / "training_summary.txt").write_text(
        json.dumps(facts) + "\n", encoding="utf-8"
    )
    (paths.folder / "summary.json").write_text(
        json.dumps(summary, indent=2) + "\n", encoding="utf-8"
    )

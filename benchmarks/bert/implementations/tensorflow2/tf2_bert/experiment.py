"""One experiment: from settings and a strategy to the MLPerf log and the run folder.

LOGDIR/result_<i>.txt              MLPerf log
LOGDIR/training_summary.txt        steps, last loss and last metrics, as the published program leaves them
LOGDIR/run_<i>/config.json         resolved configuration, origin of each value, provenance
LOGDIR/run_<i>/metrics.jsonl       one line a log point and an evaluation
LOGDIR/run_<i>/curve.png           loss and accuracy over samples and time
LOGDIR/run_<i>/weights/            safetensors and bert_config.json
LOGDIR/run_<i>/tf2/                the same weights as a TensorFlow 2 checkpoint
LOGDIR/run_<i>/summary.json        the numbers that ``mlbert report`` prints
LOGDIR/run_<i>/checkpoints/        while SAVE_CHECKPOINT_STEPS is not 0
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple

import tensorflow as tf
from rich.console import Console

from mlbert.core import rules, schedules
from mlbert.core.config import Resolved
from mlbert.core.continuing import fixed_settings
from mlbert.core.errors import UserError
from mlbert.core.events import Events, MLPerfEvents, Several
from mlbert.core.identity import (
    Identity,
    Told,
    identify,
    log_batch_size,
    log_ends,
    log_identity,
    log_submission,
)
from mlbert.core.machine import NONE
from mlbert.core.mllog import MLPerfLogger
from mlbert.core.monitor import Monitor
from mlbert.core.progress import Limits, Outcome, TrainState
from mlbert.core.provenance import tree_root
from mlbert.core.run_folder import RunFolder, choose_seed, summarize, write_curve
from mlbert.core.settings import TrainConfig
from tf2_bert import checkpoints, optimizers
from tf2_bert.data import Data, Inputs, inspect
from tf2_bert.endings import guard
from tf2_bert.loop import Callback, Run, train
from tf2_bert.loss_scale import LossScale
from tf2_bert.model import BertPretrainer
from tf2_bert.step import TrainStep
from tf2_bert.summaries import Summaries
from tf2_bert.workers import Workers

COMPUTE_DTYPES = {"fp32": tf.float32, "bf16": tf.bfloat16, "fp16": tf.float16}


class Trained(NamedTuple):
    """What a step changes, and the step."""

    model: BertPretrainer
    optimizer: optimizers.Optimizer
    loss_scale: LossScale | None
    step: TrainStep


def run_experiment(
    resolved: Resolved, strategy: tf.distribute.Strategy, console: Console, callbacks: Sequence[Callback] = ()
) -> Outcome:
    """Trains once and writes everything that the module docstring lists. Raises UserError for people's mistakes."""
    config, paths, workers = resolved.config, RunFolder.of(resolved.config), Workers(strategy)
    inputs = inspect(config)
    if workers.is_chief:
        paths.prepare(config.resume)
        if config.resume:
            paths.set_log_aside()
    seed = workers.of_chief(choose_seed(config, paths))
    log = MLPerfLogger(paths.log if workers.is_chief else None, rank=workers.task, root=tree_root())
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    with guard(log) as warned:
        log.event("cache_clear", config.caches_cleared)
        log.start("init_start")
        log_submission(log.event, config)
        log.event("seed", seed)
        trained, schedule = make_trained(config, inputs, strategy, seed, say), schedules.make(config)
        told = tell(config, inputs, strategy, workers)
        if workers.is_chief:
            identity = log_run(log, resolved, told, trained.optimizer, schedule)
            paths.write_record(resolved, seed, identity)
        data = Data(config, inputs, strategy, seed)
        state = TrainState(next_eval_samples=config.eval_iter_start_samples)
        folder = checkpoint_folder(paths, trained, config, inputs, workers)
        if config.resume and folder.restore_newest(state, say):
            log.event("resumed_from_step", state.step)
            note = f"; {data.resume_note}" if data.resume_note else ""
            say(f"resumed at step {state.step}, {state.samples} samples{note}")
        if config.device_warmup:
            trained.step.warm_up(data.warm_up_rows())
        metrics = paths.folder / "metrics.jsonl" if workers.is_chief else None
        monitor = Monitor(metrics, Limits.of(config), config.log_freq, console, append=config.resume)
        listeners: list[Events] = [MLPerfEvents(log, lambda: data.num_eval_samples), monitor]
        if config.tensorboard_dir is not None and workers.is_chief:
            listeners.append(Summaries(config.tensorboard_dir))
        monitor.open(state)
        log.end("init_stop")
        run = Run(
            config=config,
            step=trained.step,
            data=data,
            workers=workers,
            schedule=schedule,
            checkpoints=folder,
            events=Several(listeners),
            log=log,
            limits=Limits.of(config),
            warned=warned,
            state=state,
            global_batch_size=sequences_of_step(config, strategy),
            callbacks=callbacks,
        )
        with closing(data), closing(monitor):
            outcome = train(run)
    if workers.is_chief:
        leave_behind(paths, trained.model, outcome, config, seed, strategy)
    workers.sum([0])  # whoever leaves first would end the others
    return outcome


def make_trained(
    config: TrainConfig, inputs: Inputs, strategy: tf.distribute.Strategy, seed: int, say: Callable[[str], None]
) -> Trained:
    """Model, with the weights that the run starts from, optimizer, loss scale and step; ``say`` gets what is worth
    telling. Raises UserError: a precision or an optimizer that is not here, or weights that do not fit."""
    if config.gradient_clipping == "buckets":
        raise UserError("GRADIENT_CLIPPING", "buckets is not there in TensorFlow 2", "Use before or after")
    if config.precision not in COMPUTE_DTYPES:
        known = ", ".join(COMPUTE_DTYPES)
        raise UserError("PRECISION", f"{config.precision} is nothing that TensorFlow 2 has here", f"Use {known}")
    for note in inputs.notes:
        say(note)
    with strategy.scope():
        model = BertPretrainer(inputs.shape, COMPUTE_DTYPES[config.precision], seed)
        optimizer = optimizers.make_optimizer(config, model.parameters())
        loss_scale = LossScale.of(config)
    if config.init_checkpoint is not None:
        values, notes = checkpoints.initial_values(config.init_checkpoint, model)
        for note in notes:
            say(note)
        model.assign(values)
    return Trained(model, optimizer, loss_scale, TrainStep(strategy, model, optimizer, loss_scale, config, seed))


def checkpoint_folder(
    paths: RunFolder, trained: Trained, config: TrainConfig, inputs: Inputs, workers: Workers
) -> checkpoints.CheckpointFolder:
    """Where the run is saved, and what a checkpoint must agree on to be continued here."""
    objects = {"model": trained.model, "optimizer": trained.optimizer, "loss_scale": trained.loss_scale}
    identity = {
        "model": inputs.shape.to_json(),
        "optimizer": config.optimizer,
        "train_batch_size": config.train_batch_size,
        "replicas": workers.replicas,
        "train_data": inputs.train_data,
        "eval_data": inputs.eval_data,
        **fixed_settings(config),
    }
    return checkpoints.CheckpointFolder(
        paths.folder / "checkpoints",
        {name: item for name, item in objects.items() if item is not None},
        keep=config.keep_checkpoints,
        identity=identity,
        is_chief=workers.is_chief,
    )


def sequences_of_step(config: TrainConfig, strategy: tf.distribute.Strategy) -> int:
    """Nominal sequences of an optimizer step over all replicas."""
    replicas = strategy.num_replicas_in_sync
    return rules.global_batch_size(config.train_batch_size, replicas, config.average_packing_rate)


def tell(config: TrainConfig, inputs: Inputs, strategy: tf.distribute.Strategy, workers: Workers) -> Told:
    """What data and TensorFlow tell of a run; all workers call it together."""
    visible = tf.config.get_visible_devices("GPU")  # those that `strategies.prepare_devices` took
    gpus = [tf.config.experimental.get_device_details(gpu) for gpu in visible]
    built = tf.sysconfig.get_build_info() if gpus else {}
    return Told(
        train_data=inputs.train_data,
        eval_data=inputs.eval_data,
        max_sequence_length=inputs.max_sequence_length,
        sequences_per_pack=inputs.sequences_per_pack(config.max_sequences_per_pack),
        precision=config.precision,
        ops=f"TensorFlow {tf.__version__}{' with XLA' if config.enable_xla else ''}, {type(strategy).__name__}",
        ranks=strategy.num_replicas_in_sync,
        threads_per_rank=tf.config.threading.get_intra_op_parallelism_threads() or len(os.sched_getaffinity(0)),
        hosts=workers.hosts,
        gpus=dict(Counter(str(gpu.get("device_name", "unknown")) for gpu in gpus)),
        cuda=str(built.get("cuda_version", NONE)),
        cudnn=str(built.get("cudnn_version", NONE)),
        nccl="unknown" if gpus else NONE,  # it is linked in, and tells nobody
    )


def log_run(
    log: MLPerfLogger,
    resolved: Resolved,
    told: Told,
    optimizer: optimizers.Optimizer,
    schedule: schedules.Schedule,
) -> Identity:
    """Logs where the run comes from, its whole configuration, and every hyper-parameter."""
    config = resolved.config
    identity = identify(resolved, told)
    log_identity(log.event, identity, resolved)
    sequences = rules.global_batch_size(config.train_batch_size, told.ranks, config.average_packing_rate)
    log_batch_size(log.event, config, sequences)
    log_ends(log.event, config)
    log.event("opt_implementation", "tensorflow")
    optimizer.hyperparameters(log.event)
    schedule.hyperparameters(log.event)
    return identity


def leave_behind(
    paths: RunFolder,
    model: BertPretrainer,
    outcome: Outcome,
    config: TrainConfig,
    seed: int,
    strategy: tf.distribute.Strategy,
) -> None:
    """Writes weights, curve and, last of all, the summary: a run folder with one is finished."""
    state = outcome.state
    summary = summarize(outcome, config, seed, strategy.num_replicas_in_sync)
    checkpoints.write_weights(paths.folder, model, summary)
    write_curve(paths.folder, summary)
    lines = (paths.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [point["loss"] for point in map(json.loads, lines) if point["kind"] == "step"]
    told = {
        "total_training_steps": state.step,
        "train_loss": losses[-1] if losses else None,
        "last_train_metrics": state.accuracy if config.do_eval else None,
    }
    (config.output_dir / "training_summary.txt").write_text(json.dumps(told) + "\n", encoding="utf-8")
    (paths.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")

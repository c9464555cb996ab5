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
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import tensorflow as tf
from rich.console import Console

from mlbert.core import rules, schedules
from mlbert.core.config import Resolved
from mlbert.core.errors import UserError
from mlbert.core.events import Events, MLPerfEvents, Several
from mlbert.core.identity import Identity, identify, log_batch_size, log_identity, log_submission
from mlbert.core.mllog import MLPerfLogger
from mlbert.core.monitor import Monitor
from mlbert.core.progress import Limits, Outcome, TrainState
from mlbert.core.provenance import tree_root
from mlbert.core.run_folder import RunFolder, choose_seed, write_curve
from mlbert.core.settings import TrainConfig
from tf2_bert import checkpoints, optimizers
from tf2_bert.data import Data, Inputs, inspect
from tf2_bert.endings import guard
from tf2_bert.loop import Callback, Run, train
from tf2_bert.loss_scale import LossScale
from tf2_bert.model import BertPretrainer
from tf2_bert.step import TrainStep
from tf2_bert.summaries import Summaries

COMPUTE_DTYPES = {"fp32": tf.float32, "bf16": tf.bfloat16, "fp16": tf.float16}


@dataclass(frozen=True)
class Worker:
    """This process's place among those of a multi-worker strategy."""

    task: int
    count: int

    @classmethod
    def of(cls, strategy: tf.distribute.Strategy) -> Worker:
        """As the strategy's cluster resolver says; alone without one."""
        resolver = strategy.cluster_resolver
        cluster = resolver.cluster_spec() if resolver is not None and resolver.task_type == "worker" else None
        return cls(resolver.task_id, cluster.num_tasks("worker")) if cluster else cls(0, 1)

    @property
    def is_chief(self) -> bool:
        """Whether it writes the log."""
        return self.task == 0


def run_experiment(
    resolved: Resolved, strategy: tf.distribute.Strategy, console: Console, callbacks: Sequence[Callback] = ()
) -> Outcome:
    """Trains once and writes everything that the module docstring lists. Raises UserError for people's mistakes."""
    config, paths, worker = resolved.config, RunFolder.of(resolved.config), Worker.of(strategy)
    if config.precision not in COMPUTE_DTYPES:
        known = ", ".join(COMPUTE_DTYPES)
        raise UserError("PRECISION", f"{config.precision} is nothing that TensorFlow 2 has here", f"Use {known}")
    inputs = inspect(config)
    if worker.is_chief:
        paths.prepare(config.resume)
        if config.resume:
            paths.set_log_aside()
    seed = same_everywhere(strategy, choose_seed(config, paths), worker)
    log = MLPerfLogger(paths.log if worker.is_chief else None, rank=worker.task, root=tree_root())

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with guard(log) as warned:
        log.event("cache_clear", config.caches_cleared)
        log.start("init_start")
        log_submission(log.event, config)
        log.event("seed", seed)
        schedule = schedules.make(config)
        with strategy.scope():
            model = BertPretrainer(inputs.shape, COMPUTE_DTYPES[config.precision], seed)
            optimizer = optimizers.make_optimizer(config, model.parameters())
            loss_scale = LossScale.of(config)
        if config.init_checkpoint is not None:
            values, notes = checkpoints.initial_values(config.init_checkpoint, model)
            for note in notes:
                say(note)
            model.assign(values)
        step = TrainStep(strategy, model, optimizer, loss_scale, config, seed)
        identity = log_run(log, resolved, inputs, strategy, optimizer, schedule)
        record = {**json.loads(resolved.as_json()), "seed": seed, "provenance": asdict(identity)}
        if worker.is_chief:
            (paths.folder / "config.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        data = Data(config, inputs, strategy, seed)
        for note in inputs.notes:
            say(note)
        state = TrainState(next_eval_samples=config.eval_iter_start_samples)
        folder = checkpoints.CheckpointFolder(
            paths.folder / "checkpoints",
            {"model": model, "optimizer": optimizer, **({"loss_scale": loss_scale} if loss_scale else {})},
            keep=config.keep_checkpoints,
            identity=agreed(config, inputs, strategy),
            is_chief=worker.is_chief,
        )
        if config.resume and folder.restore_newest(state, say):
            log.event("resumed_from_step", state.step)
            note = f"; {data.resume_note}" if data.resume_note else ""
            say(f"resumed at step {state.step}, {state.samples} samples{note}")
        if config.device_warmup:
            step.warm_up(data.warm_up_rows())
        monitor = Monitor(
            paths.folder / "metrics.jsonl" if worker.is_chief else None,
            Limits.of(config),
            config.log_freq,
            console,
            append=config.resume,
        )
        listeners: list[Events] = [MLPerfEvents(log, lambda: data.num_eval_samples), monitor]
        if config.tensorboard_dir is not None and worker.is_chief:
            listeners.append(Summaries(config.tensorboard_dir))
        monitor.open(state)
        log.end("init_stop")
        try:
            outcome = train(
                Run(
                    config=config,
                    step=step,
                    data=data,
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
            )
        finally:
            data.close()
            monitor.close()
    if worker.is_chief:
        leave_behind(paths, model, outcome, config, seed, strategy)
    return outcome


def sequences_of_step(config: TrainConfig, strategy: tf.distribute.Strategy) -> int:
    """Nominal sequences of an optimizer step over all replicas."""
    replicas = strategy.num_replicas_in_sync
    return rules.global_batch_size(config.train_batch_size, replicas, config.average_packing_rate)


def log_run(
    log: MLPerfLogger,
    resolved: Resolved,
    inputs: Inputs,
    strategy: tf.distribute.Strategy,
    optimizer: optimizers.Optimizer,
    schedule: schedules.Schedule,
) -> Identity:
    """Logs where the run comes from, its whole configuration, and every hyper-parameter."""
    config = resolved.config
    identity = identify(
        resolved,
        train_data=inputs.train_data,
        eval_data=inputs.eval_data,
        precision=config.precision,
        ops=f"TensorFlow {tf.__version__}{' with XLA' if config.enable_xla else ''}, {type(strategy).__name__}",
        ranks=strategy.num_replicas_in_sync,
    )
    log_identity(log.event, identity, resolved)
    log_batch_size(log.event, config, sequences_of_step(config, strategy))
    log.event("opt_implementation", "tensorflow")
    optimizer.hyperparameters(log.event)
    schedule.hyperparameters(log.event)
    return identity


def agreed(config: TrainConfig, inputs: Inputs, strategy: tf.distribute.Strategy) -> dict[str, object]:
    """What a checkpoint must agree on to be continued here."""
    return {
        "model": inputs.shape.to_json(),
        "optimizer": config.optimizer,
        "train_batch_size": config.train_batch_size,
        "replicas": strategy.num_replicas_in_sync,
        "train_data": inputs.train_data,
        "eval_data": inputs.eval_data,
    }


def same_everywhere(strategy: tf.distribute.Strategy, number: int, worker: Worker) -> int:
    """The chief's number on every worker; below 2**31."""
    if worker.count == 1:
        return number

    @tf.function
    def told() -> tf.Tensor:
        mine = tf.constant(number if worker.is_chief else 0, tf.int32)
        context = tf.distribute.get_replica_context()
        is_first = tf.cast(tf.equal(context.replica_id_in_sync_group, 0), tf.int32)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, mine * is_first)

    return int(strategy.experimental_local_results(strategy.run(told))[0])


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
    seconds = max(state.train_seconds, 1e-9)
    summary = {
        "status": outcome.status,
        "reason": outcome.reason,
        "seconds_to_train": round(outcome.seconds, 3),
        "accuracy": state.accuracy,
        "target_accuracy": config.target_mlm_accuracy,
        "samples": state.samples,
        "steps": state.step,
        "skipped_steps": state.skipped_steps,
        "samples_per_second": round(state.samples / seconds, 1),
        "tokens_per_second": round(state.tokens / seconds),
        "seed": seed,
        "ranks": strategy.num_replicas_in_sync,
    }
    checkpoints.write_weights(paths.folder, model, summary)
    write_curve(paths.folder / "metrics.jsonl", paths.folder / "curve.png")
    lines = (paths.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [point["loss"] for point in map(json.loads, lines) if point["kind"] == "step"]
    told = {
        "total_training_steps": state.step,
        "train_loss": losses[-1] if losses else None,
        "last_train_metrics": state.accuracy,
    }
    (config.output_dir / "training_summary.txt").write_text(json.dumps(told) + "\n", encoding="utf-8")
    (paths.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")

"""The training loop: loops of steps on the device, with evaluations and checkpoints between them.

events.start                         start the clock: run_start in the MLPerf log
data.open                            first touch of the data
|-- callbacks.on_batch_begin
|   step.run_loop                    up to STEPS_PER_LOOP optimizer steps in one graph
|   callbacks.on_batch_end
|   events.step                      at log points
|   evaluate                         if due: all evaluation samples over all replicas
|   save                             if due; also after SIGUSR1, then exit
'-- until the target or a limit
events.stop, log.run_stop            stop the clock
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import tensorflow as tf

from mlbert.config.bert_config import BertConfig
from mlbert.config.flops import BatchWork, training_flops
from mlbert.mlperf.mllog import MLPerfLogger, constants
from mlbert.optim.schedules import Schedule
from mlbert.runs.events import Events
from mlbert.runs.progress import Clock, Limits, RunOutcome, StepCounts, TrainState
from tf2_bert import objective
from tf2_bert.checkpoints import CheckpointFolder
from tf2_bert.data import Data
from tf2_bert.endings import Warned
from tf2_bert.step import TrainStep
from tf2_bert.workers import Workers


class Callback(Protocol):
    """Called around each loop of steps, with Keras's method names."""

    def on_batch_begin(self, batch: int, logs: object = None) -> None:
        """Called before loop ``batch``, counted from 0."""

    def on_batch_end(self, batch: int, logs: Mapping[str, int] | None = None) -> None:
        """Called after loop ``batch``; ``logs["steps"]`` is its number of steps."""


@dataclass(frozen=True)
class Run:
    """The objects of one run, and when to evaluate and save."""

    step: TrainStep
    shape: BertConfig
    data: Data
    workers: Workers
    schedule: Schedule
    checkpoints: CheckpointFolder
    events: Events
    log: MLPerfLogger
    limits: Limits
    warned: Warned
    state: TrainState
    global_batch_size: int  # nominal sequences of a step over all replicas
    steps_per_loop: int
    eval_every_samples: int | None  # None disables evaluation
    save_every_steps: int  # 0 disables checkpoints
    callbacks: Sequence[Callback] = ()


def train(run: Run) -> RunOutcome:
    """Train until the target or a limit, or until the job is about to end.

    Without a target, a limit is a success.
    """
    state = run.state
    run.events.start(state)
    clock = Clock(state.elapsed_seconds)
    run.data.open(state.step)
    run.events.opened(state)
    status = constants.ABORTED
    loops = 0
    evaluated_at = -1
    # A resumed run may already be at its end.
    reason = run.limits.reached(state, state.elapsed_seconds)
    if run.limits.met(state):
        status = constants.SUCCESS
        reason = met(run)
    while reason is None:
        steps = steps_of_loop(run)
        for callback in run.callbacks:
            callback.on_batch_begin(loops)
        run_steps(run, steps)
        for callback in run.callbacks:
            callback.on_batch_end(loops, {"steps": steps})
        loops += 1
        warnings, seconds = run.workers.sum(
            [run.warned.is_set, clock.seconds() if run.workers.is_chief else 0]
        )
        reason = run.limits.reached(state, seconds)
        due = state.samples >= state.next_eval_samples or (
            reason is not None and evaluated_at != state.samples
        )
        if run.eval_every_samples is not None and due:
            evaluated_at = state.samples
            evaluate(run, run.eval_every_samples, clock)
            if run.limits.met(state):
                status = constants.SUCCESS
                reason = met(run)
        leaving = warnings > 0 and reason is None
        if leaving or (run.save_every_steps and state.step % run.save_every_steps == 0):
            state.elapsed_seconds = clock.seconds()
            run.checkpoints.save(state)
        if leaving:
            run.workers.sum([0])  # wait: the first worker to exit would stop the others
            run.warned.leave()
    if run.limits.succeeds(state):
        status = constants.SUCCESS
    run.data.finish()
    state.elapsed_seconds = clock.seconds()
    outcome = RunOutcome(status, reason, state.elapsed_seconds, state)
    run.events.stop(outcome)
    run.log.run_stop(status)
    return outcome


def met(run: Run) -> str:
    """Return the reason of a run that ended at the target."""
    return f"target accuracy {run.limits.target_accuracy} reached"


def steps_of_loop(run: Run) -> int:
    """Return the steps of the next loop: STEPS_PER_LOOP, or fewer if an evaluation,
    a checkpoint or the end is sooner.

    Packed steps hold about `global_batch_size` sequences, so an evaluation can be one step late.
    """
    state = run.state
    limits = run.limits
    evaluates = run.eval_every_samples is not None
    end = min(state.next_eval_samples, limits.max_samples) if evaluates else limits.max_samples
    left = math.ceil((end - state.samples) / run.global_batch_size)
    steps = [run.steps_per_loop, limits.max_steps - state.step, left]
    if run.save_every_steps:
        steps.append(run.save_every_steps - state.step % run.save_every_steps)
    return max(min(steps), 1)


def run_steps(run: Run, steps: int) -> None:
    """Run one loop of steps.

    A skipped update delays the learning rate schedule only from the next loop on.
    """
    state = run.state
    started = time.monotonic()
    rates = [run.schedule(state.updates + i) for i in range(steps)]
    with data_errors_explained(run.data):
        results = run.step.run_loop(run.data.batches, np.array(rates, np.float32), state.step)
    state.train_seconds += time.monotonic() - started
    for i, rate in enumerate(rates):
        state.step += 1
        sequences, tokens, squared, masked = (round(float(numbers[i])) for numbers in results[2:])
        flops = training_flops(run.shape, BatchWork(tokens, squared, masked, sequences))
        state.add(StepCounts(sequences, tokens, flops))
        if not math.isfinite(results.grad_norms[i]):
            state.skipped_steps += 1
            run.events.skipped(state)
        if run.events.should_log(state.step):
            run.events.step(state, float(results.losses[i]), rate, float(results.grad_norms[i]))


def evaluate(run: Run, every_samples: int, clock: Clock) -> None:
    """Evaluate every sample once over all replicas;
    the next evaluation is due ``every_samples`` later.
    """
    state = run.state
    run.events.evaluation_start(state)
    totals = np.zeros(len(objective.Sums._fields))
    with data_errors_explained(run.data):
        for rows in run.data.evaluation():
            totals += [float(value) for value in run.step.evaluate_batch(rows)]
    metrics = objective.metrics(objective.Sums(*totals))
    state.accuracy = metrics["mlm_accuracy"]
    while state.next_eval_samples <= state.samples:
        state.next_eval_samples += every_samples
    run.events.evaluation(state, metrics, clock.seconds())


@contextmanager
def data_errors_explained(data: Data) -> Iterator[None]:
    """Replace TensorFlow's errors about unreadable data by the data reader's own."""
    try:
        yield
    except tf.errors.OpError as error:
        reason = data.translate_error(error)
        raise (error if reason is None else reason) from None

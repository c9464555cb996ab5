"""The training loop. Methods arrive as objects; nothing here knows which recipe runs.

init_stop, run_start
source.open                              first touch of the data set
|-- take the step's micro-batches        source.next_step; run.watch.mark tells where this rank is
|   for each: forward, backward          gradients add up; reduction overlaps the last backward
|   finish the reduction                 reducer.finish
|   clip and update                      optimizer.step(schedule(step))
|   log                                  monitor
|   perhaps evaluate                     evaluator.begin, the next step's micro-batches, eval_accuracy
|   perhaps checkpoint                   also when the job is about to end (SIGUSR1); then the process leaves
'-- until the target or a limit
run_stop
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from mlbert.core.mllog import MLPerfLogger, Terminated
from mlbert.dist.watch import Stage, Watch
from mlbert.dist.world import World
from mlbert.feed.batch import Batch
from mlbert.models import BertForPreTraining, GraphedStep
from mlbert.models.objectives import PreTraining, divisor_tensors
from mlbert.train.checkpoint import CheckpointFolder
from mlbert.train.evaluate import Evaluation, EvaluationSet, Evaluator
from mlbert.train.monitor import Monitor
from mlbert.train.progress import ABORTED, SUCCESS, Clock, Limits, Outcome, Schedule, TrainState


class Source(Protocol):
    """A stream of optimizer steps; see `mlbert.feed.packed`."""

    def open(self) -> None:
        """First touch of the data."""

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches of the next step."""

    def state_dict(self) -> dict:
        """The position, JSON-able."""

    def load_state_dict(self, state: dict) -> None:
        """Continues at a position."""

    def close(self) -> None:
        """Ends background work."""


class Optimizer(Protocol):
    """An optimizer on flat buffers; see `mlbert.optim.lamb`."""

    @property
    def implementation(self) -> str:
        """Which form of it runs."""

    def step(self, lr: float) -> StepResult:
        """Starts one update; on a GPU it may still run on return."""

    def state_dict(self) -> dict:
        """Tensors and plain numbers."""

    def load_state_dict(self, state: dict) -> None:
        """Takes over `state_dict`."""

    def exact_weights(self) -> AbstractContextManager[object]:
        """Makes the flat weights exact on all ranks, within a context; training may use rounded ones."""


class StepResult(Protocol):
    """What an update reports: the gradient's norm, and whether it was left out as not finite."""

    @property
    def grad_norm(self) -> float:
        """The gradient's norm; may wait for the device, as `skipped` may."""

    @property
    def skipped(self) -> bool:
        """Whether nothing was changed."""


class Reducer(Protocol):
    """Gradient reduction over ranks; see `mlbert.dist.reduce`."""

    def prepare(self, last: bool) -> None:
        """Announces a backward pass; the last one of a step may start reducing."""

    def finish(self) -> None:
        """Waits until every gradient is the sum over ranks."""


class FlatBuffers(Protocol):
    """Parameters and gradients as one buffer each; see `mlbert.optim.flat`."""

    data: Tensor
    grad: Tensor

    def zero_grad(self) -> None:
        """Clears the gradients."""


@dataclass(frozen=True)
class Counted:
    """A step that was counted as if its update had changed the weights, before that was known."""

    result: StepResult
    step: int
    samples: int
    tokens: int
    flops: int


@dataclass(frozen=True)
class Upcoming:
    """A step that is ready: this rank's micro-batches, and `_global_counts` of them."""

    micro_batches: list[Batch]
    counts: list[int]


@dataclass
class Run:
    """Everything the loop needs, as objects."""

    model: BertForPreTraining
    flat: FlatBuffers
    source: Source
    evaluation_set: EvaluationSet
    evaluator: Evaluator
    reducer: Reducer
    optimizer: Optimizer
    schedule: Schedule
    limits: Limits
    world: World
    logger: MLPerfLogger
    monitor: Monitor
    checkpoints: CheckpointFolder
    state: TrainState
    seed: int
    eval_every_samples: int
    save_every_steps: int
    watch: Watch
    warned: bool = False  # this rank was told that the job is about to end
    leaving: bool = False  # some rank was: all agree on it in the same step
    settle_late: bool = False  # ask for a step's result when the next one is queued: the GPU never waits for the host
    unsettled: Counted | None = None
    ahead: Upcoming | None = None  # made ready while the device evaluated
    graphs: GraphedStep | None = None  # replays steps whose batches it holds
    told: bool = False  # that a step's batches were too large for it


def train(run: Run) -> Outcome:
    """Trains until the target or a limit, with MLPerf's events from run_start to run_stop."""
    log, state = run.logger, run.state
    log.start("run_start")
    clock = Clock(state.elapsed_seconds)
    run.source.open()
    run.evaluation_set.open()
    epoch = {"epoch_num": state.samples}
    log.start("epoch_start", metadata=epoch)
    log.start("block_start", metadata={"first_epoch_num": 1, "epoch_count": 1})

    status, reason, evaluated_at = ABORTED, None, -1
    while reason is None:
        train_one_step(run)
        reason = _agreed_limit(run, clock)
        due = state.samples >= state.next_eval_samples
        if run.unsettled and (reason is not None or due):
            _settle(run)
            reason, due = _agreed_limit(run, clock), state.samples >= state.next_eval_samples
        save = run.save_every_steps and state.step % run.save_every_steps == 0
        if due or (reason is not None and evaluated_at != state.samples):
            evaluated_at = state.samples
            evaluation = _begin_evaluation(run)
            if reason is None and not (save or run.leaving):  # a checkpoint holds the position before the next step
                run.ahead = _make_ready(run, Stage.READ_AHEAD, Stage.COUNT_AHEAD)
            _finish_evaluation(run, evaluation, clock)
            if state.accuracy >= run.limits.target_accuracy:
                status, reason = SUCCESS, f"target accuracy {run.limits.target_accuracy} reached"
        if reason is None and (save or run.leaving):
            save_checkpoint(run, clock.seconds())
        if reason is None and run.leaving:
            raise Terminated(signal.SIGUSR1)

    log.end("block_stop", metadata={"first_epoch_num": 1})
    log.end("epoch_stop", metadata={"epoch_num": state.samples})
    log.event("train_samples", state.samples)
    log.event("eval_samples", run.evaluation_set.num_examples)
    log.run_stop(status)
    seconds = clock.seconds()
    state.elapsed_seconds = seconds
    return Outcome(status, reason, seconds, state)


def train_one_step(run: Run) -> None:
    """One optimizer step on all ranks."""
    state, started = run.state, time.monotonic()
    ready, run.ahead = run.ahead or _make_ready(run, Stage.READ, Stage.COUNT), None
    micro_batches, counts = ready.micro_batches, ready.counts
    num_samples, num_masked = int(counts[0]), int(counts[1])
    lr = run.schedule(state.step)
    run.leaving = bool(counts[4])
    if graphs := _graphs_for(run, micro_batches):
        batches = run.watch.each(micro_batches, state.step, Stage.COMPUTE, Stage.REDUCE)
        loss_sum, result = graphs(batches, run.seed, state.step, num_masked, num_samples, lr)
    else:
        loss_sum, result = update_weights(run, micro_batches, num_masked, num_samples, lr)

    _settle(run)
    state.step += 1
    state.samples += num_samples
    state.tokens += int(counts[2])
    state.flops += int(counts[3])
    run.unsettled = Counted(result, state.step, num_samples, int(counts[2]), int(counts[3]))
    if not run.settle_late or run.monitor.wants(state.step):
        _settle(run)
    logged = run.monitor.wants(state.step)
    # Reading the loss waits for the device; done at log points only.
    loss = float(run.world.all_reduce_sum(loss_sum)) if logged else 0.0
    state.train_seconds += time.monotonic() - started
    if logged:
        run.monitor.step(state, loss, lr, result.grad_norm)


def _make_ready(run: Run, reading: Stage, counting: Stage) -> Upcoming:
    """Takes the next step's micro-batches and agrees on their numbers; nothing of it waits for the device."""
    run.watch.mark(run.state.step, reading)
    micro_batches = run.source.next_step()
    run.watch.mark(run.state.step, counting)
    return Upcoming(micro_batches, _global_counts(micro_batches, run))


def update_weights(
    run: Run, micro_batches: list[Batch], num_masked: int, num_samples: int, lr: float
) -> tuple[Tensor, StepResult]:
    """The step's computation, whatever the batches' sizes.

    Args:
        run: at `run.state.step`.
        micro_batches: of this rank.
        num_masked, num_samples: of the step over all ranks.
        lr: learning rate.

    Returns:
        (float64 scalar on the device, this rank's part of the step's loss; the optimizer's result).
    """
    step, device = run.state.step, run.flat.data.device
    objective, keys = PreTraining("step"), run.model.dropout_keys(run.seed, step).tolist()
    divisors = divisor_tensors(objective.divisors((num_masked, num_samples)), device)
    run.flat.zero_grad()
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    for i, batch in enumerate(run.watch.each(micro_batches, step, Stage.COMPUTE, Stage.REDUCE)):
        run.reducer.prepare(last=i == len(micro_batches) - 1)
        loss = objective.loss(run.model, batch.to(device), keys, divisors)
        loss.backward()
        loss_sum += loss.detach()
    run.reducer.finish()
    run.watch.mark(step, Stage.UPDATE)
    result = run.optimizer.step(lr)
    run.model.end_step(run.world.all_reduce_max)
    return loss_sum, result


def _graphs_for(run: Run, micro_batches: list[Batch]) -> GraphedStep | None:
    """What replays this step, if anything does; says so once where the batches are too large."""
    if run.graphs is None or run.graphs.holds(micro_batches):
        return run.graphs
    if not run.told:
        run.told = True
        run.monitor.say(f"step {run.state.step + 1} runs without a graph: a batch exceeds {run.graphs.budget}")
    return None


def _settle(run: Run) -> None:
    """Takes the last counted step's samples back if its update was left out."""
    counted, run.unsettled = run.unsettled, None
    if counted is None or not counted.result.skipped:
        return
    state = run.state
    state.skipped_steps += 1
    state.samples -= counted.samples
    state.tokens -= counted.tokens
    state.flops -= counted.flops
    run.monitor.skipped(replace(state, step=counted.step))


def save_checkpoint(run: Run, elapsed_seconds: float) -> None:
    """Writes the whole state of the run from rank 0; the other ranks wait."""
    run.watch.mark(run.state.step, Stage.CHECKPOINT)
    _settle(run)
    run.state.elapsed_seconds = elapsed_seconds
    optimizer = run.optimizer.state_dict()
    tensors = {f"optimizer.{k}": v for k, v in optimizer.items() if isinstance(v, Tensor)}
    tensors |= run.model.derived_state()
    numbers = {k: v for k, v in optimizer.items() if not isinstance(v, Tensor)}
    state = {"train": run.state.to_json(), "optimizer": numbers, "source": run.source.state_dict(), "seed": run.seed}
    with run.optimizer.exact_weights():
        if run.world.rank == 0:
            run.checkpoints.save(run.state.step, {"weights": run.flat.data, **tensors}, state)
        run.world.barrier()


def load_checkpoint(run: Run, warn: Callable[[str], None]) -> bool:
    """Takes over the newest good checkpoint, if there is one; says with ``warn`` what was passed over."""
    checkpoint, warnings = run.checkpoints.load_newest()
    for warning in warnings:
        warn(warning)
    if checkpoint is None:
        return False
    run.flat.data.copy_(checkpoint.tensors["weights"])
    tensors = {k.removeprefix("optimizer."): v for k, v in checkpoint.tensors.items() if k.startswith("optimizer.")}
    run.optimizer.load_state_dict({**tensors, **checkpoint.state["optimizer"]})
    run.model.load_derived_state(checkpoint.tensors)
    run.source.load_state_dict(checkpoint.state["source"])
    run.state.restore(checkpoint.state["train"])
    run.seed = checkpoint.state["seed"]
    return True


def _global_counts(micro_batches: Iterable[Batch], run: Run) -> list[int]:
    """Sequences, masked tokens, tokens and FLOPs of the step over all ranks, and how many of them were warned.

    The loss divides by the first two; the last rides along because an all-reduce of its own would cost a round trip.
    """
    counts = torch.tensor([0, 0, 0, 0, run.warned])
    for batch in micro_batches:
        flops = run.model.training_flops(batch)
        counts += torch.tensor([batch.num_samples, batch.num_masked, batch.num_tokens, flops, 0])
    run.world.all_reduce_sum(counts)
    return counts.tolist()


def _agreed_limit(run: Run, clock: Clock) -> str | None:
    """The limit that was reached; ranks whose clocks differ follow rank 0."""
    seconds = clock.seconds()
    if run.limits.max_seconds is not None:
        seconds = run.world.broadcast_int(round(seconds * 1000)) / 1000
    return run.limits.reached(run.state, seconds)


def _begin_evaluation(run: Run) -> Evaluation:
    """Queues an evaluation of the weights as they are."""
    run.logger.start("eval_start", metadata={"epoch_num": run.state.samples})
    with run.optimizer.exact_weights():
        run.model.weights_changed()
        evaluation = run.evaluator.begin(
            lambda batches: run.watch.each(batches, run.state.step, Stage.EVALUATE, Stage.SUM)
        )
    run.model.weights_changed()  # what training reads may be rounded
    return evaluation


def _finish_evaluation(run: Run, evaluation: Evaluation, clock: Clock) -> None:
    """Waits for the accuracy, which the log gets with the time at which it is known."""
    state = run.state
    where = {"epoch_num": state.samples}
    state.accuracy, loss = evaluation.result()
    run.logger.end("eval_stop", metadata=where)
    run.logger.event("eval_accuracy", state.accuracy, metadata=where)
    while state.next_eval_samples <= state.samples:
        state.next_eval_samples += run.eval_every_samples
    run.monitor.evaluation(state, loss, clock.seconds())

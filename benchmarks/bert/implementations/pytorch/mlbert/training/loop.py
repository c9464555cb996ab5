"""The training loop.

Everything that differs between methods is passed in as an object (`protocols`).

events.start                         the clock runs: run_start in MLPerf's log
source.open, evaluation.open         first touch of the data;
                                     a run resumed at its limit evaluates and ends
|-- reader.take                      this rank's micro-batches, the step's counts over all ranks
|   reader.begin_count               the next step's micro-batches;
|                                    their counts are summed while this step runs
|   step                             forward, backward, reduce, update
|   sample_counter.count             samples so far; a skipped step is subtracted once that is known
|   reader.finish_count              the next step's counts, rank 0's clock,
|                                    and whether the job is about to end
|   events.step                      at log points
|   maybe evaluate                   evaluator.begin, the micro-batches after the next,
|                                    events.evaluation
|   maybe save                       also when the job is about to end; then the process exits
'-- until the target or a limit
events.stop, lifecycle.finish        the clock stops: run_stop
snapshots.wait                       the last checkpoint is complete
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from mlbert.distributed.lifecycle import Lifecycle
from mlbert.distributed.stages import Stage
from mlbert.distributed.world import World
from mlbert.host.exit_statuses import ABORTED, SUCCESS
from mlbert.runs.events import Events
from mlbert.runs.progress import Clock, Limits, Pace, RunOutcome, TrainState
from mlbert.training.best_weights import BestWeights
from mlbert.training.checkpoint import Snapshots
from mlbert.training.evaluate import Evaluator
from mlbert.training.protocols import Method
from mlbert.training.reader import BatchReader, SampleCounter
from mlbert.training.step import Step, StepResult


@dataclass(frozen=True)
class Run:
    """The objects of one run, and how often it evaluates and saves.

    Attributes:
        finalize_late: read a step's result after the next one is queued, so that a GPU never waits
            for the host. False if steps are routinely skipped (loss scaling), because the next
            learning rate depends on it.
        eval_every_samples: sequences between evaluations.
        eval_every_steps: steps between evaluations, in place of that; None if sequences count.
        save_every_steps: steps between checkpoints; 0 saves none.
        pace: schedules evaluations, checkpoints and the learning rate's decay by the clock as well
            as by steps.
        saves_last_step: save the last step's checkpoint, too, so that the run can be extended.
            With ``pace`` it always is.
        best: keeps the best evaluation's weights, with which the run ends, and stops it if there
            was none for long; None: the run ends with the last weights.
    """

    method: Method
    step: Step
    reader: BatchReader
    sample_counter: SampleCounter
    evaluator: Evaluator
    snapshots: Snapshots
    events: Events
    lifecycle: Lifecycle
    world: World
    state: TrainState
    limits: Limits
    seed: int
    finalize_late: bool
    eval_every_samples: int
    eval_every_steps: int | None
    save_every_steps: int
    pace: Pace | None = None
    saves_last_step: bool = False
    best: BestWeights | None = None


def train(run: Run) -> RunOutcome:
    """Train until the target, a limit, or the end of the job.

    Without a target, reaching a limit is a success.

    A run that is resumed at its limit trains no step: it evaluates and ends.
    """
    state = run.state
    run.events.start(state)
    clock = Clock(state.elapsed_seconds)
    run.method.source.open()
    run.method.evaluation.open()
    run.events.opened(state)

    status = ABORTED
    evaluated_at = -1
    first_step = state.step
    # Both times are from the checkpoint of a resumed run, so that all ranks decide alike.
    reason = run.limits.reached(state, max(state.due_seconds, state.elapsed_seconds))
    if reason is None and run.best is not None:
        reason = run.best.stop_reason(state.step)
    if reason is not None:
        evaluate(run, clock, read_ahead=False)
        if run.limits.met(state):
            status = SUCCESS
            reason = _met(run)
    while reason is None:
        leaving = train_one_step(run, clock)
        reason, due = _stop_reason(run, clock)
        if run.sample_counter.is_open and (reason is not None or due):
            run.sample_counter.settle()
            reason, due = _stop_reason(run, clock)
        save = leaving or _save_is_due(run, clock)
        if due or (reason is not None and evaluated_at != state.samples):
            evaluated_at = state.samples
            evaluate(run, clock, read_ahead=reason is None and not leaving)
            if run.limits.met(state):
                status = SUCCESS
                reason = _met(run)
            elif reason is None and run.best is not None:
                reason = run.best.stop_reason(state.step)
        if reason is None and save:
            save_checkpoint(run, clock)
        if reason is None and leaving:
            run.snapshots.wait()
            run.lifecycle.leave()

    if run.limits.succeeds(state):
        status = SUCCESS
    run.lifecycle.watch.mark(state.step, Stage.CHECKPOINT)  # may be slow, also with remote data
    if status == SUCCESS:
        run.method.source.finish()
        run.world.barrier()  # every rank's data has been checked
    if (run.pace is not None or run.saves_last_step) and state.step > first_step:
        save_checkpoint(run, clock)  # allows a later run to extend it
    if run.best is not None and run.best.step not in (None, state.step):
        run.snapshots.wait()
        take_best_weights(run, run.best, clock)
    state.elapsed_seconds = clock.seconds()
    outcome = RunOutcome(status, reason, state.elapsed_seconds, state)
    run.events.stop(outcome)
    run.lifecycle.finish(status)
    run.snapshots.wait()  # not timed
    return outcome


def train_one_step(run: Run, clock: Clock) -> bool:
    """Run one optimizer step on all ranks.

    Return True if any rank was warned that the job is about to end.
    """
    state = run.state
    watch = run.lifecycle.watch
    started = time.monotonic()
    completed = run.state.step
    read_before = run.reader.read_seconds
    upcoming = run.reader.take(completed)
    after = replace(
        state,
        step=completed + 1,
        samples=state.samples + upcoming.counts.samples,
        tokens=state.tokens + upcoming.counts.tokens,
    )
    if run.limits.reached(after, 0.0) is None:  # else this is probably the last step
        run.reader.begin_count(
            completed, clock.seconds() + clock.step_seconds + clock.evaluation_seconds
        )
    lr = run.method.schedule(run.limits.place(state)) * (
        run.pace.factor(state.due_seconds) if run.pace else 1.0
    )
    result = run.step(
        upcoming.batches,
        run.seed,
        state.step,
        upcoming.divisors,
        lr,
        on_progress=lambda batches: watch.each(batches, state.step, Stage.COMPUTE, Stage.REDUCE),
    )
    run.sample_counter.count(result, upcoming.counts)
    should_log = run.events.should_log(state.step)
    if should_log or not run.finalize_late:
        run.sample_counter.settle()
    # Reading the loss waits for the device, so it is done at log points only.
    loss, ranks = sum_losses(run, result) if should_log else (0.0, [])
    following = run.reader.finish_count(completed)
    clock.step_seconds = time.monotonic() - started
    state.train_seconds += clock.step_seconds
    state.loader_seconds += run.reader.read_seconds - read_before
    if should_log:
        run.events.step(state, loss, lr, result.grad_norm, ranks)
    if following is None:
        return False
    state.due_seconds = following.seconds
    return following.warned


def sum_losses(run: Run, result: StepResult) -> tuple[float, list[float]]:
    """Return the loss over all ranks of a step that is done, and `Events.step`'s ``ranks``."""
    world = run.world
    own = max(run.lifecycle.watch.own_seconds(run.state.step), run.step.device_seconds)
    numbers = torch.zeros(2, world.world_size, dtype=torch.float64, device=result.loss_sum.device)
    numbers[0, world.rank] = result.loss_sum
    numbers[1, world.rank] = own
    losses, ranks = world.all_reduce_sum(numbers)
    return float(losses.sum()), ranks.tolist()


def evaluate(run: Run, clock: Clock, read_ahead: bool, is_new: bool = True) -> None:
    """Evaluate the current weights while the host reads a further step (``read_ahead``).

    ``is_new``: the weights are those of this step, and may be the best.
    """
    state = run.state
    method = run.method
    watch = run.lifecycle.watch
    started = clock.seconds()
    run.events.evaluation_start(state)
    with method.optimizer.exact_weights():
        method.model.weights_changed()
        evaluation = run.evaluator.begin(
            lambda items: watch.each(items, state.step, Stage.EVALUATE, Stage.SUM)
        )
    method.model.weights_changed()  # training may read rounded weights
    if read_ahead:
        run.reader.read_ahead(state.step)
    metrics = evaluation.result()
    state.accuracy = metrics[method.objective.metric]
    if run.best is not None and is_new:
        with method.optimizer.exact_weights():
            run.best.evaluated(state.step, state.accuracy, method.flat.data)
    while state.next_eval_samples <= state.samples:
        state.next_eval_samples += run.eval_every_samples
    clock.evaluation_seconds = clock.seconds() - started
    clock.evaluated_at = state.due_seconds
    run.events.evaluation(state, metrics, clock.seconds())


def take_best_weights(run: Run, best: BestWeights, clock: Clock) -> None:
    """Replace the weights with the best ones, and evaluate them again for their predictions."""
    optimizer = run.method.optimizer
    with optimizer.exact_weights():
        numbers = optimizer.state_dict()
        run.method.flat.data.copy_(best.load())
        optimizer.load_state_dict(numbers)  # it may keep a copy of the weights
    evaluate(run, clock, read_ahead=False, is_new=False)


def save_checkpoint(run: Run, clock: Clock) -> None:
    """Start to write a checkpoint of the run's full state, once the one before it is written."""
    run.lifecycle.watch.mark(run.state.step, Stage.CHECKPOINT)
    run.sample_counter.settle()
    run.state.elapsed_seconds = clock.seconds()
    run.snapshots.save(run.reader.position())
    clock.saved_at = run.state.due_seconds


def _met(run: Run) -> str:
    """Return the reason of a run that ends at its target."""
    return f"target accuracy {run.limits.target_accuracy} reached"


def _save_is_due(run: Run, clock: Clock) -> bool:
    if run.pace is not None and run.state.due_seconds - clock.saved_at >= run.pace.save_every:
        return True
    return run.save_every_steps > 0 and run.state.step % run.save_every_steps == 0


def _stop_reason(run: Run, clock: Clock) -> tuple[str | None, bool]:
    """Return the limit that was reached, if any, and whether an evaluation is due.

    All ranks use rank 0's clock at the start of the step. MAX_SECONDS includes that step and a
    final evaluation, each assumed to take as long as the one before.
    """
    state = run.state
    seconds = run.state.due_seconds
    is_due = state.samples >= state.next_eval_samples
    if run.eval_every_steps is not None:
        is_due = state.step % run.eval_every_steps == 0
    if run.pace is not None:
        is_due = is_due or run.pace.evaluates(
            seconds - clock.evaluated_at, clock.evaluation_seconds
        )
    return run.limits.reached(state, seconds), is_due

"""One experiment: from a resolved configuration to the MLPerf log and the run folder.

LOGDIR/result_<i>.txt              MLPerf log
LOGDIR/run_<i>/config.json         resolved configuration, origin of each value, provenance
LOGDIR/run_<i>/settings.txt        the table of all settings and their origins
LOGDIR/run_<i>/ranks.txt           machine, address and device of each of several ranks
LOGDIR/run_<i>/metrics.jsonl       one line per log point and evaluation
LOGDIR/run_<i>/curve.png           loss and accuracy over samples and time
LOGDIR/run_<i>/weights/            safetensors with a model card
LOGDIR/run_<i>/huggingface/        the same weights for transformers
LOGDIR/run_<i>/summary.json        the numbers that ``mlbert report`` prints
LOGDIR/run_<i>/checkpoints/        if SAVE_CHECKPOINT_STEPS is not 0

`evaluate_only` measures the starting weights instead,
to check that a checkpoint was converted and loaded correctly:

    source config_<system>.sh && mlbert train --evaluate-only

The benchmark's phase-1 checkpoint (``model.ckpt-28252``) must reach a masked-LM accuracy of 0.34085
on the benchmark's 10,000 evaluation samples. Another number means other weights, data or
``bert_config.json``, or a wrong conversion. It needs INIT_CHECKPOINT, BERT_CONFIG and EVALDIR, does
not read the training set, and writes no MLPerf log.
"""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from mlbert.config.batch_growth import BatchGrowth, Growth, growth_of
from mlbert.config.configuration import Configuration
from mlbert.config.recipe import Recipe
from mlbert.config.resolution import Resolved
from mlbert.data.batches import HostBatch, StaticShape
from mlbert.data.loading.config import DataConfig
from mlbert.distributed.config import DistributedConfig
from mlbert.distributed.lifecycle import Lifecycle
from mlbert.distributed.rank_table import summary as summarize_ranks
from mlbert.distributed.rank_table import table
from mlbert.distributed.world import World
from mlbert.host.errors import UserError, in_public_words
from mlbert.host.files import plain_size, write_atomically
from mlbert.host.freed_memory import keep_freed_memory
from mlbert.host.machine import fewer_threads_words, threads_per_rank
from mlbert.host.provenance import tree_root
from mlbert.host.waiting import adapted_waits
from mlbert.mlperf import rules
from mlbert.mlperf.config import SubmissionConfig
from mlbert.mlperf.keys import ELAPSED
from mlbert.mlperf.mllog import MLPerfLogger, close_interrupted
from mlbert.models.config import ModelConfig
from mlbert.ops.config import ComputeConfig
from mlbert.optim.config import OptimizerConfig, ScheduleConfig
from mlbert.runs import identity as run_identity
from mlbert.runs import run_folder
from mlbert.runs.config import RunConfig
from mlbert.runs.energy import EnergyMeter, energy_words, summarize_energy
from mlbert.runs.events import EventFanout, Events, MLPerfEvents
from mlbert.runs.monitor import Monitor
from mlbert.runs.progress import Limits, Pace, RunOutcome, TrainState
from mlbert.runs.run_folder import RunFolder, choose_seed
from mlbert.runs.starting_weights import newest_checkpoint, weights_file
from mlbert.runs.step_folders import StepFolders
from mlbert.training.best_weights import BestWeights
from mlbert.training.checkpoint import CheckpointFolder, Snapshots
from mlbert.training.config import EvaluationConfig, PhaseConfig
from mlbert.training.evaluate import Evaluator, evaluate
from mlbert.training.loggers import make_loggers
from mlbert.training.loop import Run, train
from mlbert.training.protocols import (
    BuildContext,
    Inputs,
    Method,
    RecipeBuild,
)
from mlbert.training.reader import BatchReader, SampleCounter
from mlbert.training.run_options import RunOptions
from mlbert.training.step import Step, check_device, choose_graphs

_PARTS = "gradient_accumulation_steps"  # the attribute of GRADIENT_STEPS


def summarize(
    outcome: RunOutcome,
    growth: Growth,
    evaluation: EvaluationConfig,
    method: Method,
    seed: int,
    world: World,
) -> dict[str, object]:
    """Return the numbers that ``mlbert report`` prints.

    Rates are per second of training, without evaluation.
    """
    state = outcome.state
    seconds = max(state.train_seconds, 1e-9)
    peak = method.peak_flops()
    rate = state.flops / seconds / world.world_size
    return {
        **run_folder.summarize(
            outcome,
            packs_per_rank=_packs_per_rank(growth, state.updates),
            target_accuracy=evaluation.target_metric,
            seed=seed,
            ranks=world.world_size,
        ),
        "gemm_peak_flops_per_second_per_rank": round(peak),
        "share_of_gemm_peak": round(rate / peak, 4),
    }


def _packs_per_rank(growth: Growth, updates: int) -> int | None:
    """Return the rows of all updates; None if they depend on the text."""
    if isinstance(growth, BatchGrowth):
        return growth.before(updates)
    return growth.last * updates if growth.is_constant else None


def leave_behind(
    folder: Path, summary: Mapping[str, object], facts: Mapping[str, object], method: Method
) -> None:
    """Write the weights, the curve and, last, the summary, which marks the run as finished."""
    method.export(folder, {**summary, **facts})
    run_folder.write_curve(folder, summary)
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")


def _inspect(resolved: Resolved, world: World) -> tuple[int, Any]:
    """Return this rank's threads and the recipe's inputs."""
    config = resolved.config
    compute = config[ComputeConfig]
    start = config[ModelConfig].init_checkpoint
    check_device(compute.cuda_graph_mode, world.device)
    if start is not None and world.rank == 0:
        plain_size(weights_file(start))
    num_threads = threads_per_rank(
        compute.cpu_threads, world.local_world_size, is_gpu=world.device.type == "cuda"
    )
    return num_threads, resolved.recipe.inspect(config)


def _open_run(
    resolved: Resolved, inputs: Inputs, world: World, paths: RunFolder, how: RunOptions
) -> None:
    """Compare this rank's settings and inputs with rank 0's; on rank 0, create the run folder.

    A run that cannot be resumed with these settings is refused before any of its files is changed.
    """
    config = resolved.config
    _check_same(config, inputs, world)
    if world.rank == 0:
        if config[RunConfig].resume:
            _check_resumable(config, inputs, paths)
        paths.prepare(config[RunConfig].resume, how.extends or how.replaces)
        paths.write_settings(resolved)


def _check_same(config: Configuration, inputs: Inputs, world: World) -> None:
    """Raise UserError if this rank's method, batch, data or model shape is not rank 0's: the ranks
    would train different models.
    """
    mine: dict[str, Any] = {
        **config.fixed_on_resume(),
        "BATCHSIZE": config[DataConfig].train_batch_size,
        "MAX_STEPS": config[ScheduleConfig].max_steps,
        "the model's shape": inputs.shape.to_json(),
    }
    # Only digests of one kind compare: a machine whose cache has those of `verify` names files by
    # content, and another one by size.
    for name, digest in (("training", inputs.train_data), ("evaluation", inputs.eval_data)):
        kind, _, _ = digest.rpartition(":")
        mine[f"the {name} set ({kind})"] = digest
    text = json.dumps(mine)
    theirs = json.loads(world.rendezvous.text_of_rank_0("settings", text))
    for name, value in json.loads(text).items():
        other = theirs.get(name, value)
        if value != other:
            problem = f"is {value} here, and {other} on rank 0"
            remedy = "Give all ranks the same exports, configuration files and data"
            raise UserError("distributed.settings", name, problem, remedy)


def _check_resumable(config: Configuration, inputs: Inputs, paths: RunFolder) -> None:
    """Raise UserError if the newest checkpoint was made with other settings, data or model shape,
    or is beyond the end of the schedule. `Snapshots.load` compares the rest.
    """
    identity = {
        "model": inputs.shape.to_json(),
        "train_data": inputs.train_data,
        "eval_data": inputs.eval_data,
        **config.fixed_on_resume(),
    }
    identity.pop("GRADIENT_STEPS", None)  # some recipes may change it
    folder = paths.folder / "checkpoints"
    StepFolders(folder, config[RunConfig].keep_checkpoints, identity).check_newest()
    for step in paths.checkpoint_steps[-1:]:
        _limits(config).check_resumed(TrainState(step=step))


def run_experiment(
    resolved: Resolved, world: World, console: Console, how: RunOptions = RunOptions()
) -> RunOutcome:
    """Train once and write the files listed at the top of this module.

    Raises UserError for mistakes of the user.
    """
    config = resolved.config
    build: RecipeBuild = resolved.recipe.load()
    settings = config[RunConfig]
    data = config[DataConfig]
    compute = config[ComputeConfig]
    paths = RunFolder.of(settings)
    num_threads, inputs = world.rendezvous.run_all("inputs", lambda: _inspect(resolved, world))
    world.rendezvous.run_all("run folder", lambda: _open_run(resolved, inputs, world, paths, how))
    how.on_inspected()
    world.start()
    if world.rank == 0 and how.replaces:
        paths.remove_run()
    if world.rank == 0 and settings.resume:
        paths.set_log_aside()
    torch.set_num_threads(num_threads)
    if world.device.type == "cpu":
        keep_freed_memory()
    log = MLPerfLogger(
        paths.log if world.rank == 0 and how.mlperf_log else None, rank=world.rank, root=tree_root()
    )

    def close_log(status: str, reason: str | None) -> None:
        if world.rank == 0:
            log.run_stop(status, {"reason": reason} if reason else None)
        elif reason and paths.log.exists():  # rank 0 is lost: close its file
            close_interrupted(paths.log, tree_root(), reason)

    def say(text: str) -> None:
        console.print(in_public_words(text), markup=False, highlight=False, soft_wrap=True)

    read_seconds = 60.0 * config[DistributedConfig].read_timeout
    world.wait_for_data(read_seconds)
    lifecycle = Lifecycle(world, close_log, read_seconds=read_seconds)
    _warn_of(inputs, data, say)
    # On a GPU, and with several ranks, other programs do not decide on the threads.
    is_open = world.local_world_size == 1 and world.device.type == "cpu"
    if is_open and (words := fewer_threads_words(compute.cpu_threads, num_threads)):
        say(words)
    waiting_threads = num_threads if world.device.type == "cpu" else 1
    with ExitStack() as last, lifecycle.guard(), adapted_waits(waiting_threads):
        seed = world.broadcast_int(choose_seed(settings, paths))
        log.event("cache_clear", settings.caches_cleared)
        log.start("init_start")
        run_identity.log_submission(log.event, config[SubmissionConfig])
        log.event("seed", seed)
        context = BuildContext(config, world, seed, say)
        context = build.choose_precision(build, context, inputs)
        build.prepare(context, inputs.shape)
        config, method = build_fitting(
            config,
            lambda fitting: build.build(replace(context, config=fitting), inputs),
            world,
            say,
        )
        if config is not resolved.config:
            resolved = replace(
                resolved, config=config, origin={**resolved.origin, _PARTS: "AUTO_MICRO_BATCH"}
            )
        sites = world.sites()
        if world.rank == 0 and world.world_size > 1:
            place = paths.write_ranks(table(sites))
            head = f"{world.master_addr}:{world.master_port}"
            say(f"{summarize_ranks(sites, head)}; all in {place}")
        facts = runtime_facts(inputs, method, [site.host for site in sites], world)
        if world.rank == 0:
            identity = log_run(log, resolved, facts, method)
            record = paths.write_record(resolved, seed, identity)
        monitor = _monitor(config, paths, world, console)
        listeners: list[Events] = [
            MLPerfEvents(log, lambda: method.evaluation.num_examples),
            monitor,
        ]
        if how.listener:
            listeners.append(how.listener)
        if world.rank == 0:
            listeners += _loggers(config, record, paths.folder, world, method)
        events = EventFanout(listeners)
        run = assemble(
            config,
            method,
            paths.folder / "checkpoints",
            world,
            lifecycle,
            events,
            seed,
            how.pace,
            how.saves_last_step or _is_phase(config),
            how.patience,
        )
        last.callback(run.snapshots.close)  # after the other ranks know how the run ends
        _make_ready(run, config, lifecycle, log, say)
        if world.rank == 0 and how.extends:
            paths.reopen()
        monitor.open(run.state, facts.hosts)
        try:
            outcome, energy = _train_measured(run, log, say)
            method.optimizer.exact_weights()  # permanently: they are exported below
        finally:
            method.source.close()
            monitor.close()
    if world.rank == 0:
        evaluation = config[EvaluationConfig]
        summary = summarize(outcome, growth_of(config), evaluation, method, seed, world) | energy
        leave_behind(paths.folder, summary, asdict(identity), method)
    run.step.release()
    world.stop()
    return outcome


def _warn_of(inputs: Inputs, data: DataConfig, say: Callable[[str], None]) -> None:
    if inputs.train_data == inputs.eval_data and not data.synthetic_data:
        say(
            f"warning: EVALDIR {data.eval_dir} is the training set: "
            "evaluations will not measure other text"
        )


def _monitor(config: Configuration, paths: RunFolder, world: World, console: Console) -> Monitor:
    path = paths.folder / "metrics.jsonl" if world.rank == 0 else None
    settings = config[RunConfig]
    return Monitor(path, _limits(config), settings.log_freq, console, append=settings.resume)


def _limits(config: Configuration) -> Limits:
    return Limits.of(
        config[RunConfig],
        target_accuracy=config[EvaluationConfig].target_metric,
        max_steps=config[ScheduleConfig].max_steps,
        step_tokens=config.or_defaults(PhaseConfig).step_tokens,
    )


def _is_phase(config: Configuration) -> bool:
    """Return True if the next phase may start from the end of this run."""
    saves = config[RunConfig].save_checkpoint_steps != 0
    return saves and config.or_defaults(PhaseConfig).step_tokens is not None


def _loggers(
    config: Configuration, record: dict[str, Any], folder: Path, world: World, method: Method
) -> list[Events]:
    return make_loggers(
        config[RunConfig],
        record,
        folder,
        config[OptimizerConfig].optimizer,
        world.world_size,
        method.peak_flops,
    )


def _make_ready(
    run: Run,
    config: Configuration,
    lifecycle: Lifecycle,
    log: MLPerfLogger,
    say: Callable[[str], None],
) -> None:
    """Resume from a checkpoint if asked to, then warm up
    and capture graphs so that none of it is timed.
    """
    if reason := run.method.optimizer.reason:
        say(f"optimizer: {run.method.optimizer.implementation}, because {reason}")
    if config[RunConfig].resume and run.snapshots.load(say):
        run.limits.check_resumed(run.state)
        if run.best is not None:
            run.best.resume()
        elapsed = {ELAPSED: round(run.state.elapsed_seconds, 3)}
        log.event("resumed_from_step", run.state.step, elapsed)
        say(f"resumed at step {run.state.step}, {run.state.samples} samples")
    elif (parent := config.or_defaults(PhaseConfig).init_optimizer) is not None:
        updates = run.snapshots.start_optimizer(newest_checkpoint(parent))
        say(f"optimizer state of {parent}, after {updates:,} updates")
    lifecycle.accept_warnings()
    run.step.warm_up()
    if run.step.graphs:
        run.evaluator.record()
        run.step.record(run.method.tune)
        say(f"CUDA graphs: {config[ComputeConfig].cuda_graph_mode}, {run.method.static_shape}")
    if run.save_every_steps or run.pace:
        run.snapshots.prepare()


def _train_measured(
    run: Run, log: MLPerfLogger, say: Callable[[str], None]
) -> tuple[RunOutcome, dict[str, float]]:
    """Train, and return the outcome and the energy used.

    All ranks call it together; one of each machine measures.
    """
    world = run.world
    meter = EnergyMeter(world.local_world_size if world.device.type == "cuda" else 0)
    if run.state.step:
        meter.reject("the run was resumed, and earlier parts may have no measurement")
    elif world.local_rank == 0:
        meter.start()
    log.end("init_stop")
    world.barrier()
    outcome = train(run)
    energy = summarize_energy(
        world.all_reduce_sum(torch.tensor(meter.stop(), dtype=torch.float64)).tolist()
    )
    if words := energy_words(energy, meter.reason):
        say(words)
    return outcome, energy


def build_fitting(
    config: Configuration,
    build: Callable[[Configuration], Method],
    world: World,
    say: Callable[[str], object],
) -> tuple[Configuration, Method]:
    """Build the method; with AUTO_MICRO_BATCH, double GRADIENT_STEPS until the largest micro-batch
    fits.

    All ranks call it together and get the same GRADIENT_STEPS.
    Raises UserError if not even the smallest one fits.
    """
    while True:
        method = build(config)
        shape = method.static_shape if config[ComputeConfig].auto_micro_batch else None
        if shape is None or _fits(method, shape, world):
            return config, method
        data = config[DataConfig]
        steps = data.gradient_accumulation_steps
        parts = 2 * steps
        if data.train_batch_size % parts:
            reason = f"does not fit in memory in {steps} parts and is not divisible by {parts}"
            remedy = "Use a power of two, or a smaller model"
            raise UserError("device.memory", f"BATCHSIZE {data.train_batch_size}", reason, remedy)
        config = config.replace(data.model_copy(update={"gradient_accumulation_steps": parts}))
        del method
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        say(f"out of memory: GRADIENT_STEPS is now {parts}")


def _fits(method: Method, static_shape: StaticShape, world: World) -> bool:
    """Return True if forward and backward of a dummy batch
    that fills the static shape fit on every rank.
    """
    step = Step.of(method, world.all_reduce_max, print)
    failed = False
    try:
        step.dry_run(static_shape.fullest_batch())
    except (MemoryError, RuntimeError) as error:
        # PyTorch's CPU allocator raises a plain RuntimeError.
        is_memory = isinstance(
            error, MemoryError | torch.OutOfMemoryError
        ) or "can't allocate memory" in str(error)
        if not is_memory:
            raise
        failed = True
    return not int(world.all_reduce_max(torch.tensor(int(failed))))


def runtime_facts(
    inputs: Inputs, method: Method, hosts: Sequence[str], world: World
) -> run_identity.RuntimeFacts:
    """Collect facts about a run from its data and PyTorch; ``hosts``: the machine of each rank."""
    gpu_facts: dict[str, Any] = {"gpus": {}}
    if world.device.type == "cuda":
        gpu_facts = {
            # Each rank of a machine has one GPU, all of the same model.
            "gpus": {torch.cuda.get_device_name(world.device): world.local_world_size},
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return run_identity.RuntimeFacts(
        train_data=inputs.train_data,
        eval_data=inputs.eval_data,
        max_sequence_length=inputs.max_sequence_length,
        sequences_per_pack=inputs.sequences_per_pack,
        precision=method.precision,
        ops=method.ops,
        ranks=world.world_size,
        threads_per_rank=torch.get_num_threads(),
        hosts=hosts,
        **gpu_facts,
    )


def log_run(
    log: MLPerfLogger, resolved: Resolved, facts: run_identity.RuntimeFacts, method: Method
) -> run_identity.RunIdentity:
    """Log the run's provenance, its full configuration, and every hyper-parameter."""
    model = resolved.config[ModelConfig]
    identity = run_identity.identify(
        resolved, facts, shape=model.bert_config_file, init_checkpoint=model.init_checkpoint
    )
    run_identity.log_identity(log.event, identity, resolved)
    config = resolved.config
    data = resolved.config[DataConfig]
    batch = rules.global_batch_size(data.train_batch_size, facts.ranks, data.average_packing_rate)
    run_identity.log_batch_size(log.event, batch, data.gradient_accumulation_steps)
    evaluation = config[EvaluationConfig]
    run_identity.log_ends(
        log.event,
        _limits(config),
        first_evaluation_samples=evaluation.eval_iter_start_samples,
        evaluation_interval_samples=evaluation.eval_iter_samples,
        evaluation_size=evaluation.num_eval_examples,
    )
    log.event("opt_implementation", method.optimizer.implementation)
    method.optimizer.hyperparameters(log.event)
    method.schedule.hyperparameters(log.event)
    return identity


def assemble(
    config: Configuration,
    method: Method,
    checkpoints: Path,
    world: World,
    lifecycle: Lifecycle,
    events: Events,
    seed: int,
    pace: Pace | None = None,
    saves_last_step: bool = False,
    patience: int | None = None,
) -> Run:
    """Assemble the training loop's objects from a method and its settings.

    Args:
        config: read for limits, evaluation, checkpoints and graphs, not for the method.
        method: from the recipe.
        checkpoints: the checkpoint folder.
        world: already started.
        lifecycle: inside its `guard`.
        events: listener of the run.
        seed: dropout seed.
        pace: schedule by the clock, if any.
        saves_last_step: save the last step's checkpoint, too.
        patience: evaluations without a better one after which the run ends.

    Raises:
        UserError: CUDA graphs are requested but cannot be captured.
    """
    run = config[RunConfig]
    evaluation = config[EvaluationConfig]
    parts = config[DataConfig].gradient_accumulation_steps
    graphs = choose_graphs(
        config[ComputeConfig].cuda_graph_mode, method, parts, world.device, world.world_size
    )
    state = TrainState(next_eval_samples=evaluation.eval_iter_start_samples)
    step = Step.of(method, world.all_reduce_max, events.say, graphs)
    # Evaluations have a separate memory pool: one may run between any two steps.
    capture = graphs.capture() if graphs else None
    static_shapes = method.evaluation.static_shapes if graphs else ()
    return Run(
        method=method,
        step=step,
        reader=BatchReader(
            method.source,
            method.objective,
            method.model,
            world,
            lifecycle.watch,
            lambda: lifecycle.warned,
        ),
        sample_counter=SampleCounter(state, events.skipped),
        evaluator=Evaluator(
            method.model, method.objective, method.evaluation, world, capture, static_shapes
        ),
        snapshots=Snapshots(
            CheckpointFolder(checkpoints, run.keep_checkpoints, dict(method.identity)),
            method,
            state,
            seed,
            world,
        ),
        events=events,
        lifecycle=lifecycle,
        world=world,
        state=state,
        limits=_limits(config),
        seed=seed,
        finalize_late=world.device.type == "cuda" and method.loss_scale is None,
        eval_every_samples=evaluation.eval_iter_samples,
        eval_every_steps=evaluation.eval_iter_steps,
        save_every_steps=run.save_checkpoint_steps,
        pace=pace,
        saves_last_step=saves_last_step,
        best=None if patience is None else BestWeights(checkpoints.parent / "best", patience),
    )


# Begins to show the progress of work, given its total;
# the yielded function is called with what was just done.
ProgressTask = Callable[[int], AbstractContextManager[Callable[[int], None]]]


def evaluate_only(
    config: Configuration, recipe: Recipe, world: World, console: Console, task: ProgressTask
) -> float:
    """Evaluate the starting weights once, as training would.

    Print all metrics and return the recipe's.

    Raises:
        UserError: there are no weights, or data and model do not match.
    """
    world.start()
    say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)

    def check_start() -> None:
        if config[ModelConfig].init_checkpoint is None:
            reason = "is none, so there is nothing to evaluate"
            raise UserError(
                "config.missing", "INIT_CHECKPOINT", reason, "Set it to the starting weights"
            )

    world.rendezvous.run_all("evaluation", check_start)
    with Lifecycle(world, lambda *_: None).guard():
        torch.set_num_threads(
            threads_per_rank(
                config[ComputeConfig].cpu_threads,
                world.local_world_size,
                is_gpu=world.device.type == "cuda",
            )
        )
        recipe_build: RecipeBuild = recipe.load()
        context = BuildContext(config, world, config[RunConfig].seed or 0, say)
        model, objective, samples = recipe_build.build_evaluation(context)
        samples.open()
        waiting_threads = torch.get_num_threads() if world.device.type == "cpu" else 1
        with task(samples.num_examples) as advance, adapted_waits(waiting_threads):

            def each(batches: Iterable[HostBatch]) -> Iterator[HostBatch]:
                for batch in batches:
                    yield batch
                    advance(batch.num_samples * world.world_size)

            metrics = evaluate(model, objective, samples, world, each)
    shown = ", ".join(f"{name} {value:.5f}" for name, value in metrics.items())
    say(
        f"initial {shown}, {samples.num_examples} samples "
        f"(the benchmark's checkpoint on its evaluation samples: {rules.INITIAL_MLM_ACCURACY})"
    )
    world.stop()
    return metrics[objective.metric]

"""One experiment: from a resolved configuration to the MLPerf log and the run folder.

LOGDIR/result_<i>.txt              MLPerf log
LOGDIR/run_<i>/config.json         resolved configuration, origin of each value, provenance
LOGDIR/run_<i>/metrics.jsonl       one line a log point and an evaluation
LOGDIR/run_<i>/curve.png           loss and accuracy over samples and time
LOGDIR/run_<i>/weights/            safetensors with a model card
LOGDIR/run_<i>/huggingface/        the same weights for transformers
LOGDIR/run_<i>/summary.json        the numbers that ``mlbert report`` prints
LOGDIR/run_<i>/checkpoints/        while SAVE_CHECKPOINT_STEPS is not 0
"""

from __future__ import annotations

import json
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from mlbert import ops
from mlbert.core import provenance, rules
from mlbert.core.config import Resolved
from mlbert.core.errors import UserError
from mlbert.core.mllog import MLPerfLogger, Terminated, close_interrupted
from mlbert.core.settings import TrainConfig
from mlbert.dist.watch import Watch
from mlbert.dist.world import World
from mlbert.feed.batch import Batch
from mlbert.feed.budget import Budget
from mlbert.feed.compact import CompactBatch
from mlbert.models import BertConfig, BertForPreTraining
from mlbert.models.export import write_weights
from mlbert.models.load import load_weights
from mlbert.models.objectives import PreTraining, divisor_tensors
from mlbert.ops.peak import gemm_peak_flops
from mlbert.ops.precision import compute_dtype, fp8_products
from mlbert.store.base import StoreInfo
from mlbert.store.open import check_same_vocabulary, check_vocabulary, describe
from mlbert.train import artifacts
from mlbert.train.checkpoint import CheckpointFolder
from mlbert.train.evaluate import EvaluationSet, Evaluator
from mlbert.train.graphs import check_graph_mode, evaluation_capture, graphed_step
from mlbert.train.loop import FlatBuffers, Optimizer, Reducer, Run, Source, load_checkpoint, train
from mlbert.train.monitor import Monitor
from mlbert.train.progress import ABORTED, Limits, Outcome, Schedule, TrainState


@dataclass(frozen=True)
class Method:
    """What a recipe brings to the loop; ``budget`` is what one micro-batch holds at most, where that is known."""

    flat: FlatBuffers
    source: Source
    evaluation_set: EvaluationSet
    reducer: Reducer
    optimizer: Optimizer
    schedule: Schedule
    opt_name: str
    budget: Budget | None = None


@dataclass(frozen=True)
class DataSets:
    """What is known of a run's data without reading a sample."""

    train: StoreInfo
    evaluation: StoreInfo


Build = Callable[[TrainConfig, BertConfig, BertForPreTraining, World, int], Method]


@dataclass(frozen=True)
class RunFolder:
    """Paths of one experiment."""

    log: Path
    folder: Path

    @classmethod
    def of(cls, config: TrainConfig) -> RunFolder:
        """The paths that LOGDIR and EXPERIMENT name."""
        base = config.output_dir
        return cls(base / f"result_{config.experiment}.txt", base / f"run_{config.experiment}")

    def prepare(self, resume: bool) -> None:
        """Makes the folder; refuses to overwrite a finished run."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / ".writable"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise UserError(
                self.folder, f"cannot be written ({error.strerror})", "Set LOGDIR to a writable folder"
            ) from None
        if (self.folder / "summary.json").exists():
            raise UserError(self.folder, "holds a finished run", "Set another LOGDIR or EXPERIMENT, or remove it")
        if self.log.exists() and not resume and "run_start" in self.log.read_text(encoding="utf-8", errors="replace"):
            raise UserError(
                self.log,
                "is the log of an unfinished run",
                "Set RESUME=1 to continue it, or remove it with its run folder",
            )


def run_experiment(resolved: Resolved, build: Build, world: World, console: Console) -> Outcome:
    """Trains once and writes everything that the module docstring lists. Raises UserError for people's mistakes."""
    config, paths = resolved.config, RunFolder.of(resolved.config)
    shape = BertConfig.from_json(config.bert_config_file)
    sets = None if config.synthetic_data else DataSets(describe(config.input_dir), describe(config.eval_dir))
    if sets:
        check_data(config, shape, sets)
    if world.rank == 0:
        paths.prepare(config.resume)
    world.start()
    if config.resume and world.rank == 0 and paths.log.exists():
        _set_aside(paths.log)
    torch.set_num_threads(threads_per_rank(config, world))
    dtype = compute_dtype(config.precision, world.device)
    products = fp8_products(config.precision, world.device)
    chosen = ops.select(config.ops, world.device)
    check_graph_mode(config.cuda_graph_mode, world.device, chosen, shape.head_size)
    seed = world.broadcast_int(choose_seed(config, paths))
    precision = config.precision if products else str(dtype)
    facts = {**provenance.provenance(), "precision": precision, "ops": json.dumps(chosen), **data_facts(sets)}
    if world.rank == 0:
        record = {**json.loads(resolved.as_json()), "seed": seed, "ranks": world.world_size, "provenance": facts}
        (paths.folder / "config.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    logger = MLPerfLogger(paths.log if world.rank == 0 else None, rank=world.rank, root=provenance.tree_root())
    watch = Watch(world, lambda sentence: _close_log(logger, paths.log, sentence))
    with _warning() as warning, logger.aborting(), watch.guard():
        logger.event("cache_clear", config.caches_cleared)
        logger.start("init_start")
        logger.log_submission(config)
        for name, value in facts.items():
            logger.event(name, value)
        logger.event("seed", seed)
        model = BertForPreTraining(shape, dtype, fp8_products=products)
        model.initialize(seed)
        model.to(world.device)
        if config.init_checkpoint is not None:
            for name in load_weights(model, config.init_checkpoint).missing:
                console.print(f"warning: {config.init_checkpoint} has no {name}", markup=False, highlight=False)
        method = build(config, shape, model, world, seed)
        logger.event("opt_name", method.opt_name)
        logger.event("opt_implementation", method.optimizer.implementation)
        logger.log_hyperparameters(config, global_batch_size(config, world), config.num_warmup_steps)
        run = _assemble(config, paths, model, method, world, logger, console, seed, facts, watch)
        warning.run = run
        if config.resume and load_checkpoint(run, run.monitor.say):
            logger.event("resumed_from_step", run.state.step)
            run.monitor.say(f"resumed at step {run.state.step}, {run.state.samples} samples")
        if products and world.device.type == "cpu":
            run.monitor.say(f"PRECISION={config.precision} on a CPU is for tests: slower than bf16")
        warm_up(run.model, run.flat, shape)
        if run.graphs:
            run.graphs.record()
            run.monitor.say(f"CUDA graphs: {config.cuda_graph_mode}, {method.budget}")
        run.monitor.start(run.state)
        logger.end("init_stop")
        world.barrier()
        try:
            outcome = train(run)
            method.optimizer.exact_weights()  # for good: they are written below
        finally:
            method.source.close()
            run.monitor.stop()
    if world.rank == 0:
        _leave_behind(config, paths, model, outcome, facts, seed, world)
    world.stop()
    return outcome


def choose_seed(config: TrainConfig, paths: RunFolder) -> int:
    """SEED; for a continued run the seed that it began with; otherwise one from the system's randomness."""
    if config.seed is not None:
        return config.seed
    record = paths.folder / "config.json"
    if config.resume and record.exists():
        try:
            return int(json.loads(record.read_text(encoding="utf-8"))["seed"])
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(
                record, "does not tell the seed of the interrupted run", "Set SEED, or start anew"
            ) from None
    return secrets.randbelow(2**31)


def check_data(config: TrainConfig, shape: BertConfig, sets: DataSets) -> None:
    """Compares what is known of both sets with the model's shape; reads no sample."""
    train_set, eval_set = sets.train, sets.evaluation
    check_same_vocabulary(train_set, eval_set)
    vocabulary = vocabulary_file(config)
    if vocabulary is not None:
        check_vocabulary(train_set, vocabulary)
    if train_set.vocab_size not in (None, shape.vocab_size):
        raise UserError(
            config.input_dir,
            f"has a vocabulary of {train_set.vocab_size}, {config.bert_config_file} says {shape.vocab_size}",
            "Set BERT_CONFIG to the configuration of this vocabulary, or prepare with --vocab-size",
        )
    longest = max(train_set.max_seq_length, eval_set.max_seq_length)
    if longest > shape.max_position_embeddings:
        raise UserError(
            config.input_dir,
            f"has sequences of {longest} tokens, the model has {shape.max_position_embeddings} positions",
            "Raise max_position_embeddings or prepare with a smaller --max-seq-length",
        )


def vocabulary_file(config: TrainConfig) -> Path | None:
    """The vocabulary that `mlbert prepare` leaves beside the training set, where there is one."""
    path = config.input_dir.parent / "vocab.txt"
    return path if path.exists() and not config.synthetic_data else None


def data_facts(sets: DataSets | None) -> dict[str, str]:
    """Hashes that name the data of a run; None: it is synthetic."""
    if sets is None:
        return {"train_data": "synthetic", "eval_data": "synthetic"}
    return {"train_data": f"sha256:{sets.train.identity}", "eval_data": f"sha256:{sets.evaluation.identity}"}


def global_batch_size(config: TrainConfig, world: World) -> int:
    """Nominal sequences of one optimizer step over all ranks."""
    return rules.global_batch_size(config.train_batch_size, world.world_size, config.average_packing_rate)


def threads_per_rank(config: TrainConfig, world: World) -> int:
    """CPU threads of this rank: the setting, or an equal share of the cores that the process may use."""
    if config.cpu_threads:
        return config.cpu_threads
    return max(1, len(os.sched_getaffinity(0)) // world.local_world_size)


def warm_up(model: BertForPreTraining, flat: FlatBuffers, shape: BertConfig) -> None:
    """Forward and backward, and a forward pass as in evaluation, on made-up tokens: builds kernels and buffers.

    Weights and optimizer stay untouched.
    """
    length = min(64, shape.max_position_embeddings)
    batch = Batch(
        input_ids=torch.zeros(length, dtype=torch.int64),
        segment_ids=torch.zeros(length, dtype=torch.int64),
        position_ids=torch.arange(length),
        cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
        max_seqlen=length,
        masked_positions=torch.tensor([1]),
        masked_labels=torch.tensor([0]),
        next_sentence_labels=torch.tensor([0]),
        dropout_rows=torch.arange(length, dtype=torch.int32),
    )
    device = flat.data.device
    sent = CompactBatch.of(batch, page_locked=device.type == "cuda")
    objective = PreTraining("step")
    objective.loss(
        model, sent.to(device), model.dropout_keys(0, 0).tolist(), divisor_tensors((1.0, 1.0), device)
    ).backward()
    with torch.no_grad():
        model(sent.to(device), None)
    flat.zero_grad()
    model.forget_step()


def _assemble(
    config: TrainConfig,
    paths: RunFolder,
    model: BertForPreTraining,
    method: Method,
    world: World,
    logger: MLPerfLogger,
    console: Console,
    seed: int,
    facts: dict[str, Any],
    watch: Watch,
) -> Run:
    limits = Limits(
        config.target_mlm_accuracy,
        config.max_steps,
        config.max_samples_termination,
        config.max_seconds,
        config.max_skipped_steps,
    )
    metrics = paths.folder / "metrics.jsonl" if world.rank == 0 else None
    identity = {
        "model": model.config.to_json(),
        "ranks": world.world_size,
        "train_batch_size": config.train_batch_size,
        "train_data": facts["train_data"],
        "eval_data": facts["eval_data"],
    }
    return Run(
        model=model,
        flat=method.flat,
        source=method.source,
        evaluation_set=method.evaluation_set,
        evaluator=Evaluator(model, method.evaluation_set, world, evaluation_capture(config.cuda_graph_mode, world)),
        reducer=method.reducer,
        optimizer=method.optimizer,
        schedule=method.schedule,
        limits=limits,
        world=world,
        logger=logger,
        monitor=Monitor(metrics, limits, config.log_freq, console, append=config.resume),
        checkpoints=CheckpointFolder(paths.folder / "checkpoints", config.keep_checkpoints, identity),
        state=TrainState(next_eval_samples=config.eval_iter_start_samples),
        seed=seed,
        eval_every_samples=config.eval_iter_samples,
        save_every_steps=config.save_checkpoint_steps,
        watch=watch,
        settle_late=world.device.type == "cuda",
        graphs=graphed_step(
            config.cuda_graph_mode,
            model,
            method.flat,
            method.optimizer,
            method.reducer,
            method.budget,
            config.gradient_accumulation_steps,
            world,
        ),
    )


@dataclass
class _Warning:
    """Passes SIGUSR1 on to the run, as soon as there is one."""

    run: Run | None = None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.run is None:
            raise Terminated(signum)  # nothing to save yet
        self.run.warned = True


@contextmanager
def _warning() -> Iterator[_Warning]:
    """Within the block SIGUSR1 means: the job is about to end; write a checkpoint after this step and leave."""
    warning = _Warning()
    before = signal.signal(signal.SIGUSR1, warning)
    try:
        yield warning
    finally:
        signal.signal(signal.SIGUSR1, before)


def _close_log(logger: MLPerfLogger, log: Path, sentence: str) -> None:
    """The last line of a run that ends because a rank is lost; another rank writes it when rank 0 is the lost one."""
    if logger.rank == 0:
        logger.run_stop(ABORTED, {"reason": sentence})
    elif log.exists():
        close_interrupted(log, provenance.tree_root(), sentence)


def _set_aside(log: Path) -> None:
    """Keeps the log of the interrupted part under a name that no checker takes for a result."""
    taken = (log.with_suffix(f".part{i}.txt") for i in range(1, 10_000))
    target = next(path for path in taken if not path.exists())
    log.rename(target)


def _leave_behind(
    config: TrainConfig,
    paths: RunFolder,
    model: BertForPreTraining,
    outcome: Outcome,
    facts: dict[str, Any],
    seed: int,
    world: World,
) -> None:
    state = outcome.state
    peak = gemm_peak_flops(model.dtype, world.device.type)
    rate = state.flops / max(state.train_seconds, 1e-9) / world.world_size
    summary = {
        "status": outcome.status,
        "reason": outcome.reason,
        "seconds_to_train": round(outcome.seconds, 3),
        "accuracy": state.accuracy,
        "target_accuracy": config.target_mlm_accuracy,
        "samples": state.samples,
        "steps": state.step,
        "skipped_steps": state.skipped_steps,
        "samples_per_second": round(state.samples / max(state.train_seconds, 1e-9), 1),
        "tokens_per_second": round(state.tokens / max(state.train_seconds, 1e-9)),
        "model_flops_per_second_per_rank": round(rate),
        "gemm_peak_flops_per_second_per_rank": round(peak),
        "share_of_gemm_peak": round(rate / peak, 4),
        "seed": seed,
        "ranks": world.world_size,
    }
    card = {**summary, **facts}
    write_weights(model, paths.folder, vocabulary_file(config), card)
    artifacts.write_curve(paths.folder / "metrics.jsonl", paths.folder / "curve.png")
    text = json.dumps(summary, indent=2) + "\n"
    (paths.folder / "summary.json").write_text(text, encoding="utf-8")

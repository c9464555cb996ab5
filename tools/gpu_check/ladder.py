"""The step of one model from plain to fast, one op at a time, and Hugging Face's in the same run.

Each rung keeps the fast ops of those before it; on top of all of them come FP8 products, CUDA graphs and small batches.
Plain attention's memory grows with the square of a sequence's length, so its rung takes fewer sequences; a rung that
does not fit takes half as many, and says so. Rates in sequences per second compare all rungs, on lengths of one
distribution.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu_check.hardware import device_name, peaks_of, synchronize
from gpu_check.op_speed import lamb_implementations
from gpu_check.trainer import Trainer
from mlbert.config.bert_config import BertConfig
from mlbert.data.loading.batches import Batch, HostBatch, StaticShape
from mlbert.distributed.capture import CudaCapture, NoCapture
from mlbert.host.errors import UserError
from mlbert.models.flops import BatchWork, training_flops
from mlbert.ops import forms as registry
from mlbert.ops.cublaslt_tuning import tuned
from mlbert.ops.precision import fp8_products
from mlbert.programs.bench.step_time import make_batch, their_side
from mlbert.training.step import GraphMode, Graphs

# The order in which ops become fast: the ones that keep most memory first. Others follow.
OPS = (
    "attention",
    "dropout_add_layer_norm",
    "layer_norm_dropout",
    "feed_forward",
    "linear_gelu",
    "linear_qkv",
    "masked_cross_entropy",
    "embedding_sum",
)
FP8_OPS = "fp8_"
WARM_UP, MIN_STEPS, MAX_STEPS = 2, 3, 12
ALL, FAST_ACCUMULATION = "all fast ops", "fast accumulation in all products"
HUGGINGFACE_ATTENTION = ("eager", "sdpa")
# Rows of a tile of a matrix product; so many for each multiprocessor keep all of them busy to the end ("a wave").
TILE_ROWS = 128
FP8_ROWS = 16
MOST_FILLING = 1.02


@dataclass(frozen=True)
class Sizes:
    """Sequences of a step that the rungs start from: fast ones, plain attention, Hugging Face, a small step."""

    fast: int
    plain: int
    huggingface: int
    small: int = 16


@dataclass(frozen=True)
class Rung:
    """One configuration.

    Attributes:
        name: what it adds to the rung before.
        forms: op -> implementation; plain where none is named.
        lamb: LAMB's implementation.
        sequences: to begin with.
        precision: of the encoder's products where it is not the ladder's: "fp8-forward" or "fp8".
        graph: what is captured, a value of `GraphMode`; empty: nothing.
        fill: round the tokens up for the device's tiles, with some that belong to no sequence.
        accumulation: which FP8 products add with fewer bits, FP8_FAST_ACCUMULATION.
        tuned: take cublasLt's algorithms by time; for a graph.
    """

    name: str
    forms: dict[str, str]
    lamb: str
    sequences: int
    precision: str = ""
    graph: str = ""
    fill: bool = True
    accumulation: str = "forward"
    tuned: bool = False


def rungs(device: torch.device, sizes: Sizes) -> list[Rung]:
    """Plain, then one op after the other in its other forms and in its best, LAMB last; all there is on the device."""
    available, best = registry.available(device), registry.select("auto", device)
    lamb = lamb_implementations(device)[-1]
    found, forms = [Rung("plain", {}, "plain", sizes.plain)], {}
    others = sorted(op for op in available if op not in OPS and not op.startswith(FP8_OPS))
    for op in (*(op for op in OPS if op in available), *others):
        fast = [name for name in available[op] if name != "plain"]
        for name in sorted(fast, key=lambda name: name == best[op]):
            sequences = sizes.fast if op == "attention" or "attention" in forms else sizes.plain
            found.append(Rung(f"+ {op} {name}", {**forms, op: name}, "plain", sequences))
        if best[op] != "plain":
            forms = {**forms, op: best[op]}
    return [*found, Rung(ALL, forms, lamb, sizes.fast)]


def fp8_rungs(device: torch.device, best: Rung) -> list[Rung]:
    """The best rung with FP8 products, forward only and all; none where the device has no such products."""
    try:
        fp8_products("fp8", device)
    except UserError:
        return []
    chosen = registry.select("auto", device)
    forms = {**best.forms, **{op: name for op, name in chosen.items() if op.startswith(FP8_OPS)}}
    return [
        replace(best, name=f"{best.name}, {precision}", forms=forms, precision=precision)
        for precision in ("fp8-forward", "fp8")
    ]


def variants(device: torch.device, best: list[Rung], sizes: Sizes) -> list[Rung]:
    """The best rungs as graphs, in small steps with and without, and without filling."""
    # On a CPU, where nothing is captured, this tries the program.
    mode = GraphMode.FULL_ITERATION if device.type == "cuda" else GraphMode.SEGMENTED

    def graph_of(rung: Rung) -> Rung:
        return replace(rung, name=f"{rung.name}, graph", graph=mode.value)

    found = [graph_of(rung) for rung in best]
    for family in sorted({*best[0].forms.values()} - {"plain", best[0].forms.get("attention", "plain")}):
        found += [without(rung, family) for rung in best]
    for rung in best:
        small = replace(rung, name=f"{rung.name}, small step", sequences=sizes.small)
        found += [small, graph_of(small)]
    return [*found, *(replace(rung, name=f"{rung.name}, not filled", fill=False) for rung in best)]


def without(rung: Rung, family: str) -> Rung:
    """The rung with the ops of one family plain: what they gain, and what there is where they fail."""
    forms = {op: form for op, form in rung.forms.items() if form != family}
    return replace(rung, name=f"{rung.name}, no {family}", forms=forms)


def token_budget(tokens: int, device: torch.device) -> int:
    """The tokens rounded up to whole waves of tiles, else to tiles, else for FP8: where that adds next to nothing."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    for multiple in (processors * TILE_ROWS, TILE_ROWS, FP8_ROWS):
        filled = -(-tokens // multiple) * multiple
        if filled <= MOST_FILLING * tokens:
            return filled
    return tokens


def budget_of(batch: HostBatch, device: torch.device, fill: bool) -> StaticShape:
    """The batch's sizes; ``fill``: with `token_budget`'s tokens, and masked tokens in tiles as well."""
    tokens, masked = batch.num_tokens, batch.num_masked
    if fill:
        tokens, masked = token_budget(tokens, device), math.ceil(masked / FP8_ROWS) * FP8_ROWS
    return StaticShape(tokens, batch.num_samples, masked, batch.max_seqlen, batch.has_labels)


def placed(batch: HostBatch, device: torch.device, fill: bool) -> Batch:
    """The batch on the device, in the sizes of `budget_of`."""
    budget = budget_of(batch, device, fill)
    target = budget.allocate(device)
    budget.write(batch, target)
    return target


class Ladder:
    """Measures rungs on one model, which is made once.

    Args:
        config: shape of the model.
        device: where to compute.
        dtype: precision of the matrix products.
        sizes: sequences to begin with.
        seconds: of each rung; 0: two steps are all.
        seed: of weights, data and dropout.
    """

    def __init__(
        self, config: BertConfig, device: torch.device, dtype: torch.dtype, sizes: Sizes, seconds: float, seed: int = 1
    ) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self.sizes, self.seconds, self.seed = sizes, seconds, seed
        self._first: Trainer | None = None

    def rows(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """(name, measurement): what matters most first, so the best rungs, Hugging Face, then the ladder up to them."""
        *ladder, best = rungs(self.device, self.sizes)
        *forward_only, fp8 = fp8_rungs(self.device, best) or [None]
        bests = [rung for rung in (best, fp8) if rung]
        eager, *others = HUGGINGFACE_ATTENTION
        for rung in bests:
            yield rung.name, lambda r=rung: self.measure(r)
        yield f"huggingface {eager}", lambda: self.measure_huggingface(eager)
        if fp8:
            fast = replace(fp8, name=f"{fp8.name}, {FAST_ACCUMULATION}", accumulation="all")
            yield fast.name, lambda: self.measure(fast)
        for rung in (*variants(self.device, bests, self.sizes), *forward_only):
            yield rung.name, lambda r=rung: self.measure(r)
        for attention in others:
            yield f"huggingface {attention}", lambda a=attention: self.measure_huggingface(a)
        for rung in ladder:
            yield rung.name, lambda r=rung: self.measure(r)

    def measure(self, rung: Rung) -> dict[str, Any]:
        """One rung's rates; see `_timed`."""

        def measured(batch: HostBatch) -> dict[str, Any]:
            return self._timed(self.step_of(rung, batch), batch, rung)

        return self.with_largest_batch(rung.sequences, measured)

    def step_of(self, rung: Rung, batch: HostBatch) -> Callable[[], Tensor]:
        """A function that queues one step, on the batch filled up as the rung asks."""
        budget = budget_of(batch, self.device, rung.fill)
        if not rung.graph:
            graphs = Graphs(GraphMode.SEGMENTED, budget, 1, NoCapture) if rung.fill else None
        elif self.device.type == "cuda":
            graphs = Graphs(GraphMode(rung.graph), budget, 1, lambda: CudaCapture(self.device))
        else:
            graphs = Graphs(GraphMode(rung.graph), budget, 1, NoCapture)
        if rung.precision and rung.graph:
            # Sets the scales: a graph's memory and that of a step without one would not fit together.
            self.trainer(rung, batch, None).step()
            self._free_memory()
        trainer = self.trainer(rung, batch, graphs)
        if graphs and rung.tuned:
            trainer.make.record(partial(tuned, self.device, True, lambda _: None, print))
        elif graphs:
            trainer.make.record()
        return trainer.step

    def trainer(self, rung: Rung, batch: HostBatch, graphs: Graphs | None) -> Trainer:
        """The model with the rung's forms selected; `graphs` as in `Trainer`."""
        registry.select_each(rung.forms, self.device)
        arguments = (self.config, batch, self.device, self.dtype, self.seed)
        if self._first is None:
            self._first = Trainer(*arguments, lamb="plain")
        products = fp8_products(rung.precision, self.device, rung.accumulation)
        return Trainer(*arguments, start=self._first, lamb=rung.lamb, products=products, graphs=graphs)

    def batch(self, sequences: int) -> HostBatch:
        """Sequences with the training set's lengths, whose buffer the device keeps."""
        batch = make_batch(self.config, sequences, None, self.seed)
        return replace(batch, data=batch.data.to(self.device))

    def measure_huggingface(self, attention: str) -> dict[str, Any]:
        """Hugging Face's step, padded, or why it is not measured."""
        try:
            import transformers  # noqa: F401
        except ImportError:
            return {"skipped": "transformers is not installed"}
        best = rungs(self.device, self.sizes)[-1]

        def step_of(batch: HostBatch) -> dict[str, Any]:
            start = self.trainer(best, batch, None).model
            side = their_side(self.config, batch, self.dtype, start, attention)
            return self._timed(lambda: torch.tensor(side.step()), batch, None)

        return self.with_largest_batch(self.sizes.huggingface, step_of)

    def with_largest_batch(self, sequences: int, measure: Callable[[HostBatch], dict[str, Any]]) -> dict[str, Any]:
        """`measure` with as many sequences as fit, half as many at each try; ``did_not_fit``: the first number."""
        wanted = sequences
        while True:
            self._free_memory()
            try:
                result = measure(self.batch(sequences))
            except RuntimeError as error:
                if sequences == 1 or not _is_out_of_memory(error):
                    raise
                sequences //= 2
            else:
                return result if sequences == wanted else {**result, "did_not_fit": wanted}

    def _free_memory(self) -> None:
        """Gives back what the rung before left, so that pieces of other sizes are no hindrance."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _timed(self, step: Callable[[], Tensor], batch: HostBatch, rung: Rung | None) -> dict[str, Any]:
        """Median seconds of a step from event to event (CUDA) or call to call, and what follows from it."""
        loss = torch.zeros(())
        for _ in range(WARM_UP if self.seconds else 0):
            loss = step()
        synchronize(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        started = time.perf_counter()
        loss = step()
        synchronize(self.device)
        count = max(
            MIN_STEPS if self.seconds else 1, min(MAX_STEPS, int(self.seconds / (time.perf_counter() - started)))
        )
        marks = [self._mark()]
        for _ in range(count):
            loss = step()
            marks.append(self._mark())
        synchronize(self.device)
        seconds = [self._between(a, b) for a, b in itertools.pairwise(marks)]
        if not torch.isfinite(loss):
            raise RuntimeError(f"the loss is {float(loss)}")
        work, median = BatchWork.of(batch), statistics.median(seconds)
        result: dict[str, Any] = {
            "sequences": work.sequences,
            "tokens": work.tokens,
            "mean_length": work.tokens / work.sequences,
            "seconds": seconds,
            "sequences_per_second": work.sequences / median,
            "rate": training_flops(self.config, work) / median / 1e12,
            "unit": "TFLOP/s",
            "loss": float(loss),
        }
        if rung is not None:
            result["forms"], result["lamb"], result["precision"] = rung.forms, rung.lamb, rung.precision
        if peaks := peaks_of(device_name(self.device)):
            result["share_of_peak"] = result["rate"] / peaks.bf16
            if rung is not None and rung.precision and peaks.fp8:
                result["share_of_fp8_peak"] = result["rate"] / peaks.fp8
        if self.device.type == "cuda":
            result["peak_memory_bytes"] = torch.cuda.max_memory_allocated(self.device)
        return result

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) / 1e3 if self.device.type == "cuda" else second - first


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether it is, or came up while one was handled: a graph's capture that fails raises another error on top."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None

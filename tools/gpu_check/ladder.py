"""Time a training step from plain to fast, one op at a time,
and Hugging Face's step in the same run.

Each rung keeps the fast ops of the rungs before it; the last one adds FP8 products. Plain attention
needs memory that grows with the square of a sequence's length, so its rungs take fewer sequences. A
rung that does not fit takes half as many and reports that. All rungs have the same distribution of
lengths, so sequences per second compare them. Graphs and timed algorithms are measured with the
published step (`gpu_check.published_step`).
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu_check.hardware import rated, synchronize
from gpu_check.rows import Row
from mlbert.config.bert_config import BertConfig
from mlbert.config.flops import BatchWork, training_flops
from mlbert.data.batches import HostBatch
from mlbert.host.errors import UserError
from mlbert.models.bert import BertForPreTraining
from mlbert.ops import forms as registry
from mlbert.ops.precision import fp8_products
from mlbert.programs.bench.sides import Side, make_batch, our_side, their_side

# The order in which ops become fast: those that save the most memory first. Other ops follow.
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
WARM_UP = 2
MIN_STEPS = 3
MAX_STEPS = 1000
HUGGINGFACE_ATTENTION = ("eager", "sdpa")


@dataclass(frozen=True)
class Sizes:
    """Initial number of sequences: for rungs with fast and with plain attention,
    and for Hugging Face.
    """

    fast: int
    plain: int
    huggingface: int


@dataclass(frozen=True)
class Rung:
    """One configuration.

    Attributes:
        name: what it adds to the previous rung.
        forms: op -> implementation; the other ops are plain.
        sequences: initial number.
        precision: "fp8" for FP8 products in the encoder, else empty.
    """

    name: str
    forms: dict[str, str]
    sequences: int
    precision: str = ""


def rungs(device: torch.device, sizes: Sizes) -> list[Rung]:
    """Return the rungs for the device: plain, then for one op after the other its other forms and
    its best one.
    """
    available = registry.available(device)
    best = registry.select("auto", device)
    found: list[Rung] = [Rung("plain", {}, sizes.plain)]
    forms: dict[str, str] = {}
    others = sorted(op for op in available if op not in OPS and not op.startswith(FP8_OPS))
    for op in (*(op for op in OPS if op in available), *others):
        fast = [name for name in available[op] if name != "plain"]
        for name in sorted(fast, key=lambda name: name == best[op]):
            sequences = sizes.fast if op == "attention" or "attention" in forms else sizes.plain
            found.append(Rung(f"+ {op} {name}", {**forms, op: name}, sequences))
        if best[op] != "plain":
            forms = {**forms, op: best[op]}
    return [*found, Rung("all fast ops", forms, sizes.fast)]


def fp8_rungs(device: torch.device, best: Rung) -> list[Rung]:
    """Return the best rung with FP8 products, if the device supports them."""
    try:
        fp8_products("fp8", device)
    except UserError:
        return []
    chosen = registry.select("auto", device)
    forms = best.forms | {op: name for op, name in chosen.items() if op.startswith(FP8_OPS)}
    return [replace(best, name=f"{best.name}, fp8", forms=forms, precision="fp8")]


class Ladder:
    """Measures rungs on one model, which is created once.

    Args:
        config: shape of the model.
        device: where to compute.
        dtype: dtype of the matrix products.
        sizes: initial numbers of sequences.
        seconds: measuring time of each rung; 0 for two steps.
        seed: seed of weights, data and dropout.
    """

    def __init__(
        self,
        config: BertConfig,
        device: torch.device,
        dtype: torch.dtype,
        sizes: Sizes,
        seconds: float,
        seed: int = 1,
    ) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self.sizes = sizes
        self.seconds = seconds
        self.seed = seed
        self._model: BertForPreTraining | None = None

    def rows(self) -> list[Row]:
        """Return the rows, the most important ones first:
        best rungs, Hugging Face, then the other rungs.
        """
        *ladder, best = rungs(self.device, self.sizes)
        bests = [best, *fp8_rungs(self.device, best)]
        ours = [(rung.name, partial(self.measure, rung)) for rung in (*bests, *ladder)]
        theirs = [
            (f"huggingface {kind}", partial(self.measure_huggingface, kind))
            for kind in HUGGINGFACE_ATTENTION
        ]
        return [*ours[: len(bests)], *theirs, *ours[len(bests) :]]

    def measure(self, rung: Rung) -> dict[str, Any]:
        """Return the `timed_steps` of a rung."""
        result = self._timed(rung.sequences, lambda batch: self.side(rung, batch))
        return {**result, "forms": rung.forms, "precision": rung.precision}

    def side(self, rung: Rung, batch: HostBatch) -> Side:
        """Return the model's training step with the rung's forms selected."""
        if self._model is None:
            self._model = BertForPreTraining(self.config, self.dtype)
            self._model.initialize(self.seed)
            self._model.to(self.device)
        registry.select_each(rung.forms, self.device)
        self._model.bert.use_linears(fp8_products(rung.precision, self.device))
        return our_side(batch, self._model, self.seed)

    def measure_huggingface(self, attention: str) -> dict[str, Any]:
        """Return the `timed_steps` of Hugging Face's padded step."""
        if importlib.util.find_spec("transformers") is None:
            return {"skipped": "transformers is not installed"}
        best = rungs(self.device, self.sizes)[-1]

        def side(batch: HostBatch) -> Side:
            self.side(best, batch)
            assert self._model is not None
            return their_side(self.config, batch, self.dtype, self._model, attention)

        return self._timed(self.sizes.huggingface, side)

    def _timed(self, sequences: int, side_of: Callable[[HostBatch], Side]) -> dict[str, Any]:
        def measured(count: int) -> dict[str, Any]:
            batch = make_batch(self.config, count, None, self.seed)
            side = side_of(batch)
            return timed_steps(
                self.config, self.device, self.seconds, lambda: torch.tensor(side.step()), batch
            )

        return largest(sequences, self.device, measured)


def largest(
    wanted: int, device: torch.device, measure: Callable[[int], dict[str, Any]]
) -> dict[str, Any]:
    """Return the result of ``measure`` for the number, halved until it fits;
    ``did_not_fit`` is then the first one.
    """
    count = wanted
    while True:
        if device.type == "cuda":  # free cached blocks of the previous row
            gc.collect()
            torch.cuda.empty_cache()
        try:
            result = measure(count)
        except RuntimeError as error:
            if count == 1 or not _is_out_of_memory(error):
                raise
            count //= 2
        else:
            return result if count == wanted else {**result, "did_not_fit": wanted}


def timed_steps(
    config: BertConfig,
    device: torch.device,
    seconds: float,
    step: Callable[[], Tensor],
    batch: HostBatch,
) -> dict[str, Any]:
    """Time steps for about ``seconds``, or two steps if it is 0;
    return their times and the rates of the median.

    On CUDA a step's time is that between events in the stream.
    """
    loss = torch.zeros(())
    for _ in range(WARM_UP if seconds else 0):
        loss = step()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    loss = step()
    synchronize(device)
    count = max(
        MIN_STEPS if seconds else 1, min(MAX_STEPS, int(seconds / (time.perf_counter() - started)))
    )
    marks = [_mark(device)]
    for _ in range(count):
        loss = step()
        marks.append(_mark(device))
    synchronize(device)
    taken = [
        a.elapsed_time(b) / 1e3 if device.type == "cuda" else b - a
        for a, b in itertools.pairwise(marks)
    ]
    if not torch.isfinite(loss):
        raise RuntimeError(f"the loss is {float(loss)}")
    work = BatchWork.of(batch)
    median = statistics.median(taken)
    result: dict[str, Any] = {
        "sequences": work.sequences,
        "tokens": work.tokens,
        "mean_length": work.tokens / work.sequences,
        "seconds": taken,
        "sequences_per_second": work.sequences / median,
        **rated(training_flops(config, work) / median / 1e12, "TFLOP/s", device),
        "loss": float(loss),
    }
    if device.type == "cuda":
        result["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)
    return result


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if the error or one of its causes is an OutOfMemoryError;
    a failing capture raises another one.
    """
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None

"""The step of one model from plain to fast, one op at a time, and Hugging Face's in the same run.

Each rung keeps the fast ops of those before it. Plain attention's memory grows with the square of a sequence's length,
so its rung takes fewer sequences; a rung that does not fit takes half as many. Rates in sequences per second compare
all rungs, on lengths of one distribution.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlbert.bench.hardware import device_name, peaks_of, synchronize
from mlbert.bench.op_speed import lamb_implementations
from mlbert.bench.step import Trainer, make_batch, their_side
from mlbert.core.errors import UserError
from mlbert.data.batch import Batch
from mlbert.models import BertConfig
from mlbert.models.flops import Work, training_flops
from mlbert.ops import registry
from mlbert.ops.precision import fp8_products

# The order in which ops become fast: the ones that keep most memory first.
OPS = (
    "attention",
    "dropout_add_layer_norm",
    "layer_norm_dropout",
    "linear_gelu",
    "linear_qkv",
    "masked_cross_entropy",
    "embedding_sum",
)
WARM_UP, MIN_STEPS, MAX_STEPS = 2, 3, 12
ALL = "all"
HUGGINGFACE_ATTENTION = ("sdpa", "eager")


@dataclass(frozen=True)
class Sizes:
    """Sequences of a step that the rungs start from: fast ones, the ones with plain attention, Hugging Face's."""

    fast: int
    plain: int
    huggingface: int


@dataclass(frozen=True)
class Rung:
    """One configuration.

    Attributes:
        name: what it adds to the rung before.
        forms: op -> implementation; plain where none is named.
        lamb: LAMB's implementation.
        sequences: to begin with.
        precision: of the encoder's products where it is not the ladder's: "fp8-forward" or "fp8".
    """

    name: str
    forms: dict[str, str]
    lamb: str
    sequences: int
    precision: str = ""


def rungs(device: torch.device, sizes: Sizes) -> list[Rung]:
    """Plain, then one op after the other in its best form, LAMB last; all that there is on the device."""
    available = registry.available(device)
    lamb = lamb_implementations(device)[-1]
    found, forms = [Rung("plain", {}, "plain", sizes.plain)], {}
    for op in OPS:
        fast = [name for name in available[op] if name != "plain"]
        if "flash" in fast:
            found.append(Rung(f"+ {op} flash", {**forms, op: "flash"}, "plain", sizes.fast))
        if own := [name for name in fast if name != "flash"]:
            forms = {**forms, op: own[-1]}
            sequences = sizes.fast if "attention" in forms else sizes.plain
            found.append(Rung(f"+ {op} {own[-1]}", forms, "plain", sequences))
    if lamb != "plain":
        found.append(Rung(f"+ LAMB {lamb} ({ALL})", forms, lamb, sizes.fast))
    return found


def fp8_rungs(device: torch.device, best: Rung) -> list[Rung]:
    """The best rung with FP8 products, forward only and all; none where the device has no such products."""
    try:
        fp8_products("fp8", device)
    except UserError:
        return []
    available = registry.available(device)
    forms = {**best.forms, **{op: available[op][-1] for op in ("fp8_quantise", "fp8_product")}}
    return [Rung(f"{ALL}, {name}", forms, best.lamb, best.sequences, name) for name in ("fp8-forward", "fp8")]


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
        for rung in [best, *reversed(fp8_rungs(self.device, best))]:
            yield rung.name, lambda r=rung: self.measure(r)
        for attention in HUGGINGFACE_ATTENTION:
            yield f"huggingface {attention}", lambda a=attention: self.measure_huggingface(a)
        for rung in ladder:
            yield rung.name, lambda r=rung: self.measure(r)

    def measure(self, rung: Rung) -> dict[str, Any]:
        """One rung's rates; see `_timed`."""
        return self.with_largest_batch(
            rung.sequences, lambda batch: self._timed(self.trainer(rung, batch).step, batch, rung)
        )

    def trainer(self, rung: Rung, batch: Batch) -> Trainer:
        """The model with the rung's forms selected."""
        registry.select_each(rung.forms, self.device)
        arguments = (self.config, batch, self.dtype, self.seed)
        if self._first is None:
            self._first = Trainer(*arguments, lamb="plain")
        products = fp8_products(rung.precision, self.device)
        return Trainer(*arguments, start=self._first, lamb=rung.lamb, products=products)

    def batch(self, sequences: int) -> Batch:
        """Sequences with the training set's lengths, on the device."""
        return make_batch(self.config, sequences, None, self.seed).to(self.device)

    def measure_huggingface(self, attention: str) -> dict[str, Any]:
        """Hugging Face's step, padded, or why it is not measured."""
        try:
            import transformers  # noqa: F401
        except ImportError:
            return {"skipped": "transformers is not installed"}
        best = rungs(self.device, self.sizes)[-1]

        def step_of(batch: Batch) -> dict[str, Any]:
            start = self.trainer(best, batch).model
            side = their_side(self.config, batch, self.dtype, start, attention)
            return self._timed(lambda: torch.tensor(side.step()), batch, None)

        return self.with_largest_batch(self.sizes.huggingface, step_of)

    def with_largest_batch(self, sequences: int, measure: Callable[[Batch], dict[str, Any]]) -> dict[str, Any]:
        """`measure` with as many sequences as fit, half as many at each try."""
        while True:
            try:
                return measure(self.batch(sequences))
            except torch.OutOfMemoryError:
                if sequences == 1:
                    raise
                sequences //= 2
            if self._first is not None:
                self._first.flat.zero_grad()
            torch.cuda.empty_cache()

    def _timed(self, step: Callable[[], Tensor], batch: Batch, rung: Rung | None) -> dict[str, Any]:
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
        work, median = Work.of(batch), statistics.median(seconds)
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

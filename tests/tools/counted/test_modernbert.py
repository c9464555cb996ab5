"""The counted ModernBERT step: tiles of attention, FLOPs, and parts that cover every launch."""

import functools

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from counted import attention_tiles, modernbert
from counted.gpus import GPUS, MEASURED, TUNED
from counted.modernbert import PARTS, Workload
from counted.steps import Counted
from mlbert.cli.bench import CONFIGS
from mlbert.config.bert_config import BertConfig

H200 = GPUS["h200"]
LAYERS = 4  # two global ones, the first and the last
SHAPE = BertConfig.from_json(CONFIGS / "modernbert_base.json").with_options(
    f"num_hidden_layers={LAYERS} vocab_size_multiple=64"
)
# 16 sequences: memory for masked tokens is a multiple of 16.
WORKLOAD = Workload(SHAPE, 1024, 16 * 1024, "bf16")


@functools.cache
def counted_step() -> Counted:
    return modernbert.count(WORKLOAD, H200)


def launches_of(name: str) -> list:
    return [operation for operation in counted_step().step if operation.name == name]


@pytest.mark.parametrize("window", [None, 0, 5, 64])
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (32, 64), (64, 16)])
def test_tiles_cover_every_pair_in_the_window(window: int | None, rows: int, columns: int) -> None:
    """A tile is computed if it has a visible pair, and some of those before the window's start."""
    length = 200
    seen = {
        (query // rows, key // columns)
        for query in range(length)
        for key in range(length)
        if window is None or abs(query - key) <= window
    }
    least = len(seen) * rows * columns
    found = attention_tiles.computed_pairs([length], rows, columns, window)
    most = least + (-(-length // rows)) * rows * columns
    assert least <= found <= most
    assert attention_tiles.computed_pairs([length, length], rows, columns, window) == 2 * found


def test_calibration_is_the_measured_batch() -> None:
    """records/2026-11-26_gpu-check_h200: 93 sequences with 24,431 tokens."""
    lengths = attention_tiles.measured_lengths()
    assert (len(lengths), int(lengths.sum())) == (93, 24_431)


def test_flops_are_those_that_the_losses_require() -> None:
    """The products are counted from launches; attention's FLOPs come from the formula."""
    counted = sum(operation.flops for operation in counted_step().step)
    sequences = WORKLOAD.tokens // WORKLOAD.length
    window = sum(
        min(WORKLOAD.length, query + 65) - max(0, query - 64) for query in range(WORKLOAD.length)
    )
    pairs = sequences * (2 * WORKLOAD.length**2 + 2 * window)
    attention = 3 * 4 * pairs * SHAPE.hidden_size
    assert counted + attention == WORKLOAD.flops


def test_every_launch_has_its_part() -> None:
    counted = counted_step()
    parts = [modernbert.part_of(operation, SHAPE) for operation in counted.step]
    assert set(parts) == set(PARTS) - {modernbert.CASTS}
    moved = dict.fromkeys(PARTS, 0)
    for part, operation in zip(parts, counted.step, strict=True):
        moved[part] += operation.moved
    assert moved[modernbert.OTHER] < 0.01 * sum(moved.values())
    assert parts.count(modernbert.ROTATIONS) >= 2 * LAYERS
    for kernel in attention_tiles.KERNELS:
        windows = [operation.arguments["WINDOW"] for operation in launches_of(kernel)]
        assert windows.count(None) == windows.count(64) == LAYERS // 2


def test_window_makes_attention_cheaper_and_length_dearer() -> None:
    for operation in launches_of(attention_tiles.FORWARD):
        short = attention_tiles.seconds_of_launch(operation, 1024, "bf16", False)
        long = attention_tiles.seconds_of_launch(operation, 4096, "bf16", False)
        scaled = attention_tiles.seconds_of_launch(operation, 1024, "bf16", True)
        is_local = operation.arguments["WINDOW"] is not None
        assert long / short == pytest.approx(1.0 if is_local else 4.0, rel=0.1)
        assert scaled < short


def test_prediction_is_a_range() -> None:
    counted = counted_step()
    low = modernbert.seconds_of_parts(counted, WORKLOAD, H200, MEASURED)
    high = modernbert.seconds_of_parts(counted, WORKLOAD, H200, TUNED)
    for part, seconds in low.items():
        assert high[part] <= seconds
    speed = modernbert.speed(WORKLOAD, low)
    assert 0 < speed.matrix_share < 1
    assert speed.joules_per_token == pytest.approx(modernbert.WATTS / speed.tokens_per_second)

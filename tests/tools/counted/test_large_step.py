"""Count the launches and bytes of a full BERT-large step, with limits;
host synchronization is an error.

The step has 96 sequences in 48 full packs, 24,576 tokens. To recompute a number, run the step on
PyTorch's meta tensors and, for each operation and kernel launch, add the bytes of every tensor that
it reads or writes, once each. Views and allocations count nothing; an in-place operation both reads
and writes.
"""

import functools

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from counted import parts
from counted.gpus import GPUS, MEASURED, TUNED
from counted.model import seconds_of_parts
from counted.steps import Counted, count
from mlaudit.planner import cost as estimate
from mlaudit.planner.timing import BENCHMARK
from mlbert.cli.bench import CONFIGS
from mlbert.config.bert_config import BertConfig

LARGE = BertConfig.from_json(CONFIGS / "large.json")
H200 = GPUS["h200"]
PACKS = 48
TOKENS = 24_576
# The graph mode of each precision, so that both modes and both precisions are covered.
MODES = {"bf16": "segmented", "fp8": "full_iteration"}
# Counting a step is slow.
each_precision = pytest.mark.parametrize(
    "precision", ["bf16", pytest.param("fp8", marks=pytest.mark.slow)]
)

# Launches and 10^9 bytes per step. Lower these limits when a step needs less;
# never raise them without a reason.
LIMITS = {  # in bfloat16, and in FP8
    parts.PRODUCTS: ((288, 69.42), (288, 39.5)),
    parts.ATTENTION: ((73, 23.2), (73, 23.2)),
    # Also GELU's derivative in the heads, with its sum;
    # in FP8, casts after LayerNorm are separate launches.
    parts.NORMS: ((168, 22.6), (411, 65.1)),
    parts.FILLS: ((8, 0.12), (10, 0.12)),
    parts.ADDS: ((2, 0.18), (2, 0.18)),
    parts.WEIGHTS: ((2, 0.0001), (128, 2.02)),
    # The embeddings' gradients are added where they are kept. Whole tables are counted, though only
    # rows with tokens move.
    parts.HEADS: ((45, 3.3), (47, 3.16)),
    # Writes the bfloat16 copy of the weights; two launches for its last two elements.
    parts.UPDATE: ((7, 15.48), (7, 14.81)),
    # In bfloat16 segmented graphs, which do not capture the clearing, so that all gradients are
    # cleared and vectors' sums with an epilogue are added.
    parts.CLEARING: ((101, 1.35), (4, 0.003)),
    parts.COMMUNICATION: ((0, 0.0), (0, 0.0)),
    parts.OTHER: ((7, 0.001), (21, 0.001)),
}
# Of a step in one graph, in bfloat16 and in FP8: 953 and 1,266 before gradients were written where
# they are kept.
LAUNCHES = {"bf16": 630, "fp8": 1000}
# Peak in 10^9 bytes, from start-up to the second evaluation.
# Attention's dropout masks, as bits, take 0.7.
MEMORY = {"bf16": 26.6, "fp8": 24.1}


@functools.cache
def large_step(precision: str) -> Counted:
    return count(LARGE, PACKS, precision, H200, MODES[precision])


@each_precision
def test_step_stays_within_its_launch_and_byte_limits(precision: str) -> None:
    counted = large_step(precision)
    assert counted.static_shape.tokens == TOKENS
    sums = parts.totals(counted.step, counted, LARGE)
    found = {part: (total.launches, total.moved / 1e9) for part, total in sums.items()}
    limits = {part: both[precision == "fp8"] for part, both in LIMITS.items()}
    over = {
        part: value
        for part, value in found.items()
        if value[0] > limits[part][0] or value[1] > limits[part][1]
    }
    assert not over, f"above the limits; all parts: {found}"
    assert counted.memory.peak / 1e9 <= MEMORY[precision]


@each_precision
def test_step_in_one_graph_has_few_launches_for_its_bookkeeping(precision: str) -> None:
    """Only gradients that no product overwrites are cleared, vectors' sums are not added to cleared
    gradients, and sequences are ordered once.
    """
    counted = count(LARGE, PACKS, precision, H200, "full_iteration")
    assert len(counted.step) <= LAUNCHES[precision]
    sums = parts.totals(counted.step, counted, LARGE)
    assert sums[parts.CLEARING].moved < 3e6
    names = [operation.name for operation in counted.step]
    assert names.count("attention_order_kernel") == 1
    (begin,) = [operation for operation in counted.step if operation.name == "begin_kernel"]
    assert begin.arguments["num_sums"] <= 6 * 1024, "it adds 1,024 at a time"


@each_precision
def test_product_flops_match_the_model(precision: str) -> None:
    """Three products per linear layer; after the last attention,
    only for the rows that the heads read.
    """
    counted = large_step(precision)
    rows = counted.static_shape.masked + counted.static_shape.sequences
    hidden = LARGE.hidden_size
    inner = LARGE.intermediate_size
    layers = LARGE.num_hidden_layers
    after_attention = 2 * (hidden**2 + 2 * hidden * inner)
    expected = 3 * (
        layers * TOKENS * 2 * 3 * hidden**2 + ((layers - 1) * TOKENS + rows) * after_attention
    )
    sums = parts.totals(counted.step, counted, LARGE)
    assert sums[parts.PRODUCTS].flops == expected
    heads = 2 * counted.static_shape.masked * (hidden**2 + hidden * LARGE.padded_vocab_size)
    heads += 2 * counted.static_shape.sequences * (hidden**2 + 2 * hidden)
    assert sums[parts.HEADS].flops == 3 * heads
    in_fp8 = sum(operation.flops for operation in counted.step if parts.is_fp8(operation))
    assert in_fp8 == (expected if precision == "fp8" else 0)


@each_precision
def test_evaluation_is_a_forward_pass(precision: str) -> None:
    counted = large_step(precision)
    sums, step = (parts.totals(o, counted, LARGE) for o in (counted.evaluation, counted.step))
    flops, of_step = (sum(total.flops for total in side.values()) for side in (sums, step))
    assert flops == pytest.approx(of_step / 3, rel=0.01)
    assert sums[parts.UPDATE].launches == sums[parts.CLEARING].launches == 0


@each_precision
def test_planner_memory_matches_the_counted_memory(precision: str) -> None:
    counted = large_step(precision)
    sequences = TOKENS * BENCHMARK.sequences / BENCHMARK.tokens
    planned = estimate.of(LARGE, "h200", sequences, 1, fp8=precision == "fp8")
    assert planned.total - planned.context == pytest.approx(counted.memory.peak / 1e9, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MEASURED, TUNED])
def test_modeled_times_respect_bandwidth_and_flops(kind: str) -> None:
    counted = large_step("fp8")
    seconds = seconds_of_parts(counted, LARGE, H200, kind)
    sums = parts.totals(counted.step, counted, LARGE)
    assert H200.rates is not None
    rates = H200.rates[kind]
    for part, total in sums.items():
        if part != parts.ATTENTION:
            bandwidth = rates.elementwise if part == parts.NORMS else rates.bandwidth
            assert seconds[part] >= 0.999 * total.moved / bandwidth
    assert seconds[parts.PRODUCTS] >= sums[parts.PRODUCTS].flops / rates.fp8_flops


@pytest.mark.parametrize(
    ("precision", "measured"), [("bf16", 909), pytest.param("fp8", 1217, marks=pytest.mark.slow)]
)
def test_measured_rates_give_the_measured_speed(precision: str, measured: int) -> None:
    """Sequences per second of 93 a step: records/2026-11-26_gpu-check_h200, third call."""
    seconds = seconds_of_parts(large_step(precision), LARGE, H200, MEASURED)
    sequences = TOKENS * BENCHMARK.sequences / BENCHMARK.tokens
    assert sequences / sum(seconds.values()) == pytest.approx(measured, rel=0.1)

"""The TensorFlow 2 training step: match with PyTorch, loops, clipping, precisions,
and any number of replicas.
"""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import HostBatch
from trainer import Trainer

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed (the tf extra)")

from tf2_bert.rows import Rows
from unit.tensorflow2.cases import NO_DROPOUT, packed_case
from unit.tensorflow2.processes import assert_success, start
from unit.tensorflow2.strategies_program import (
    RATES,
    Trained,
    dummy_rows,
    settings,
    small_shape,
    train_all,
)

WEIGHTS = "bert.encoder.layer.0.output.dense.weight"
# Each of these groups has its own process; see strategies_program.
# Four replicas take a minute to trace.
FOUR = {"four": {"devices": 4}}
ONE = {
    "one": {"devices": 1},
    "one_device": {
        "devices": 1,
        "config": {"distribution_strategy": "one_device", "run_eagerly": 1},
    },
    "off": {"devices": 1, "config": {"distribution_strategy": "off", "run_eagerly": 1}},
}
TWO = {
    "two": {"devices": 2},
    "two, accumulated and compiled": {
        "devices": 2,
        "config": {"gradient_accumulation_steps": 2, "enable_xla": 1},
    },
    "two, summed first": {
        "devices": 2,
        "config": {"explicit_allreduce": 1, "allreduce_bytes_per_pack": 4096},
    },
}
ALIKE = {
    f"{count}, alike": {"devices": count, "alike": 0.1, "config": {"run_eagerly": 1}}
    for count in (1, 2)
}


def trained(dropout: float = 0.0, shape: BertConfig | None = None, **changes: object) -> Trained:
    config = settings(**{"distribution_strategy": "off", "run_eagerly": 1} | changes)
    return Trained(config, tf.distribute.get_strategy(), shape or small_shape(dropout))


def run(one: Trained, steps: list[Rows], rates: list[float] = RATES, first: int = 0) -> Any:
    return one.step.run_loop(one.iterator(steps), rates[: len(steps)], first)


def some_steps(count: int = 2, rows: int = 8) -> list[Rows]:
    return [dummy_rows(rows, seed) for seed in range(count)]


def test_ten_steps_match_pytorch() -> None:
    """LAMB, with the full gradient clipped, on the same weights and batch;
    more layers take longer to trace.
    """
    ragged, packs, rows = packed_case()
    shape = dataclasses.replace(NO_DROPOUT, num_hidden_layers=1)
    batch = HostBatch.of(ragged, np.array(packs), np.arange(len(packs)), rows.input_ids.shape[1])
    reference = Trainer(shape, batch, torch.device("cpu"), torch.float32, seed=3, lamb="plain")
    rates = np.linspace(0.01, 0.001, 10).tolist()
    tested = trained(max_grad_norm=1.0, gradient_clipping="after", run_eagerly=0, shape=shape)
    weights = dict(reference.model.named_parameters())
    tested.model.assign({name: weight.detach().numpy() for name, weight in weights.items()})
    found = run(tested, [rows] * 10, rates)
    for number, lr in enumerate(rates):
        result = reference.steps([batch], number, lr)
        assert found.losses[number] == pytest.approx(float(result.loss_sum), abs=1e-5)
        assert found.grad_norms[number] == pytest.approx(float(result.grad_norm), rel=1e-4)
    values = tested.model.values()
    for name, weight in weights.items():
        expected = weight.detach().numpy()[: len(values[name])]
        np.testing.assert_allclose(values[name], expected, rtol=0, atol=1e-5, err_msg=name)
    assert found.losses[-1] < found.losses[0] - 0.1


def test_accumulation_changes_nothing_without_clipping() -> None:
    whole = trained()
    parts = trained(gradient_accumulation_steps=2)
    losses = [run(one, some_steps()).losses for one in (whole, parts)]
    np.testing.assert_allclose(*losses, atol=1e-5)
    for one, other in zip(
        whole.model.values().values(), parts.model.values().values(), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_sequences_of_a_step_are_counted_exactly() -> None:
    """In float32, 31 / 7 * 7 is less than 31."""
    rows = dummy_rows(21, 0)
    weights = np.zeros_like(rows.next_sentence_weights)
    weights[:, 0] = 1
    weights[:10, 1] = 1
    one = trained(gradient_accumulation_steps=7, train_batch_size=21)
    assert run(one, [rows._replace(next_sentence_weights=weights)]).sequences.tolist() == [31]


def test_work_of_a_step_is_that_of_its_sequences() -> None:
    ragged, _, rows = packed_case()
    found = run(trained(shape=NO_DROPOUT), [rows])
    lengths = np.asarray(ragged.lengths, np.int64)
    counted = np.concatenate([found.tokens, found.squared_lengths, found.masked, found.sequences])
    assert counted.tolist() == [
        lengths.sum(),
        (lengths**2).sum(),
        len(ragged.masked_positions),
        len(ragged),
    ]


@pytest.mark.slow
def test_loop_is_traced_once_for_any_number_of_steps() -> None:
    one, other = (trained(0.1, run_eagerly=0) for _ in range(2))
    traces = []
    step = one.step._replica_step
    one.step._replica_step = lambda *arguments: (traces.append(1), step(*arguments))[1]
    steps = some_steps(4)
    one.step.warm_up(dummy_rows(8, 9))
    losses = run(one, steps).losses
    iterator = other.iterator(steps)
    parts = [other.step.run_loop(iterator, RATES[a:b], a).losses for a, b in ((0, 3), (3, 4))]
    parts_of_one = one.step.run_loop(one.iterator(steps), RATES[:3], 4)
    assert (len(parts_of_one.losses), len(traces)) == (3, 1)
    np.testing.assert_array_equal(losses, np.concatenate(parts))


def test_dropout_depends_only_on_step_and_micro_batch() -> None:
    rows = dummy_rows(4, 0)
    twice = Rows(*(np.concatenate([x, x]) for x in rows))
    run_of = lambda first, seed=5: run(trained(0.1, seed=seed), [rows], first=first).losses[0]  # noqa: E731
    assert run_of(0) == run_of(0)
    assert abs(run_of(0) - run_of(1)) > 1e-4
    one = trained(0.1, gradient_accumulation_steps=2)
    assert abs(run(one, [twice]).losses[0] - run_of(0)) > 1e-5


def gradient_of_update(**changes: object) -> tuple[np.ndarray, np.ndarray]:
    """Return a weight's change by AdamW with a huge epsilon,
    which is proportional to the gradient, and the norm.
    """
    one = trained(optimizer="adamw", opt_epsilon=1e6, weight_decay_rate=0, **changes)
    before = one.model.values()[WEIGHTS]
    norms = run(one, [dummy_rows(8, 0)], [1e6]).grad_norms
    return before - one.model.values()[WEIGHTS], norms


@pytest.mark.parametrize("how", [{"gradient_clipping": "after"}, {"explicit_allreduce": 1}])
def test_clipping_after_scales_the_full_gradient(how: dict[str, object]) -> None:
    exact, (norm,) = gradient_of_update(gradient_accumulation_steps=2)
    clipped, (same_norm,) = gradient_of_update(
        gradient_accumulation_steps=2, max_grad_norm=0.01, **how
    )
    assert same_norm == pytest.approx(norm, rel=1e-6)
    np.testing.assert_allclose(clipped, exact * (0.01 / norm), rtol=1e-2, atol=1e-8)


def test_clipping_before_scales_each_micro_batch() -> None:
    """Both parts are clipped to the same norm, so the sum is not a scaled full gradient."""
    exact, (norm,) = gradient_of_update(gradient_accumulation_steps=2)
    clipped, (clipped_norm,) = gradient_of_update(gradient_accumulation_steps=2, max_grad_norm=0.01)
    assert clipped_norm <= 0.01 + 1e-7
    ratio = np.abs(clipped).sum() / np.abs(exact).sum()
    assert np.abs(clipped - ratio * exact).max() > 0.01 * np.abs(clipped).max()
    loose, (loose_norm,) = gradient_of_update(gradient_accumulation_steps=2, max_grad_norm=1e3)
    assert loose_norm == norm
    np.testing.assert_array_equal(loose, exact)


@pytest.mark.slow
@pytest.mark.parametrize("explicit", [0, 1])
def test_float16_skips_an_overflow_and_halves_the_scale(explicit: int) -> None:
    changes = {"precision": "fp16", "loss_scale": 2.0**24, "explicit_allreduce": explicit}
    one = trained(**changes)
    before = one.model.values()
    result = run(one, some_steps(1))
    assert (result.skipped, float(one.loss_scale.value)) == (1, 2.0**23)
    assert int(one.optimizer.iterations) == 0
    np.testing.assert_equal(one.model.values(), before)
    for _ in range(20):
        result = run(one, some_steps(1))
    assert (result.skipped, np.isfinite(result.losses).all()) == (0, True)
    assert int(one.optimizer.iterations) > 0


@pytest.mark.parametrize(("precision", "explicit"), [("fp16", 0), ("fp16", 1), ("bf16", 0)])
def test_16_bit_training_is_close_to_float32(precision: str, explicit: int) -> None:
    one = trained(precision=precision, loss_scale=1024, explicit_allreduce=explicit)
    exact = trained()
    steps = some_steps()
    found = run(one, steps)
    expected = run(exact, steps)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=5e-3)
    np.testing.assert_allclose(found.grad_norms, expected.grad_norms, rtol=5e-2)
    assert found.skipped == 0


def test_step_without_predictions_or_sequences_is_skipped() -> None:
    rows = dummy_rows(8, 0)
    empty = rows._replace(next_sentence_weights=np.zeros_like(rows.next_sentence_weights))
    one = trained()
    before = one.variables()
    assert run(one, [empty]).skipped == 1
    np.testing.assert_equal(one.variables(), before)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"precision": "fp16"}, marks=pytest.mark.slow),
        {"gradient_accumulation_steps": 2},
    ],
)
def test_warm_up_changes_nothing(changes: dict[str, object]) -> None:
    one = trained(0.1, run_eagerly=0, **changes)
    before = one.variables()
    one.step.warm_up(dummy_rows(8, 9))
    np.testing.assert_equal(one.variables(), before)


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("replicas")
    groups = {1: ONE, 2: TWO | ALIKE, 4: FOUR}
    assert_success(
        *(start(train_all, folder, *group, folder / f"{group[0]}.json") for group in groups.items())
    )
    return {
        name: case
        for path in folder.glob("*.json")
        for name, case in json.loads(path.read_text()).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in (*ONE, *TWO, *FOUR) if name != "one"])
def test_training_is_independent_of_the_split(
    mirrored: dict[str, dict[str, Any]], name: str
) -> None:
    """Replicas and micro-batches have different numbers of predictions and sequences."""
    found = mirrored[name]
    expected = mirrored["one"]
    assert found["replicas"] == (ONE | TWO | FOUR)[name]["devices"]
    for key in ("losses", "norms", "weights"):
        np.testing.assert_allclose(found[key], expected[key], rtol=0, atol=1e-5, err_msg=key)
    np.testing.assert_allclose(found["sums"], expected["sums"], rtol=1e-5)
    assert len(set(found["losses"])) == len(RATES)


@pytest.mark.slow
def test_replicas_have_different_dropout(mirrored: dict[str, dict[str, Any]]) -> None:
    """With the same rows, one replica's loss differs from the mean of two."""
    ((one,), (two,)) = (mirrored[name]["losses"] for name in ALIKE)
    assert abs(one - two) > 1e-4

"""The benchmarks in tools/ write complete and consistent records,
of models that are the same on both sides.
"""

import importlib.util
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import bench_modernbert
import bench_prepare as prepare
import bench_text
from bench_mosaic import PaddedMosaicBert, expert_side, padded_side
from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import HostBatch
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.formats.wordpiece import load_vocabulary
from mlbert.data.loading.synthetic import sequences
from mlbert.models.bert import BertForMaskedLM
from mlbert.models.objectives import MLM_DIVISOR_EPS, MaskedLM
from mlbert.models.weights.huggingface import padded_inputs
from programs import run_checked
from same_weights import initialized
from text_sets import random_texts, write_texts

ASSETS = Path(__file__).resolve().parents[1] / "assets" / "instances"
OPTIONS = (  # MosaicBERT's, without dropout
    "position_embedding_type=alibi gated_mlp=true hidden_act=gelu_erf "
    "hidden_dropout_prob=0 attention_probs_dropout_prob=0"
)
# Three heads, because the slopes of ALiBi are special if the number of heads is not a power of two.
SHAPE = BertConfig(90, 24, 2, 3, 40, max_position_embeddings=32).with_options(OPTIONS)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc on PATH: nothing to compare with")
def test_preparation_record_is_consistent_printed_and_written(monkeypatch, tmp_path, capsys):
    record = prepare.run(ASSETS / "text.txt", ASSETS / "vocab.txt", rounds=2, num_lengths=20_000)
    generator = record["generator"]
    assert generator["instances"] == 217
    assert len(generator["pair_ratios"]) == generator["rounds"] == 2
    assert min(generator["pair_ratios"]) <= generator["ratio"] <= max(generator["pair_ratios"])
    for side in (generator["native"], generator["plain"]):
        assert side["instances_per_second"] * side["median_seconds"] == pytest.approx(217)
        assert side["median_seconds"] >= side["median_tokenizer_seconds"] > 0
    imported = record["tfrecord_to_hdf5"]
    loader = record["loader"]
    packing = record["packing"]
    assert imported["bytes"] > 217 * 1024
    assert loader["set_sequences"] >= prepare.LOADED_SEQUENCES
    assert min(loader["sequences"]) >= prepare.PACKS_PER_STEP * prepare.LOADER_STEPS
    assert packing["lengths"] == 20_000
    assert 20_000 / 3 <= packing["packs"] < 20_000
    assert 0.9 < packing["filled"] <= 1
    monkeypatch.setattr(prepare, "run", lambda *_: record)
    assert prepare.main(["--json", str(tmp_path / "record.json")]) == 0
    assert "ratio (median of 2 pairs)" in capsys.readouterr().out
    assert json.loads((tmp_path / "record.json").read_text()) == json.loads(json.dumps(record))


def test_default_input_is_generated(tmp_path):
    part, vocab = prepare.default_input(tmp_path, num_bytes=30_000, vocab_size=400)
    assert 30_000 < part.stat().st_size < 200_000
    assert "\n\n" in part.read_text()
    assert len(load_vocabulary(vocab)) <= 400


def test_input_without_a_vocabulary_is_an_error(capsys):
    assert prepare.main(["--input", str(ASSETS / "text.txt")]) == 2
    assert "only one of them is given" in capsys.readouterr().err


def test_text_record_is_consistent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_text, "SEQUENCES", 8)
    monkeypatch.setattr(bench_text, "STEPS", 10)
    folder = write_texts(tmp_path / "set", random_texts(60, most_words=200))
    record = json.loads(json.dumps(bench_text.run(folder, rounds=2)))
    assert record["texts"] == 60
    assert record["tokenizing"]["compiled MB/s"]["least"] > 0
    assert 0 < record["share of tokens that truncation drops"] < 1
    for mode in ("truncate", "split"):
        for start in ("first", "tokenized"):
            speeds = record[f"{mode}, {start}"]
            assert speeds["sequences/s"]["least"] > 0
            assert (
                speeds["longest wait ms"]["median"]
                >= speeds["99th percentile of waits ms"]["least"]
            )
    assert record["truncate, evaluation set"]["sequences"] == 60


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="TensorFlow is not installed (the tf extra)",
)
def test_every_side_of_tensorflow_is_timed(tree_root: Path, tmp_path: Path) -> None:
    words = [
        "--config",
        "demo",
        "--sequences",
        "6",
        "--pairs",
        "1",
        "--json",
        str(tmp_path / "record.json"),
    ]
    run_checked(sys.executable, tree_root / "tools/bench_tensorflow2.py", *words)
    record = json.loads((tmp_path / "record.json").read_text())
    names = list(record["seconds"])
    sides = [
        f"tensorflow {layout}{compiler}"
        for layout in ("padded", "packed")
        for compiler in ("", " + xla")
    ]
    assert [name.partition(":")[0] for name in names] == [*sides, "pytorch, OPS=plain"]
    assert names[0].endswith("6 rows")
    assert int(names[2].split()[-2]) < 6
    assert record["times_as_fast_as_padded"][names[0]] == [1.0]


def test_modeled_step_is_marked_and_adds_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    import model_step

    record = tmp_path / "record.json"
    model_step.main(["--config", "demo", "--gpu", "h200", "--packs", "8", "--json", str(record)])
    printed = capsys.readouterr().out
    assert "modeled with measured rates" in printed
    assert "sequences/s" in printed
    rows = json.loads(record.read_text())
    assert [(row["precision"], row["sequences"]) for row in rows] == [("bf16", 16), ("fp8", 16)]
    for row in rows:
        assert f"{sum(row['milliseconds'].values()):.1f}" in printed
        assert row["milliseconds"].keys() == row["launches"].keys() == row["gigabytes"].keys()


@pytest.fixture
def batch() -> HostBatch:
    rows = sequences(np.array([32, 5, 17, 9]), SHAPE.vocab_size, np.random.default_rng(1))
    return HostBatch.of(rows, np.ones(4, np.int64), np.arange(4), 32)


@pytest.mark.parametrize("length", [32, 48])
def test_padded_model_has_the_same_loss_and_gradients(batch: HostBatch, length: int) -> None:
    model = initialized(BertForMaskedLM(SHAPE), 3)
    padded = PaddedMosaicBert(model)
    flat = batch.to("cpu")
    divisor = torch.tensor(batch.num_masked + MLM_DIVISOR_EPS)
    loss = MaskedLM("step").loss(model, flat, None, [divisor])
    padded_loss = padded(padded_inputs(flat, length)) / batch.num_masked
    torch.testing.assert_close(loss, padded_loss, rtol=1e-6, atol=1e-6)
    loss.backward()
    padded_loss.backward()
    for name, parameter in model.named_parameters():
        expected = padded.weights[name.replace(".", "/")].grad
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6, msg=name)


def test_expert_step_has_the_same_loss(batch: HostBatch) -> None:
    model = initialized(BertForMaskedLM(SHAPE), 3)
    losses = [
        side.step()
        for side in (padded_side(batch, model, 48), *(expert_side(batch, model, n) for n in (1, 3)))
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_modernbert_sides_train_the_same_model(tmp_path):
    """Their losses of the first step agree, or the benchmark stops."""
    pytest.importorskip("transformers", reason="the other sides are transformers'")
    (tmp_path / "part").write_text((ASSETS / "text.txt").read_text())
    tokenizer = load_tokenizer(ASSETS / "vocab.txt")
    pieces = bench_modernbert.pieces_of(tmp_path, tokenizer, 40, 200, False, 1)
    assert max(map(len, pieces)) <= 40
    assert 200 <= sum(map(len, pieces)) < 240
    batch = bench_modernbert.masked_batch(pieces, tokenizer, 1)
    shape = replace(
        bench_modernbert.base_shape(4),
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=48,
        vocab_size=len(tokenizer.entries),
        local_attention=16,
    )
    record = bench_modernbert.run(shape, batch, 3, torch.float32, 1)
    assert record["lengths"] == [len(piece) for piece in pieces]
    assert {*record["ratios"]} == {"plain", "expert"}
    assert all(len(ratio["pair_ratios"]) == 3 for ratio in record["ratios"].values())

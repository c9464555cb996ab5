"""The step benchmark: both sides have the same losses, and the record is complete;
the network test's verdict; the loader benchmark, and sides that are not installed.
"""

import dataclasses
import json
import time

import pytest
import torch

from capturable import TensorLamb, select_capturable
from mlbert.cli import bench
from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.host import machine
from mlbert.models.bert import BertForPreTraining
from mlbert.models.objectives import PreTraining
from mlbert.optim.flat import FlatParameters
from mlbert.programs.bench import expert, loader, sides, step_time
from mlbert.programs.bench.network import NetworkReport
from recorded_graph import RecordedGraph
from same_weights import initialized
from user_errors import user_error

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SHAPE = BertConfig(1200, 32, 2, 2, 64, max_position_embeddings=64, **NO_DROPOUT)


def test_all_sides_compute_the_same_losses():
    """Of the second step too, after each optimizer's first update,
    for Hugging Face's model in both uses.
    """
    batch = sides.make_batch(SHAPE, 5, None, seed=1)
    model = initialized(BertForPreTraining(SHAPE, torch.float32))
    theirs = sides.their_side(SHAPE, batch, torch.float32, model)
    choices = [expert.Choice(1), expert.Choice(2, "eager"), expert.Choice(5)]
    experts = [expert.expert_side(SHAPE, batch, torch.float32, model, choice) for choice in choices]
    losses = [theirs.step(), theirs.step()]
    for side in experts:
        assert [side.step(), side.step()] == pytest.approx(losses, abs=1e-5)
    assert sides.our_side(batch, model, seed=1).step() == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.parametrize("slow", [torch.float32, torch.bfloat16])
def test_auto_precision_is_the_faster_one(monkeypatch, slow, restore_selection):
    monkeypatch.setattr(step_time, "has_bf16_products", lambda: True)
    plain_side = step_time.our_side

    def delayed_side(batch, model, seed):
        side = plain_side(batch, model, seed)
        seconds = 0.3 if model.dtype == slow else 0.0
        return sides.Side(side.name, lambda: (time.sleep(seconds), side.step())[1])

    monkeypatch.setattr(step_time, "our_side", delayed_side)
    other = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}[slow]
    assert step_time.faster_dtype(SHAPE, 2, None, 1) == other


def test_a_graph_trains_like_the_step_without_one(monkeypatch, restore_selection):
    """As on a GPU, with recorded operations in place of CUDA's graph."""
    select_capturable()
    graph = RecordedGraph()
    monkeypatch.setattr(sides, "CudaCapture", lambda device: graph)
    monkeypatch.setattr(BertForPreTraining, "capture_obstacle", lambda *_: None)
    batch = sides.make_batch(SHAPE, 5, None, seed=1)
    losses = []
    monkeypatch.setattr(sides, "tuned", None)
    for as_graph in (False, True):
        model = initialized(BertForPreTraining(SHAPE, torch.float32))
        optimizer = TensorLamb(FlatParameters(model.ordered_parameters()))
        objective = PreTraining("step")
        side = sides.trained_side(batch, model, 1, optimizer, objective, as_graph, is_tuned=False)
        losses.append([side.step() for _ in range(3)])
    assert losses[0] == losses[1]
    assert losses[0][0] > losses[0][2]
    assert graph.num_operations > 20


def test_groups_have_every_sequence_and_masked_token_once():
    batch = sides.make_batch(SHAPE, 5, None, seed=1)
    groups = expert.make_groups(batch, 2, torch.device("cpu"))
    assert [len(group.encoder["input_ids"]) for group in groups] == [3, 2]
    real = [
        group.encoder.get("attention_mask", group.encoder["input_ids"] * 0 + 1).sum(1)
        for group in groups
    ]
    assert torch.cat(real).tolist() == sorted(batch.cu_seqlens.diff().tolist())
    assert sum(len(group.labels) for group in groups) == batch.num_masked
    widths = [group.encoder["input_ids"].shape[1] for group in groups]
    assert widths == [int(lengths.max()) for lengths in real]


@pytest.mark.parametrize("peers", [(), ("huggingface", "expert")])
def test_record_is_complete_and_consistent(monkeypatch, peers):
    monkeypatch.setattr(expert, "_COMPILED", (False,))  # the compiler takes a minute
    record = step_time.run(SHAPE, 4, 5, torch.float32, peers, None, 1, torch.device("cpu"))
    assert json.loads(json.dumps(record)) == record
    assert tuple(record["ratios"]) == peers
    for ratio in record["ratios"].values():
        assert len(ratio["pair_ratios"]) == 5
        assert sorted(ratio["pair_ratios"])[2] == ratio["ratio"] > 0
    if "expert" in peers:
        choice = record["expert"]["choice"]
        trials = record["expert"]["trials"]
        assert min(trials, key=lambda trial: trial["seconds"]).items() >= choice.items()
        assert {trial["groups"] for trial in trials} == {1, 2, 4}
    ours = record["sides"]["mlbert"]
    assert ours["sequences_per_second"] * ours["median_seconds"] == pytest.approx(
        record["sequences"]
    )
    assert 0 < ours["share_of_gemm_peak"] < 1
    assert record["padded_tokens"] >= record["tokens"]


def test_a_folder_without_data_is_refused(tmp_path):
    with user_error("data.missing", tmp_path):
        sides.make_batch(SHAPE, 4, tmp_path, seed=1)


def test_a_small_made_up_batch_has_the_published_mean_length():
    shape = dataclasses.replace(SHAPE, max_position_embeddings=512)
    batch = sides.make_batch(shape, 8, None, seed=1)
    assert batch.num_samples == 8
    assert batch.num_tokens / 8 == pytest.approx(255, rel=0.05)


def test_a_slow_node_is_named():
    report = NetworkReport({2**20: 5.0}, {"n1": 10.0, "n2": 9.0, "n3": 3.0, "n4": 10.5})
    assert report.slow == ["n3"]
    assert report.lines()[0] == "all-reduce of 1 MiB: 5.00 GB/s"
    assert report.lines()[-1] == "slowest node: n3 (3.00 GB/s); slow: n3"
    alike = NetworkReport({}, {"n1": 10.0, "n2": 9.0})
    assert alike.slow == []
    assert alike.lines()[-1] == "slowest node: n2 (9.00 GB/s); no node is far below the others"
    assert NetworkReport({2**20: 5.0}, {}).lines() == ["all-reduce of 1 MiB: 5.00 GB/s"], (
        "one node has no links"
    )


def test_a_busy_machine_is_named(monkeypatch, run_mlbert, tmp_path):
    monkeypatch.setattr(machine, "busy_load", lambda: 9.5)
    words = ["bench", "step", "--config", "tiny", "--packs", 1, "--json", tmp_path / "record.json"]
    status, _, err = run_mlbert(*words)
    assert status == 0
    assert "warning: Other programs keep this machine busy (load 9.5 on " in err


def test_the_loader_benchmark_reads_the_same_text_on_all_sides(run_mlbert, tmp_path, own_cache):
    """With MosaicML Streaming absent, which is named with the command that installs it."""
    folder = loader.write_documents(tmp_path / "set", 30_522, seed=1, num_tokens=120_000)
    vocabulary = load_tokenizer("bert-base-uncased").file
    words = ["bench", "loader", "--rounds", "2", "--seconds", "0.01", "--length", "128"]
    words += ["--data", str(folder), "--tokenizer", str(vocabulary), "--json", "-"]
    status, out, _ = run_mlbert(*words)
    assert status == 0
    record = json.loads(out)
    assert set(record["sides"]) | set(record["skipped"]) == {
        "mlbert",
        "pytorch",
        "mosaicml-streaming",
    }
    for reason in record["skipped"].values():
        assert "pip install" in reason
    for name, ratio in record["ratios"].items():
        ours = record["sides"]["mlbert"]["tokens_per_second"]
        theirs = record["sides"][name]["tokens_per_second"]
        pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
        assert ratio["least"] == min(pairs)
        assert ratio["most"] == max(pairs)
    for side in record["sides"].values():
        assert 0 < side["share_of_slots"] <= 1
    assert record["sides"]["mlbert"]["share_of_slots"] > 0.9


def test_the_loader_benchmark_needs_a_batch_of_texts(tmp_path, own_cache, assert_fails):
    few = loader.write_documents(tmp_path / "few", 30_522, seed=1, num_tokens=20_000)
    words = ["bench", "loader", "--data", few, "--tokenizer", "bert-base-uncased"]
    said = assert_fails(words, "data.too-small", few)
    assert "and a batch takes 96" in said


def test_the_loader_benchmark_needs_the_vocabulary_of_a_set(tmp_path):
    with user_error("config.missing", "--tokenizer"):
        bench.loader(data=tmp_path)

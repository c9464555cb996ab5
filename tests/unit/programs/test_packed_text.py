"""main.py with packed sequences and a batch-size warm-up in tokens,
as ModernBERT's YAML has them.
"""

import json
import math
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mlbert.config.batch_growth import BatchGrowth, TokenGrowth
from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.mds import MdsReader, MdsWriter
from mlbert.data.formats.tokenizer import load_tokenizer
from mosaic_texts import BASE, make_texts
from mosaic_yaml import pretraining_yaml
from mosaic_yaml.commands.main_yaml import app
from mosaic_yaml.durations import Durations
from mosaic_yaml.nested_yaml import Leaves, read_nested
from training_settings import read_metrics, read_summary
from user_errors import user_error

ROW = 24  # tokens, of BASE
GROWTH_TOKENS = 1600
GROWTH = (
    "train_loader.sequence_packing=true",
    "train_loader.batch_size_warmup_min_size=2",
    f"train_loader.batch_size_warmup_tokens={GROWTH_TOKENS}tok",
    "count_padding_tokens=false",
    "global_train_batch_size=6",
    "device_train_microbatch_size=2",
)
LENGTHS = ("max_duration=24ba", "eval_interval=8ba", "save_interval=8ba")
WORDS = (*BASE, "save_folder=out", "model.name=mosaic_bert", "console_log_interval=1ba", *GROWTH)
MODERN = Path("benchmarks/modernbert/yamls/modernbert/modernbert-base-pretrain.yaml")
SIZES = (
    "data_local=data",
    "train_loader.dataset.split=train_small",
    "eval_loader.dataset.split=val",
    "tokenizer_name=vocab.txt",
    "max_seq_len=24",
    "model.model_config.vocab_size=15",
    "model.model_config.num_hidden_layers=4",
    "model.model_config.hidden_size=32",
    "model.model_config.intermediate_size=48",
    "model.model_config.num_attention_heads=2",
    "model.model_config.sliding_window=8",
    "global_train_batch_size=12",
    "device_train_microbatch_size=2",
    "train_loader.batch_size_warmup_tokens=2000tok",
    "scheduler.t_warmup=1000tok",
    "max_duration=6_000tok",
    "eval_interval=20ba",
    "global_eval_batch_size=16",
    "precision=fp32",
)


@pytest.fixture
def work(tmp_path: Path, tree_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_texts(tmp_path, tree_root)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pretrain(*words: str) -> None:
    """Run main.py in this process."""
    assert app(["main.yaml", *WORDS, *words], standalone_mode=False) == 0


def test_a_packed_run_fills_its_rows_and_resumes_in_the_warm_up(work: Path) -> None:
    pretrain(*LENGTHS)
    out = work / "out"
    assert f"BATCHSIZE_WARMUP_TOKENS={GROWTH_TOKENS} " in (out / "run_0/settings.txt").read_text()
    growth = TokenGrowth(2, 6, GROWTH_TOKENS)
    summary = read_summary(out)
    assert summary["steps"] == 24
    assert summary["tokens"] > GROWTH_TOKENS, "the batch is full at the end"
    samples = [0, *(line["samples"] for line in read_metrics(out))]
    tokens_of_sample = summary["tokens"] / summary["samples"]
    for before, after in pairwise(samples):
        rows = growth.size(round(before * tokens_of_sample))
        assert 0.5 < (after - before) * tokens_of_sample / (rows * ROW) < 1.3
    assert growth.size(round(samples[-2] * tokens_of_sample)) == 6
    points = [json.loads(line) for line in (out / "run_0/metrics.jsonl").read_text().splitlines()]
    assert [point["step"] for point in points if point["kind"] == "evaluation"] == [8, 16, 24]
    whole = load_file(out / "run_0/weights/model.safetensors")
    losses = {line["step"]: line["loss"] for line in read_metrics(out)}
    # The same run again from its first checkpoint, in the middle of the warm-up.
    for step in (16, 24):
        shutil.rmtree(out / f"run_0/checkpoints/step_{step:08}")
    (out / "run_0/summary.json").unlink()
    pretrain(*LENGTHS)
    again = load_file(out / "run_0/weights/model.safetensors")
    assert all(bool((again[name] == whole[name]).all()) for name in whole)
    assert {line["step"]: line["loss"] for line in read_metrics(out)} == losses


def test_the_rate_follows_steps_if_the_training_does(work: Path) -> None:
    """Also while the batch grows with the tokens, as in Composer."""
    pretrain("max_duration=10ba", "scheduler.t_warmup=4ba", "scheduler.name=constant_with_warmup")
    rates = [line["learning_rate"] for line in read_metrics(work / "out")]
    peak = rates[-1]
    assert rates == pytest.approx([peak * min(step / 4, 1) for step in (0, *range(9))])


def test_what_is_refused(work: Path) -> None:
    with user_error("config.conflict", "scheduler.t_warmup=20sp"):
        pretrain("max_duration=24ba", "scheduler.t_warmup=20sp")
    with user_error("config.conflict", "max_duration=500sp"):
        pretrain("max_duration=500sp")
    with user_error("config.value", "argument train_loader.batch_size_warmup_tokens="):
        pretrain("max_duration=24ba", "train_loader.batch_size_warmup_tokens=20ba")
    with user_error("config.unsupported", "argument train_loader.sequence_packing="):
        pretrain("max_duration=1ep")
    with user_error("config.unsupported", "max_duration=100tok"):
        pretrain("max_duration=100tok", "train_loader.sequence_packing=false")
    with user_error("config.conflict", "scheduler.t_warmup=2ba"):
        pretrain("max_duration=1000tok", "scheduler.t_warmup=2ba")
    with user_error("config.range", "argument train_loader.batch_size_warmup_min_size="):
        pretrain("max_duration=4ba", "train_loader.batch_size_warmup_min_size=7")
    assert not (work / "out").exists()


@pytest.mark.parametrize("unit", ["tok", "sp", "dur"])
def test_durations_while_the_batch_grows(unit: str) -> None:
    """Of a batch of 2 to 10 rows on each of 3 ranks, of 50 tokens a row."""
    growth = BatchGrowth(2, 10, 40)
    known = Durations(30, 50, lambda: 1, max_steps=100, growth=growth, is_packed=True)
    total = growth.before(100)
    for step in range(1, 101):
        rows = growth.before(step)
        text = {"tok": f"{rows * 3 * 50}tok", "sp": f"{rows * 3}sp", "dur": f"{rows / total}dur"}
        assert known.steps("t_warmup", text[unit], least=0) == step
        last = growth.before(100) - growth.before(100 - step)
        text = {"tok": f"{last * 3 * 50}tok", "sp": f"{last * 3}sp", "dur": f"{last / total}dur"}
        assert known.last_steps("t_decay", text[unit]) == step
    assert known.steps("t_warmup", "7ba") == known.last_steps("t_decay", "7ba") == 7
    assert known.interval("eval_interval", "60sp") == 2
    assert known.share("1dur") == 1
    assert known.share("0.5dur") is None


def test_the_published_yaml_of_modernbert_runs_with_other_paths_and_sizes(
    work: Path, tree_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SIZES, "console_log_interval=1ba"]
    assert app([str(tree_root / MODERN), *words], standalone_mode=False) == 0
    out = work / "checkpoints/modernbert-base-pretrain"
    summary = read_summary(out)
    assert 6_000 <= summary["tokens"] < 6_000 + 12 * 24, "without padding"
    rates = [point["learning_rate"] for point in read_metrics(out)]
    rising = [rate for rate in rates if rate < 8e-4]
    assert rates[:2] == [0.0, 0.0]
    assert len(rising) > 4, "a warm-up of four full batches takes more steps while the batch grows"
    assert set(rates[len(rising) :]) == {8e-4}
    notes = next(line for line in capsys.readouterr().out.splitlines() if "not read" in line)
    assert "callbacks.packing_efficiency" in notes
    assert "train_loader.num_workers" in notes
    assert "model.model_config.compile_model" in notes
    assert "model.model_config.sliding_window" not in notes
    config = json.loads((out / "run_0/huggingface/config.json").read_text())
    assert config["model_type"] == "modernbert"
    assert config["local_attention"] == 8
    assert config["num_hidden_layers"] == 4
    settings = (out / "run_0/settings.txt").read_text().splitlines()
    shown = {line.partition("=")[0]: line.partition("=")[2].split("  ")[0] for line in settings}
    assert shown["OPTIMIZER"] == "decoupled_stableadamw"
    assert shown["SCHEDULE"] == "constant"
    assert shown["DECAY_ALL"] == "no"
    with user_error("run.exists", Path("checkpoints/modernbert-base-pretrain/run_0")):
        app([str(tree_root / MODERN), *words], standalone_mode=False)  # it has its tokens


@pytest.mark.slow
def test_a_set_of_token_ids_trains_as_its_text(work: Path, tree_root: Path) -> None:
    """In the form of the research repository, by its YAML: the same weights."""
    tokenizer = load_tokenizer(work / "vocab.txt")
    for split in ("train_small", "val"):
        texts = [sample["text"] for sample in MdsReader(work / "data" / split)]
        columns = {"input_ids": "ndarray:uint16", "len": "int", "id": "str"}
        with MdsWriter(work / "ids" / split, columns, size_limit=3000) as writer:
            for number, text in enumerate(texts):
                ids = np.array([tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id])
                writer.write({"input_ids": ids, "len": len(ids), "id": str(number)})
    # No text is longer, and no order depends on the shards.
    options = ["max_seq_len=64", "train_loader.dataset.shuffle=false", "max_duration=8_000tok"]
    weights = []
    for folder in ("data", "ids"):
        words = [*SIZES, *options, f"data_local={folder}", f"save_folder={folder}_out"]
        assert app([str(tree_root / MODERN), *words], standalone_mode=False) == 0
        out = work / f"{folder}_out"
        assert 0 < read_summary(out)["loader_share"] < 1
        weights.append(load_file(out / "run_0/weights/model.safetensors"))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_three_phases_of_modernbert_start_from_one_another(
    work: Path, tree_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With their optimizer state; the second one has another rotary base and longer rows."""
    growth = "train_loader.batch_size_warmup_tokens"
    words = [word for word in SIZES if not word.startswith((growth, "scheduler.t_warmup"))]
    assert app([str(tree_root / MODERN), *SIZES], standalone_mode=False) == 0
    updates = read_summary(work / "checkpoints/modernbert-base-pretrain")["steps"]
    for name in ("context-extension", "decay"):
        path = tree_root / MODERN.with_name(f"modernbert-base-{name}.yaml")
        long = ["max_seq_len=48", "global_train_batch_size=6", "max_duration=2_000tok"]
        capsys.readouterr()
        assert app([str(path), *words, *long], standalone_mode=False) == 0
        assert f"after {updates} updates" in capsys.readouterr().out
        out = work / f"checkpoints/modernbert-base-{name}"
        config = json.loads((out / "run_0/huggingface/config.json").read_text())
        assert config["rope_parameters"]["full_attention"]["rope_theta"] == 160_000.0
        assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 10_000.0
        updates += read_summary(out)["steps"]
    rates = [point["learning_rate"] for point in read_metrics(out)]
    assert rates == sorted(rates, reverse=True)
    with user_error("config.conflict", None, wording=False):  # it names a line of the file
        app([str(path), *words, *long, "run_name=other", "reset_time=false"], standalone_mode=False)


def test_the_published_sizes_of_modernbert(tree_root: Path) -> None:
    """Steps of the published batch."""
    path = tree_root / MODERN
    words = ["tokenizer_name=bert-base-uncased"]
    leaves = Leaves(path, read_nested(path, words, pretraining_yaml.KNOWN))
    layer = pretraining_yaml.to_settings(leaves, 8, True, lambda *given: 0)
    assert layer["batchsize_warmup_start"][0] == 96
    step_tokens = 4608 * 1024
    assert layer["step_tokens"][0] == step_tokens
    for name, tokens in (
        ("max_steps", 1_719e9),
        ("warmup_steps", 3e9),
        ("batchsize_warmup_steps", 50e9),
    ):
        assert layer[name][0] == math.ceil(tokens / step_tokens)
    shape = BertConfig.from_json(Path(str(layer["bert_config_file"][0])))
    shape = shape.with_options(str(layer["model_options"][0]))
    assert shape.num_parameters == pytest.approx(149.7e6, rel=5e-3)
    assert [shape.is_local(number) for number in range(4)] == [False, True, True, False]
    assert (shape.local_window, shape.rope_theta, shape.local_rope_theta) == (64, 1e4, 1e4)


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("model.model_config.normalization=rmsnorm", "model.unsupported"),
        ("model.model_config.attention_layer=base", "model.unsupported"),
        ("model.model_config.slidingwindow=128", "config.unknown-name"),
        ("model.model_config=null", "config.missing"),
    ],
)
def test_a_model_that_is_not_here_is_one_line(
    work: Path, tree_root: Path, word: str, code: str
) -> None:
    with user_error(code, None):
        app([str(tree_root / MODERN), *SIZES, word], standalone_mode=False)
    assert not (work / "checkpoints").exists()

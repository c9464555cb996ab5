"""Fine-tuning from a YAML to files: what is learnt, predicted and refused."""

import csv
import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from audit import errors
from labeled_texts import sentences, write_csv
from mlbert.config.bert_config import BertConfig
from mlbert.data.prepare.vocabulary_training import count_words, train_vocabulary
from mlbert.models.bert import BertForMaskedLM
from mlbert.models.weights.export import write_weights
from programs import RunMlbert, run_checked
from training_settings import read_metrics

pytestmark = pytest.mark.slow

SHAPE = BertConfig(300, 32, 1, 2, 64, max_position_embeddings=64)
YAML = """
run_name: test
max_seq_len: 32
tokenizer_name: {folder}/vocab.txt
data: {{train: "{folder}/train.csv", eval: "{folder}/dev.csv"}}
model: {{name: mosaic_bert, pretrained_model_name: "{folder}/shape.json"}}
train_loader: {{drop_last: false}}
scheduler: {{name: linear_decay_with_warmup, t_warmup: 0.06dur, alpha_f: 0.02}}
optimizer:
  name: decoupled_adamw
  lr: 5.0e-3
  betas: [0.9, 0.98]
  eps: 1.0e-6
  weight_decay: 1.0e-6
max_duration: 3ep
eval_interval: 1ep
global_train_batch_size: 16
device_train_microbatch_size: 16
device_eval_batch_size: 32
precision: fp32
seed: 5
console_log_interval: 1ba
save_folder: "{folder}/out"
save_num_checkpoints_to_keep: 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("task")
    texts = []
    for seed, (name, count) in enumerate((("train", 250), ("dev", 61))):
        rows = sentences(count, ("warm", "cold"), seed)
        write_csv(
            made / f"{name}.csv",
            ["id", "text", "label"],
            *([n, *row] for n, row in enumerate(rows)),
        )
        texts += [text for text, _ in rows]
    (made / "vocab.txt").write_text("\n".join(train_vocabulary(count_words(texts), 300)) + "\n")
    (made / "shape.json").write_text(SHAPE.to_json())
    (made / "task.yaml").write_text(YAML.format(folder=made))
    return made


@pytest.fixture
def run(folder: Path, run_mlbert: RunMlbert) -> RunMlbert:
    return lambda out, *words: run_mlbert(
        "finetune", folder / "task.yaml", f"save_folder={folder / out}", *words
    )


def predictions(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", ["hf_bert", "mosaic_bert"])
def test_a_task_is_learnt_and_predicted(folder, tmp_path, run, run_mlbert, name) -> None:
    plain = (
        "model.model_config={position_embedding_type: absolute, gated_mlp: "
        "false, num_hidden_layers: 1}"
    )
    status, output, _ = run(name, f"model.name={name}", plain)
    assert (status, "matthews correlation" in output) == (0, True)
    steps = read_metrics(folder / name, "step")
    evaluations = read_metrics(folder / name, "evaluation")
    assert len(steps) == 3 * 16
    assert [line["samples"] for line in evaluations] == [250, 500, 750]
    assert evaluations[-1]["eval_accuracy"] > 0.9
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"]
    made = folder / name / "run_0"
    rows = predictions(made / "predictions.csv")
    assert [row["text"] for row in rows] == [row["text"] for row in predictions(folder / "dev.csv")]
    right = sum(row["label"] == row["prediction"] for row in rows)
    assert right / len(rows) == pytest.approx(evaluations[-1]["eval_accuracy"])
    assert (made / "confusion_matrix.png").stat().st_size > 1000
    assert errors(folder / name / "result_0.txt") <= {"accuracies"}, (
        "only one of 1, which masked tokens never reach"
    )

    out = tmp_path / "again.jsonl"
    probabilities = [float(row["probability"]) for row in rows]
    status, _, err = run_mlbert(
        "finetune", "--predict", folder / "dev.csv", "--model", made, "--out", out
    )
    assert (status, f"predicting: {len(rows)} rows" in err) == (0, True)
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["prediction"] for line in again] == [row["prediction"] for row in rows]
    assert [line["probability"] for line in again] == pytest.approx(probabilities, abs=1e-4)


def test_two_ranks_match_one_rank(folder: Path, tree_root: Path, run: RunMlbert) -> None:
    words = [
        "max_duration=10ba",
        "eval_interval=5ba",
        "device_train_microbatch_size=4",
        "device_eval_batch_size=5",
    ]
    assert run("one", *words)[0] == 0
    script = tree_root / "benchmarks/mosaic_bert/sequence_classification.py"
    environ = {
        **os.environ,
        "PYTHONPATH": str(tree_root / "benchmarks/bert/implementations/pytorch"),
    }
    run_checked(
        sys.executable,
        "-m",
        "mlbert",
        "launch",
        "local",
        "-n",
        "2",
        script,
        folder / "task.yaml",
        f"save_folder={folder}/two",
        *words,
        env=environ,
    )
    runs = []
    for name in ("one", "two"):
        lines = [
            json.loads(line)
            for line in (folder / name / "run_0/metrics.jsonl").read_text().splitlines()
        ]
        runs.append(
            [
                {k: v for k, v in line.items() if "second" not in k and "slowest" not in k}
                for line in lines
            ]
        )
    assert len(runs[0]) == len(runs[1]) == 10 + 2
    for one, two in zip(*runs, strict=True):
        assert one.pop("kind") == two.pop("kind")
        assert one == pytest.approx(two, rel=1e-3)
    rows = [predictions(folder / name / "run_0/predictions.csv") for name in ("one", "two")]
    assert [row["prediction"] for row in rows[0]] == [row["prediction"] for row in rows[1]]


def test_the_encoder_comes_from_pre_training_and_the_rest_is_drawn(folder, tmp_path, run) -> None:
    vocab_size = len((folder / "vocab.txt").read_text().splitlines())
    shape = dataclasses.replace(
        SHAPE,
        position_embedding_type="alibi",
        gated_mlp=True,
        hidden_size=16,
        vocab_size=vocab_size,
    )
    model = BertForMaskedLM(shape)
    model.initialize(1)
    write_weights(model, tmp_path, {}, folder / "vocab.txt")
    status, output, _ = run(
        "started",
        f"load_path={tmp_path}",
        "max_duration=1ba",
        "optimizer.lr=1.0e-9",
        "optimizer.weight_decay=0.0",
        "tokenizer_name=bert-base-uncased",
    )
    assert status == 0
    assert "has no pooler: it is initialized randomly" in " ".join(output.split())
    found = load_file(folder / "started/run_0/weights/model.safetensors")
    given = load_file(tmp_path / "weights/model.safetensors")
    trunk = {name for name in given if name.startswith(("bert.embeddings", "bert.encoder"))}
    new = {
        f"{name}.{part}"
        for name in ("bert.pooler.dense", "classifier")
        for part in ("weight", "bias")
    }
    assert found.keys() - given.keys() == new
    assert all(torch.allclose(found[name], given[name], atol=1e-6) for name in trunk)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["data.eval=null"], "data.eval is not set"),
        (["data.train=null"], "does not name the data"),
        (["train_loader.dropp_last=true"], "train_loader.dropp_last is an unknown name"),
        (["eval_loader.drop_last=true"], "every row is evaluated"),
        (
            ["global_train_batch_size=300", "train_loader.drop_last=true"],
            "250 rows are fewer than a step's 300",
        ),
        (["load_path=nowhere"], "nowhere: does not exist"),
        (
            ["tokenizer_name=bert-base-uncased", "model.model_config={vocab_size: 300}"],
            "30522 entries, but the model has vocab_size 300",
        ),
        (
            ["tokenizer_name=FOLDER/vocab.txt", "model.model_config={vocab_size: 30522}"],
            "entries, but the model has vocab_size 30522",
        ),
        (
            ["max_seq_len=100", "model.model_config={position_embedding_type: absolute}"],
            "max_seq_len=100",
        ),
    ],
)
def test_mistakes_are_one_line(folder: Path, run: RunMlbert, words: list[str], reason: str) -> None:
    status, _, err = run("refused", *(word.replace("FOLDER", str(folder)) for word in words))
    assert (status, err.count("\n"), reason in err) == (2, 1, True), err
    assert not (folder / "refused/run_0/weights").exists()

"""Fine-tuning on one and on two ranks gives the same losses, metrics and predictions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import run_program
from mlbert.config.bert_config import BertConfig
from mlbert.data.prepare.pipeline import count_words, train_vocabulary

SHAPE = BertConfig(200, 16, 1, 2, 32, max_position_embeddings=32)
YAML = """
max_seq_len: 32
tokenizer_name: FOLDER/vocab.txt
data: {train: FOLDER/train.csv, eval: FOLDER/train.csv}
model: {name: mosaic_bert, pretrained_model_name: FOLDER/shape.json}
train_loader: {drop_last: false}
scheduler: {t_warmup: 1ba}
optimizer: {lr: 1.0e-2}
max_duration: 2ep
eval_interval: 1ep
global_train_batch_size: 8
device_train_microbatch_size: 4
device_eval_batch_size: 5
precision: fp32
seed: 5
console_log_interval: 1ba
save_num_checkpoints_to_keep: 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two ranks")
    animals = ["a small cat", "an old dog", "the red fox", "my grey horse", "some young bird"]
    rows = [f"{animal} number {n} sleeps,{n % 3}" for n, animal in enumerate(animals * 6)]
    (folder / "train.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    words = count_words(rows * 9)
    (folder / "vocab.txt").write_text("\n".join(train_vocabulary(words, 200)) + "\n")
    (folder / "shape.json").write_text(SHAPE.to_json())
    (folder / "task.yaml").write_text(YAML.replace("FOLDER", json.dumps(str(folder))[1:-1]))
    return folder


@pytest.mark.slow
def test_two_ranks_match_one_rank(folder: Path, tree_root: Path) -> None:
    script = tree_root / "benchmarks/mosaic_bert/sequence_classification.py"
    environ = {**os.environ, "PYTHONPATH": str(tree_root / "benchmarks/bert/implementations/pytorch")}
    found = []
    alone = run_program(script, [str(folder / "task.yaml"), f"save_folder={folder}/on1"], folder, environ)
    printed = alone.communicate(200)
    assert alone.returncode == 0, printed[-3000:]
    launch = [sys.executable, "-m", "mlbert", "launch", "local", "-n", "2"]
    words = [str(script), str(folder / "task.yaml"), f"save_folder={folder}/on2"]
    done = subprocess.run([*launch, *words], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for ranks in (1, 2):
        run = folder / f"on{ranks}/run_0"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        numbers = [{k: v for k, v in line.items() if "second" not in k and "slowest" not in k} for line in lines]
        found.append((numbers, (run / "predictions.csv").read_text().splitlines()))
    (one, rows), (two, other_rows) = found
    assert len(one) == len(two) == 2 * 4 + 2
    for a, b in zip(one, two, strict=True):
        assert a.pop("kind") == b.pop("kind")
        assert a == pytest.approx(b, rel=1e-3)
    assert [row.rsplit(",", 1)[0] for row in rows] == [row.rsplit(",", 1)[0] for row in other_rows]

"""The published commands of "Prepare your data" and "Test the Dataloader", run as they are written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlbert.store.tokenizer import load_tokenizer

TEXTS = [f"Sentence {number} of the river, the bridge and the kitchen." for number in range(400)]


@pytest.fixture
def run(tree_root: Path, tmp_path: Path):
    """Runs a program of benchmarks/mosaic_bert/common from a folder beside it, without a network."""

    def run(command: str) -> subprocess.CompletedProcess[str]:
        common = tree_root / "benchmarks" / "mosaic_bert" / "common"
        words = [word.replace("../common", str(common)) for word in command.split()]
        assert words[0] == "python"
        package = tree_root / "benchmarks" / "bert" / "implementations" / "pytorch"
        environment = {**os.environ, "PYTHONPATH": str(package), "HF_HUB_OFFLINE": "1"}
        words[0] = sys.executable
        return subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    return run


@pytest.fixture
def own_text(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


CONVERT = "python ../common/convert_dataset.py --dataset text --path texts.jsonl --out_root ./my-copy-c4"
LOOK = "python ../common/text_data.py --tokenizer bert-base-uncased"


def test_own_text_to_batches(run, own_text, tmp_path):
    made = run(f"{CONVERT} --splits train_small val")
    assert made.returncode == 0, made.stderr
    assert "truncation to 128 tokens drops 0.0% of the tokens" in made.stdout
    looked = run(f"{LOOK} --local_path ./my-copy-c4")
    assert looked.returncode == 0, looked.stderr
    assert looked.stdout.count("#### batch") == 5
    tokenizer = load_tokenizer("bert-base-uncased")
    sequences = re.findall(r"ids +(.*)\ntext +(.*)\nmasked +(.*)\n", looked.stdout)
    assert len(sequences) == 10
    for ids, text, masked in sequences:
        numbers = [int(number) for number in ids.split()]
        assert len(numbers) <= 32
        assert (numbers[0], numbers[-1]) == (tokenizer.cls_id, tokenizer.sep_id)
        assert tokenizer.decode(numbers) == text
        assert masked == "none" or re.fullmatch(r"\d+: \S+(, \d+: \S+)*", masked)
    # The README's next example streams to another folder.
    assert run(f"{LOOK} --local_path cache --remote_path ./my-copy-c4").stdout == looked.stdout
    assert sorted(path.name for path in (tmp_path / "cache" / "val").glob("*.mds")) == ["shard.00000.mds"]
    refused = run(f"{CONVERT} --splits val train")
    assert refused.returncode == 2
    reason = "my-copy-c4/val: is there already. Remove it, or choose another --out_root."
    assert refused.stderr == f"mlbert: error: {reason}\n"
    assert not (tmp_path / "my-copy-c4" / "train").exists()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "convert_dataset.py --dataset c4 --data_subset en --out_root ./my-copy-c4 --splits train_small val",
            "dataset c4: comes from the network, and the Hugging Face hub is switched off",
        ),
        ("convert_dataset.py --dataset text --out_root out", "--path: is missing"),
        ("convert_dataset.py --dataset python-text --path x --out_root out", "--path: does not go with"),
        ("convert_dataset.py --dataset python-text --data_subset en --out_root out", "--data_subset: does not go"),
        ("convert_dataset.py --dataset text --path none --out_root out", "none: there is no such file"),
        ("convert_dataset.py --dataset c4 --concat_tokens 128 --out_root out", "--concat_tokens: needs a tokenizer"),
        ("convert_dataset.py --dataset python-text --concat_tokens 0 --out_root out", "is no number of tokens"),
        ("convert_dataset.py --dataset python-text --no_wrap --out_root out", "do nothing alone"),
        ("convert_dataset.py --dataset text --path texts.jsonl --compression gz --out_root out", "'gz': is not known"),
        ("convert_dataset.py --dataset text --path texts.jsonl --tokenizer gpt2 --out_root out", "tokenizer 'gpt2'"),
        ("convert_dataset.py --dataset text --out_root out --split x", "unrecognized arguments"),
        ("text_data.py --local_path ./my-copy-c4", "my-copy-c4/val: there is no such folder"),
        ("text_data.py --local_path cache --remote_path ./my-copy-c4", "my-copy-c4/val: there is no such folder"),
        ("text_data.py --local_path out --max_seq_len 2", "--max_seq_len: 2 is too short"),
    ],
)
def test_mistakes_are_one_line(run, own_text, tmp_path, command, words):
    done = run(f"python ../common/{command}")
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("mlbert: error: ")
    assert list((tmp_path / "out").glob("*")) == []

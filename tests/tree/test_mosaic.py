"""The published commands of MosaicML's examples that prepare data and fine-tune, run as written."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlbert.data.formats.tokenizer import load_tokenizer
from programs import run_quietly, run_script
from text_sets import json_lines
from training_settings import read_metrics
from user_errors import assert_error_line

TEXTS = [f"Sentence {number} of the river, the bridge and the kitchen." for number in range(400)]
HOME = Path("benchmarks/mosaic_bert")
CONVERT = "common/convert_dataset.py"
LOAD = "common/text_data.py"
# Published options of CONVERT; the names of the splits follow.
COPY = "--dataset text --path texts.jsonl --out_root ./my-copy-c4 --splits"


def run_program(tree_root: Path, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a program of mosaic_bert/ with its arguments in a folder."""
    package = tree_root / "benchmarks/bert/implementations/pytorch"
    environ = {**os.environ, "PYTHONPATH": str(package), "HF_HUB_OFFLINE": "1"}
    program, *arguments = words
    return run_quietly(
        sys.executable, tree_root / HOME / program, *arguments, cwd=folder, env=environ
    )


@pytest.fixture
def custom_corpus(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text(json_lines(TEXTS))
    return path


@pytest.mark.slow
def test_custom_corpus_is_converted_and_read_back_in_batches(tree_root, custom_corpus, tmp_path):
    def run(program: str, flags: str) -> subprocess.CompletedProcess[str]:
        return run_program(tree_root, tmp_path, program, *flags.split())

    converted = run(CONVERT, f"{COPY} train_small val")
    assert converted.returncode == 0, converted.stderr
    assert "truncation to 128 tokens drops 0.0% of the tokens" in converted.stdout
    loaded = run(LOAD, "--tokenizer bert-base-uncased --local_path ./my-copy-c4")
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.count("#### batch") == 5
    tokenizer = load_tokenizer("bert-base-uncased")
    sequences = re.findall(r"ids +(.*)\ntext +(.*)\nmasked +(.*)\n", loaded.stdout)
    assert len(sequences) == 10
    for ids, text, masked in sequences:
        numbers = [int(number) for number in ids.split()]
        assert len(numbers) <= 32
        assert (numbers[0], numbers[-1]) == (tokenizer.cls_id, tokenizer.sep_id)
        assert tokenizer.decode(numbers) == text
        assert masked == "none" or re.fullmatch(r"\d+: \S+(, \d+: \S+)*", masked)
    # The README's next example streams to another folder.
    streamed = run(
        LOAD, "--tokenizer bert-base-uncased --local_path cache --remote_path ./my-copy-c4"
    )
    assert streamed.stdout == loaded.stdout
    assert sorted(path.name for path in (tmp_path / "cache" / "val").glob("*.mds")) == [
        "shard.00000.mds"
    ]
    rejected = run(CONVERT, f"{COPY} val train")
    assert rejected.returncode == 2
    assert_error_line(rejected.stderr, "file.exists", "my-copy-c4/val")
    assert not (tmp_path / "my-copy-c4" / "train").exists()


def test_invalid_flags_are_one_line_errors(tree_root, custom_corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for program, flags, code, subject in (
        (
            CONVERT,
            "--dataset c4 --data_subset en --splits train_small val",
            "network.unreachable",
            "dataset c4",
        ),
        (CONVERT, "--dataset text", "config.missing", "--path"),
        (CONVERT, "--dataset python-text --path x", "config.conflict", "--path"),
        (CONVERT, "--dataset python-text --data_subset en", "config.conflict", "--data_subset"),
        (CONVERT, "--dataset text --path none", "file.missing", "none"),
        (CONVERT, "--dataset c4 --concat_tokens 128", "config.missing", "--concat_tokens"),
        (CONVERT, "--dataset python-text --concat_tokens 0", "config.range", "--concat_tokens"),
        (CONVERT, "--dataset python-text --no_wrap", "config.conflict", "--eos_text and --no_wrap"),
        (
            CONVERT,
            "--dataset text --path texts.jsonl --compression gz",
            "config.choice",
            "compression 'gz'",
        ),
        (
            CONVERT,
            "--dataset text --path texts.jsonl --tokenizer gpt2",
            "network.unreachable",
            "tokenizer 'gpt2'",
        ),
        (LOAD, "--local_path ./my-copy-c4", "file.missing", "my-copy-c4/val"),
        (LOAD, "--local_path cache --remote_path ./my-copy-c4", "file.missing", "my-copy-c4/val"),
        (LOAD, "--local_path out --max_seq_len 2", "config.range", "--max_seq_len"),
    ):
        out = "--out_root out " if program == CONVERT else ""
        assert run_script(tree_root / HOME / program, *(out + flags).split()) == 2
        assert_error_line(capsys.readouterr().err, code, subject)
        assert list((tmp_path / "out").glob("*")) == []


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the working folder of the commands; the first command creates the task's files in
    it.
    """
    return tmp_path_factory.mktemp("mosaic bert")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf_bert", "mosaic_bert"])
def test_sequence_classification(tree_root: Path, workdir: Path, name: str) -> None:
    yaml = tree_root / HOME / "yamls/test/sequence_classification.yaml"
    done = run_program(
        tree_root,
        workdir,
        "sequence_classification.py",
        yaml,
        f"model.name={name}",
        f"save_folder={name}",
    )
    assert done.returncode == 0, done.stderr
    losses = [line["loss"] for line in read_metrics(workdir / name)]
    assert sum(losses[-3:]) < sum(losses[:3])
    accuracy = read_metrics(workdir / name, "evaluation")[-1]["eval_accuracy"]
    assert accuracy > 0.6, "half of the rows are entailed"
    assert f"{accuracy:.4f}" in done.stdout
    assert (workdir / name / "run_0/predictions.csv").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf_bert", "mosaic_bert"])
def test_glue(tree_root: Path, workdir: Path, name: str) -> None:
    yaml = tree_root / HOME / "yamls/test/glue.yaml"
    done = run_program(tree_root, workdir, "glue.py", yaml, f"model.name={name}")
    assert done.returncode == 0, done.stderr
    folder = workdir / f"local-finetune-checkpoints/test-glue-{name}"
    scores = json.loads((folder / "glue_scores.json").read_text())
    assert scores["glue"] == pytest.approx((scores["tasks"]["mnli"] + scores["tasks"]["rte"]) / 2)
    assert f"{scores['glue']:.2f}" in done.stdout
    assert scores["tasks"]["mnli"] > 45, "chance is a third"
    assert scores["tasks"]["rte"] > 60, "chance is a half"
    steps = read_metrics(folder / "task=mnli/seed=1111")
    assert steps[-1]["loss"] < 0.95 * steps[0]["loss"]

"""Export, guesses and evaluation of a run and of its checkpoint:
the weights are the run's, whatever names them.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from training_settings import train, train_arguments

TEXT = "this [MASK] is a sentence ."


@pytest.fixture(scope="module")
def trained(tmp_path_factory, prepared_data):
    """LOGDIR of a run whose last checkpoint is of its last step, and the words that made it."""
    folder = tmp_path_factory.mktemp("trained")
    entries = len((prepared_data / "vocab.txt").read_text().splitlines())
    data = {
        "synthetic_data": 0,
        "input_dir": prepared_data / "train",
        "eval_dir": prepared_data / "eval",
    }
    shape = {"vocab_size": entries, "max_position_embeddings": 32}
    options = {
        **data,
        "num_eval_examples": 64,
        "save_checkpoint_steps": 4,
        "max_steps": 9,
        "shape": shape,
    }
    train(folder, **options)
    return folder / "out", train_arguments(folder, **options)


def unfinished(trained, folder):
    """Copy the run as if it had been killed after its checkpoint."""
    return shutil.copytree(
        trained, folder, ignore=shutil.ignore_patterns("weights", "huggingface", "summary.json")
    )


def test_a_checkpoint_is_exported_and_starts_a_run(trained, tmp_path, run_mlbert):
    import transformers

    logdir, words = trained
    killed = unfinished(logdir, tmp_path / "killed")
    step = sorted((killed / "run_0/checkpoints").iterdir())[-1]
    assert run_mlbert("export", step, "--to", "huggingface", "--out", tmp_path / "hf")[0] == 0
    assert run_mlbert("export", killed, "--out", tmp_path / "newest")[0] == 0
    shape = json.loads((tmp_path / "hf/config.json").read_text())
    theirs = transformers.BertForPreTraining.from_pretrained(tmp_path / "hf")
    newest = transformers.BertForPreTraining.from_pretrained(tmp_path / "newest").state_dict()
    assert all(torch.equal(value, newest[name]) for name, value in theirs.state_dict().items())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (len(tokenizer), tokenizer.model_max_length) == (shape["vocab_size"], 32)
    starts = (step, killed, tmp_path / "hf")
    guesses = [run_mlbert("fill-mask", path, TEXT) for path in starts]
    assert guesses[0] == guesses[1] == guesses[2]
    assert len(guesses[0][1].splitlines()) == 5
    found = [run_mlbert(*words, "--init_checkpoint", path, "--evaluate-only")[1] for path in starts]
    assert len({re.search(r"initial .*, 64 samples", out)[0] for out in found}) == 1


def test_a_finished_run_is_exported_as_it_is(trained, tmp_path, run_mlbert, monkeypatch):
    logdir, _ = trained
    monkeypatch.chdir(tmp_path)
    before = sorted(logdir.iterdir())
    assert run_mlbert("export", logdir / "run_0")[0] == 0
    assert sorted(logdir.iterdir()) == before, "nothing is written next to the source"
    Path("run_0-huggingface").rename("hf")
    same = (logdir / "run_0/huggingface/model.safetensors").read_bytes()
    assert (tmp_path / "hf/model.safetensors").read_bytes() == same
    assert run_mlbert("export", logdir, "--out", tmp_path / "again")[0] == 0
    assert (tmp_path / "again/model.safetensors").read_bytes() == same
    guesses = [
        run_mlbert("fill-mask", path, TEXT) for path in (logdir, logdir / "run_0", tmp_path / "hf")
    ]
    assert guesses[0] == guesses[1] == guesses[2]
    several = run_mlbert("fill-mask", logdir, TEXT, TEXT)[1].splitlines()
    assert several[:2] == several[2:]
    assert several[0] == TEXT
    quoted = [f'"{line.split()[1]}"' for line in guesses[0][1].splitlines()]
    assert several[1].split()[::2] == quoted


def test_mistakes_are_one_line_and_leave_nothing(trained, tmp_path, run_mlbert, assert_fails):
    logdir, _ = trained
    killed = unfinished(logdir, tmp_path / "killed")
    steps = sorted((killed / "run_0/checkpoints").iterdir())
    state = json.loads((steps[0] / "state.json").read_text())
    (steps[0] / "state.json").write_text(json.dumps(state | {"step": 5}))
    (steps[1] / "state.json").write_text("[]")
    (tmp_path / "empty").mkdir()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for words, code, subject in [
        (("export", steps[0], "--out", tmp_path / "x"), "checkpoint.damaged", steps[0]),
        (("export", steps[1], "--out", tmp_path / "x"), "checkpoint.damaged", steps[1]),
        (
            ("export", tmp_path / "empty", "--out", tmp_path / "x"),
            "file.unreadable",
            "empty/model.safetensors",
        ),
        (
            ("export", tmp_path / "nowhere", "--out", tmp_path / "x"),
            "file.missing",
            tmp_path / "nowhere",
        ),
        (("export", logdir, "--out", tmp_path / "killed"), "file.exists", tmp_path / "killed"),
        (("fill-mask", logdir, "no mask here"), "config.value", "text 'no mask here'"),
    ]:
        assert_fails(words, code, subject)
    status, _, err = run_mlbert("export", logdir, "--to", "gguf")
    assert (status, err.count("\n"), "huggingface" in err) == (2, 1, True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(("name", "warns"), [("BertModel", True), ("BertForMaskedLM", False)])
def test_a_head_with_random_values_is_named(tmp_path, run_mlbert, name, warns):
    import transformers

    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    getattr(transformers, name)(config).save_pretrained(tmp_path / "source")
    code, out, err = run_mlbert("export", tmp_path / "source", "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    assert ("have random values now" in out) == warns
    assert ("lacks cls.predictions" in out) == warns

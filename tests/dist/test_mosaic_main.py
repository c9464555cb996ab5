"""main.py on text sets: both models learn, runs resume on a different number of ranks,
errors are one line.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers

from audit import errors
from harness import run_program
from mlaudit.logs import read_log
from mlbert.data.formats.mds import MdsReader
from mlbert.data.loading.masked_text import count_sequences
from mlbert.host.errors import UserError
from mosaic_texts import BASE, make_texts
from mosaic_yaml.commands.main_yaml import app
from mosaic_yaml.nested_yaml import Leaves, read_nested
from mosaic_yaml.pretraining_yaml import KNOWN, to_settings
from training_settings import read_metrics

BATCH = ("global_train_batch_size=32", "device_train_microbatch_size=32")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, tree_root: Path) -> Path:
    folder = tmp_path_factory.mktemp("mosaic")
    make_texts(folder, tree_root)
    return folder


def run(tree_root: Path, work: Path, *words: str, ranks: int = 1) -> str:
    program = str(tree_root / "benchmarks/mosaic_bert/main.py")
    arguments = ["main.yaml", *BASE, *words]
    if ranks == 1:
        process = run_program(program, arguments, work, dict(os.environ))
        printed = process.communicate(280)
        assert process.returncode == 0, printed[-3000:]
        return printed
    command = [
        sys.executable,
        "-m",
        "mlbert",
        "launch",
        "local",
        "-n",
        str(ranks),
        program,
        *arguments,
    ]
    done = subprocess.run(
        command, cwd=work, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("model", ["hf_bert", "mosaic_bert"])
def test_each_model_learns_to_count(tree_root: Path, work: Path, model: str) -> None:
    """Based on the published smoke test. A masked number can be inferred from its neighbors."""
    words = [
        f"model.name={model}",
        f"run_name={model}",
        "max_duration=200ba",
        "eval_interval=100ba",
    ]
    words += ("model.model_config.max_position_embedding=512",)  # as a published file has it
    printed = run(tree_root, work, *words, *BATCH, "train_loader.dataset.mlm_probability_end=0.2")
    assert "success: MAX_STEPS 200 reached" in printed
    assert "model.model_config.max_position_embedding" in printed
    first, last = read_metrics(work / f"runs/{model}", "evaluation")
    assert last["eval_loss"] < first["eval_loss"] < 2.8  # a guess: ln 15 = 2.7
    assert last["eval_mlm_accuracy"] > 0.3  # a guess: 0.1
    weights = torch.load(work / f"runs/{model}/latest-rank0.pt", weights_only=True)["state"][
        "model"
    ]
    assert any("Wqkv" in name for name in weights) == (model == "mosaic_bert")
    folder = work / f"runs/{model}/run_0/huggingface"
    peer = transformers.AutoModelForMaskedLM.from_pretrained(
        folder, trust_remote_code=model == "mosaic_bert"
    )
    assert (
        type(peer).__name__
        == {"hf_bert": "BertForMaskedLM", "mosaic_bert": "MlbertForMaskedLM"}[model]
    )
    if model == "mosaic_bert":
        run(tree_root, work, f"model.name={model}", f"run_name={model}", "max_duration=1ba")
        assert (work / f"runs/{model}/run_1/summary.json").exists()


@pytest.mark.slow
def test_run_resumes_on_a_different_number_of_ranks(tree_root: Path, work: Path) -> None:
    """2 ranks save in the middle of an epoch; 1 rank resumes and ends like an uninterrupted run."""
    words = [
        "model.name=mosaic_bert",
        "max_duration=1.5ep",
        "eval_interval=5ba",
        "save_interval=8ba",
    ]
    run(tree_root, work, *words, "save_folder=whole", "run_name=whole")
    last = json.loads((work / "whole/run_0/summary.json").read_text())
    assert last["steps"] > 40
    resume = ["save_folder=parts/{run_name}", "run_name=parts", "autoresume=true"]
    run(tree_root, work, *words, *resume, "max_duration=24ba", ranks=2)
    (
        work / "parts/parts/run_0/summary.json"
    ).unlink()  # as if the job had been killed after its third checkpoint
    printed = run(tree_root, work, *words, *resume)
    assert "resumed at step 24" in printed or "resumed at step 16" in printed
    end = json.loads((work / "parts/parts/run_0/summary.json").read_text())
    assert (end["steps"], end["samples"]) == (last["steps"], last["samples"])


@pytest.mark.parametrize(
    ("save", "signum"),
    [
        pytest.param((), signal.SIGTERM, marks=pytest.mark.slow),
        (("save_folder=cut/saved", "save_interval=2ba"), signal.SIGINT),
    ],
)
def test_command_works_again_after_a_signal(
    tree_root: Path, work: Path, save: tuple[str, ...], signum: int
) -> None:
    """It starts again without checkpoints, and continues from the newest one."""
    words = ["run_name=cut", "model.name=mosaic_bert", "eval_interval=5ba", *save]
    base = work / ("cut/saved" if save else "runs/cut")
    trained = base / "run_0" / ("checkpoints/step_00000002" if save else "metrics.jsonl")
    arguments = ["main.yaml", *BASE, *words, "max_duration=100000ba"]
    process = run_program(
        tree_root / "benchmarks/mosaic_bert/main.py", arguments, work, dict(os.environ)
    )
    try:
        deadline = time.monotonic() + 120
        while not (trained.exists() and (trained.is_dir() or trained.stat().st_size)):
            assert process.returncode is None
            assert time.monotonic() < deadline, "no step"
            time.sleep(0.05)
        process.send_signal(signum)
        printed = process.communicate(60)
        assert process.returncode == 128 + signum, printed
    finally:
        process.kill()
    saved = max((int(path.name[-8:]) for path in base.glob("run_0/checkpoints/step_*")), default=0)
    printed = run(tree_root, work, *words, f"max_duration={saved + 4}ba")
    assert ("resumed at step" in printed) == bool(save)
    assert (base / "result_0.part1.txt").is_file()


@pytest.mark.slow
def test_one_and_two_ranks_train_on_the_same_batches(tree_root: Path, work: Path) -> None:
    losses = []
    for ranks in (1, 2):
        words = [
            "model.name=mosaic_bert",
            "max_duration=6ba",
            "eval_interval=6ba",
            "device_train_microbatch_size=4",
        ]
        run(tree_root, work, *words, f"save_folder=same{ranks}", ranks=ranks)
        steps, ends = (read_metrics(work / f"same{ranks}", kind) for kind in ("step", "evaluation"))
        losses.append([*(line["loss"] for line in steps), *(line["eval_loss"] for line in ends)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_streams_of_several_sets(tree_root: Path, work: Path) -> None:
    words = [
        "model.name=mosaic_bert",
        "run_name=mixed",
        "max_duration=0.5ep",
        "eval_interval=1ba",
        *BATCH,
    ]
    words.append("train_loader.dataset.long_texts=truncate")
    words.append(
        "train_loader.dataset.streams={a: {local: data, repeat: 0.5}, b: {local: data, split: val}}"
    )
    words.append(
        "eval_loader.dataset.streams={a: {local: data, split: val}, b: {local: data, split: "
        "val, choose: 7}}"
    )
    printed = run(tree_root, work, *words)
    train, held_out = (len(MdsReader(work / "data" / name)) for name in ("train_small", "val"))
    steps = (train // 2 + held_out) // 32
    assert f"MAX_STEPS {math.ceil(0.5 * steps)} reached" in printed
    assert read_log(work / "runs/mixed/result_0.txt").value("eval_samples") == held_out + 7
    assert errors(work / "runs/mixed/result_0.txt") == set()


def test_a_tokenizer_json_is_a_tokenizer(tree_root: Path, work: Path) -> None:
    """All that transformers 5 writes."""
    saved = transformers.BertTokenizer(vocab=str(work / "vocab.txt"))
    saved.save_pretrained(work / "saved")
    (work / "saved/vocab.txt").unlink(missing_ok=True)
    words = ["run_name=saved", "tokenizer_name=saved", "max_duration=2ba", "eval_interval=2ba"]
    run(tree_root, work, *words, *BATCH)
    exported = transformers.AutoTokenizer.from_pretrained(work / "runs/saved/run_0/huggingface")
    text = "one two three"
    assert exported(text)["input_ids"] == saved(text)["input_ids"]


def test_more_names_of_the_published_program(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    words = [
        "loggers.wandb.entity=team",
        "loggers.wandb.tags=[a, b]",
        "loggers.wandb.init_kwargs={notes: x}",
    ]
    words += [
        "global_eval_batch_size=63",
        "callbacks.runtime_estimator={}",
        "train_loader.dataset.cache_limit=1gb",
    ]
    path = Path("main.yaml")
    leaves = Leaves(
        path, read_nested(path, [*BASE, *words, "train_loader.dataset.eos_token_id=3"], KNOWN)
    )
    layer = to_settings(leaves, 2, False, count_sequences)
    assert layer["eval_batch_size"] == (32, "argument global_eval_batch_size=")
    assert layer["wandb_project"][0] == "uncategorized"
    assert layer["cache_limit"][0] == pytest.approx(1.073741824), "GB"
    assert json.loads(str(layer["wandb_options"][0])) == {
        "entity": "team",
        "tags": ["a", "b"],
        "notes": "x",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["model.name=roberta"],
            "model.name 'roberta' is unknown. Use a valid one. Choices: hf_bert, mosaic_bert, ",
        ),
        (["data_local=nowhere"], "nowhere/train_small"),
        (["max_duration=10 years"], "is not a duration"),
        (["tokenizer_name=prajjwal1/no-such"], "prajjwal1/no-such"),
        (["model.model_config.vocab_size=9"], "vocab_size 9"),
        (["model.model_config.heads=2"], "'heads' is unknown"),
        (["global_train_batch_size=100000"], "but one step takes"),
        (["global_train_batch_size=0.5"], "global_train_batch_size 0.5"),
        (["precision=int3"], "precision 'int3' is unknown"),
        (["mlm_probability=1.5"], "must be below 1"),
        (["load_path=nowhere.pt"], "nowhere.pt"),
        (["max_seq_len=9000"], "positions"),
        (["callbacks.speed_moniter={}"], "Did you mean callbacks.speed_monitor?"),
        (["callbacks={speed_moniter: {}}"], "Did you mean callbacks.speed_monitor?"),
        (
            ["train_loader.dataset.streams={a: {local: x, proportion: 1}, b: {local: y}}"],
            "weights that cannot be combined",
        ),
        (
            ["train_loader.dataset.streams={a: {local: x, portion: 1}}"],
            "portion is an unknown name",
        ),
        (["loggers.wandb.init_kwargs=notes"], "init_kwargs is 'notes', not names with values"),
        (
            ["train_loader.dataset={shuffle_algo: py1e, shuffle_block_size: 9}"],
            "of py1e is always Streaming's default",
        ),
        (["max_seq_len=0"], "argument max_seq_len=: 0 is not valid"),
        (["model.use_pretrained=true"], "model.use_pretrained of prajjwal1/bert-tiny"),
        (["model.gradient_checkpointing=true"], "not supported"),
        (["train_subset_num_batches=3"], "not supported"),
        (
            ["eval_loader.dataset.tokenizer_name=bert-base-uncased"],
            "is not vocab.txt. Give the same tokenizer",
        ),
        (["train_loader.dataset.shuffle_algo=py9"], "Use a valid one. Choices: naive, py1s, "),
    ],
)
def test_user_error_is_one_line(
    work: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(work)
    with pytest.raises(UserError) as caught:
        app(["main.yaml", *BASE, *words, "save_folder=bad"])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (work / "bad/run_0/summary.json").exists()

"""``mlbert pretrain TEXT --preset ... --tokens ...`` on several ranks: the run of one rank with the
same global batch, and how it ends.
"""

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness import Rank, start_ranks
from mlbert.config import presets
from mlbert.programs.custom_corpus import phase_plan
from programs import wait_for
from test_packed_ranks import imitate
from tiny_phases import TINY, assert_equal_tensors, newest, write_sentences
from training_settings import read_metrics, read_summary
from user_errors import assert_error_line

LENGTH = 32
ROWS = 8  # of a step, over all ranks
STEP = LENGTH * ROWS  # tokens
STEPS = 12
MOST_DIFFERENCE = 1e-6  # of the loss of a step
OF_WEIGHTS = 1e-5


def pretrain(imitated: int, *words: str) -> None:
    """Run the command on one rank; ``imitated``: with the batches of so many ranks."""
    from mlbert.cli.main import main

    if imitated > 1:
        imitate(imitated)

    known = presets._file()
    presets._file = lambda: {**known, "tiny": TINY}
    phase_plan.small_model_precision = lambda device: "fp32"
    main(["pretrain", *words])


def start(ranks: int, work: Path, words: Sequence[object], imitated: int = 1) -> list[Rank]:
    return start_ranks(pretrain, (imitated, *map(str, words)), ranks, work)


def end(processes: Sequence[Rank]) -> tuple[list[int | None], list[str]]:
    """Return the exit status and the output of each rank."""
    outputs = [process.communicate(200) for process in processes]
    return [process.returncode for process in processes], outputs


def train(ranks: int, work: Path, words: Sequence[object], imitated: int = 1) -> str:
    """Run the command on all ranks, and return what rank 0 printed; the others print nothing."""
    statuses, outputs = end(start(ranks, work, words, imitated))
    assert statuses == [0] * ranks, outputs
    assert outputs[1:] == [""] * (ranks - 1)
    return outputs[0]


def stage1(text: Path, out: Path, steps: int = STEPS, rows: int = ROWS) -> list[object]:
    sizes = ["--length", LENGTH, "--batch", rows, "--vocab-size", 300]
    return [text, "--out", out, "--preset", "tiny", "--tokens", steps * STEP, *sizes]


def extend(text: Path, start: Path, out: Path) -> list[object]:
    """Return the options of a second phase, from the first one."""
    return [
        text,
        "--phase",
        "extend",
        "--from",
        start,
        "--out",
        out,
        "--length",
        64,
        "--tokens",
        1000,
    ]


def assert_equal_runs(several: Path, one: Path) -> None:
    """Expect the same counts, and equal losses and weights but for rounding."""
    ours = read_summary(several)
    for name, value in read_summary(one).items():
        if name in ("samples", "tokens", "steps"):
            assert ours[name] == value, name
    losses = [point["loss"] for point in read_metrics(several)]
    expected = [point["loss"] for point in read_metrics(one)]
    assert losses == pytest.approx(expected, abs=MOST_DIFFERENCE)
    weights = load_file(newest(several) / "tensors.safetensors")
    for name, tensor in load_file(newest(one) / "tensors.safetensors").items():
        assert torch.allclose(weights[name], tensor, rtol=0, atol=OF_WEIGHTS), name


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_THREADS", "1")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sentences(tmp_path_factory.mktemp("text") / "text.txt", 900)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_equal_one_rank_with_the_same_global_batch(
    text: Path, tmp_path: Path, ranks: int
) -> None:
    one = tmp_path / "one"
    several = tmp_path / "several"
    train(1, tmp_path, stage1(text, one), imitated=ranks)
    output = train(ranks, tmp_path, stage1(text, several))
    rows = "8 rows of 32 tokens a step, from 4 over 200 tokens"
    assert output.count(f"stage1 of tiny: 3,072 tokens; {rows}") == 1
    assert output.count("finished: held-out accuracy") == 1
    assert read_summary(several)["ranks"] == ranks
    assert_equal_runs(several, one)
    losses = [point["loss"] for point in read_metrics(several)]
    assert len(losses) >= STEPS
    assert losses[-1] < losses[0]
    assert (several / "model/model.safetensors").is_file()


@pytest.mark.slow
def test_the_next_phase_on_two_ranks_equals_that_on_one(text: Path, tmp_path: Path) -> None:
    """With the optimizer state of the one before. A finished run is left as it is."""
    first = tmp_path / "first"
    one = tmp_path / "one"
    two = tmp_path / "two"
    train(1, tmp_path, stage1(text, first))
    train(1, tmp_path, extend(text, first, one), imitated=2)
    output = train(2, tmp_path, extend(text, first, two))
    assert "with its optimizer state" in output
    assert output.count("before training: held-out accuracy") == 1
    assert_equal_runs(two, one)
    assert "is finished; trained on" in train(2, tmp_path, extend(text, first, two))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["interrupted", "killed"])
def test_two_ranks_resume_bit_equal(text: Path, tmp_path: Path, how: str) -> None:
    out = tmp_path / "out"
    steps = 60
    ranks = start(2, tmp_path, stage1(text, out, steps))
    wait_for(lambda: len(list((out / "run_0/checkpoints").glob("step_*"))) > 1, 100)
    if how == "interrupted":
        for rank in ranks:
            rank.send_signal(signal.SIGINT)  # as torchrun does
        statuses, outputs = end(ranks)
        assert statuses == [130, 130], outputs
        assert "a checkpoint is saved. Run the same command to resume." in outputs[0]
        assert outputs[1] == ""
    else:
        ranks[1].send_signal(signal.SIGKILL)
        statuses, outputs = end(ranks)
        assert statuses == [3, -signal.SIGKILL], outputs
        assert "rank 1 on " in outputs[0]
    assert not (out / "run_0/summary.json").exists()
    output = train(2, tmp_path, stage1(text, out, steps))
    assert "was interrupted; resuming" in output
    assert "resumed at step" in output
    train(2, tmp_path, stage1(text, tmp_path / "whole", steps))
    assert_equal_tensors(newest(out), newest(tmp_path / "whole"))


def test_mistakes_are_one_line_of_rank_0(text: Path, tmp_path: Path) -> None:
    def refused(words: Sequence[object], code: str, subject: str | Path) -> None:
        statuses, outputs = end(start(2, tmp_path, words))
        assert statuses == [2, 2], outputs
        assert_error_line(outputs[0], code, subject)
        assert outputs[1] == ""

    out = tmp_path / "out"
    refused(stage1(tmp_path / "none.txt", out), "file.missing", tmp_path / "none.txt")
    refused(stage1(text, out, rows=7), "config.conflict", "--batch 7")
    refused([text, "--out", out, "--minutes", 1], "command.launcher", "mlbert pretrain TEXT")
    assert not (out / "pretrain.json").exists()


@pytest.mark.slow
def test_launch_local_starts_the_ranks(text: Path, tmp_path: Path) -> None:
    sizes = ["--length", LENGTH, "--batch", ROWS, "--vocab-size", 300, "--tokens", 4 * STEP]
    words = ["pretrain", text, "--out", tmp_path / "out", "--preset", "small", *sizes]
    for launcher in (["mlbert", "launch", "local", "-n", "2"], ["torch.distributed.run"]):
        program = words
        if launcher[0] != "mlbert":
            program = ["--standalone", "--nproc-per-node=2", "-m", "mlbert", *words]
        command = [sys.executable, "-m", *launcher, *map(str, program)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        is_first = launcher[0] == "mlbert"
        assert ("finished: held-out" if is_first else "is finished; trained on") in done.stdout
    assert read_summary(tmp_path / "out")["ranks"] == 2

"""``mlbert pretrain TEXT --tokens N``: phases of a published recipe, each from the one before."""

import hashlib
import math
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mlbert.config import presets
from mlbert.config.bert_config import BertConfig
from mlbert.distributed.world import World
from mlbert.host.console import standard_output
from mlbert.host.json_files import read_json
from mlbert.programs.custom_corpus.phase_plan import (
    EXTEND,
    STAGE1,
    Parent,
    PhaseRequest,
    easier_batch,
    plan_phase,
)
from mlbert.training.experiment import RunOptions, run_experiment
from mosaic_texts import make_texts
from packed_text_run import PACKED_LENGTH, packed_text_run
from programs import RunMlbert, wait_for
from tiny_phases import TINY, assert_equal_tensors, newest, write_sentences
from training_settings import read_metrics, read_summary
from user_errors import user_error

LENGTH = 32
ROWS = 4
STEP = LENGTH * ROWS  # tokens
Pretrain = Callable[..., str]


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a model that trains in a second to the published ones."""
    known = presets._file()
    monkeypatch.setattr(presets, "_file", lambda: {**known, "tiny": TINY})
    monkeypatch.setenv("CPU_THREADS", "1")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sentences(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture
def pretrain(run_mlbert: RunMlbert, text: Path) -> Pretrain:
    def run(out: Path, *words: object) -> str:
        status, output, errors = run_mlbert("pretrain", text, "--out", out, *words)
        assert status == 0, output + errors
        return output

    return run


def stage1(tokens: int, *words: object) -> list[object]:
    """Return the options of a first phase."""
    sizes = ["--length", LENGTH, "--batch", ROWS, "--vocab-size", 300]
    return ["--preset", "tiny", "--tokens", tokens, *sizes, *words]


def contents(folder: Path) -> dict[str, str]:
    """Return the digest of each file below a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_three_phases_each_from_the_checkpoint_of_the_one_before(
    tmp_path: Path, pretrain: Pretrain
) -> None:
    short = tmp_path / "short"
    long = tmp_path / "long"
    final = tmp_path / "final"
    output = pretrain(short, *stage1(8 * STEP))
    assert "stage1 of tiny: 1,024 tokens; 4 rows of 32 tokens a step, from 2 over 102" in output
    assert BertConfig.from_json(short / "bert_config.json").rope_theta == 10_000.0

    extend = ["--phase", "extend", "--from", short, "--length", 64]
    output = pretrain(long, *extend, "--tokens", 4 * STEP)
    updates = read_summary(short)["steps"]
    assert f"starting from {newest(short)}, with its optimizer state" in output
    assert f"after {updates} updates" in output
    shape = BertConfig.from_json(long / "bert_config.json")
    assert shape.rope_theta == presets.LONG_ROPE_THETA
    assert shape.local_rope_theta == 10_000.0
    assert {line["learning_rate"] for line in read_metrics(long)} == {TINY["extend_rate"]}
    # Without an update, the weights would be the parent's; with weights at random, far from them.
    assert read_metrics(long)[0]["loss"] < read_metrics(short)[0]["loss"]

    before = contents(long)
    output = pretrain(final, "--phase", "decay", "--from", long, "--tokens", 8 * STEP)
    assert contents(long) == before, "a branch does not touch the phase that it starts from"
    assert "decay of tiny: 1,024 tokens; 2 rows of 64 tokens a step; rate 0.001, to 0" in output
    state = read_json(newest(final) / "state.json", "")["state"]
    steps = [read_summary(out)["steps"] for out in (short, long, final)]
    assert state["optimizer"]["num_updates"] == sum(steps)
    points = read_metrics(final)
    assert points[0]["learning_rate"] == TINY["extend_rate"]
    rates = [point["learning_rate"] for point in points]
    assert rates == sorted(rates, reverse=True)
    # The last update begins within a step's tokens of the end.
    done = 1 - STEP / (8 * STEP)
    assert 0 < rates[-1] <= TINY["extend_rate"] * (1 - math.sqrt(done))

    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_pretrained(final / "model")
    assert model.config.rope_parameters["full_attention"]["rope_theta"] == presets.LONG_ROPE_THETA


def test_a_longer_constant_phase_equals_one_that_was_longer_from_the_start(
    tmp_path: Path, pretrain: Pretrain
) -> None:
    extended = tmp_path / "extended"
    whole = tmp_path / "whole"
    warmup = ["--warmup-tokens", 300]
    pretrain(extended, *stage1(2_000, *warmup))
    first_end = newest(extended)
    kept = contents(first_end)
    pretrain(extended, *stage1(3_000, *warmup))
    pretrain(whole, *stage1(3_000, *warmup))
    assert_equal_tensors(newest(extended), newest(whole))
    ends = sorted((extended / "run_0/phase_ends").iterdir())
    assert len(ends) == 2
    assert list(contents(ends[0]).values()) == list(kept.values())
    output = pretrain(extended, *stage1(3_000, *warmup))
    assert "is finished; trained on" in output

    # An interrupted one: as if killed after an earlier checkpoint.
    names = sorted((whole / "run_0/checkpoints").iterdir())
    assert len(names) == 2
    shutil.rmtree(names[-1])
    (whole / "run_0/summary.json").unlink()
    output = pretrain(whole, *stage1(3_000, *warmup))
    assert "was interrupted; resuming" in output
    assert_equal_tensors(newest(extended), newest(whole))

    # A decay off the end of the first part, which the run itself no longer has.
    assert not first_end.exists()
    final = tmp_path / "final"
    before = contents(extended)
    words = ["--phase", "decay", "--from", ends[0], "--tokens", 2 * STEP, "--batch", ROWS]
    output = pretrain(final, *words)
    assert f"starting from {ends[0]}, with its optimizer state" in output
    assert contents(extended) == before


@pytest.mark.slow
def test_a_model_without_optimizer_state(tmp_path: Path, pretrain: Pretrain) -> None:
    short = tmp_path / "short"
    pretrain(short, *stage1(3 * STEP))
    sizes = ["--length", LENGTH, "--batch", ROWS]
    model = short / "model"
    words = ["--preset", "tiny", "--phase", "decay", "--from", model, "--tokens", 2 * STEP]
    output = pretrain(tmp_path / "final", *words, *sizes)
    assert f"starting from {model}, without its optimizer state" in output
    state = read_json(newest(tmp_path / "final") / "state.json", "")["state"]
    assert state["optimizer"]["num_updates"] == read_summary(tmp_path / "final")["steps"]


@pytest.mark.slow
def test_the_card_of_a_bert_names_its_architecture(
    tmp_path: Path, small_models: Path, pretrain: Pretrain
) -> None:
    sizes = ["--length", LENGTH, "--batch", ROWS, "--tokens", 2 * STEP]
    for out, start in (("own", []), ("from_bert", ["--from", small_models / "bert"])):
        new = [] if start else ["--vocab-size", 300]
        pretrain(tmp_path / out, "--preset", "tiny", *sizes, *start, *new)
    own = (tmp_path / "own/model/README.md").read_text()
    assert "Architecture: ModernBERT with local and global attention" in own
    from_bert = (tmp_path / "from_bert/model/README.md").read_text()
    assert "Architecture: BERT with global attention" in from_bert
    assert "tags: [masked-lm, bert]" in from_bert


def test_tokens_are_counted_without_padding(tmp_path: Path, tree_root: Path) -> None:
    """Texts of uneven lengths, packed into micro-batches that they do not fill."""
    make_texts(tmp_path, tree_root)
    step_tokens = 96
    steps = 10
    warmup = 4
    shape = {"position_embedding_type": "rotary", "norm_position": "pre", "gated_mlp": True}
    sizes = {"vocab_size": 15, "hidden_size": 32, "num_hidden_layers": 1}
    config = BertConfig(**sizes, num_attention_heads=2, intermediate_size=32, **shape)
    (tmp_path / "bert_config.json").write_text(config.to_json())
    resolved = packed_text_run(
        tmp_path,
        "out",
        train_batch_size=ROWS,
        weight_decay_rate=0.0,
        step_tokens=step_tokens,
        max_steps=steps,
        warmup_steps=warmup,
    )
    run_experiment(resolved, World(), standard_output(), RunOptions(mlperf_log=False))
    summary = read_summary(tmp_path / "out")
    capacity = ROWS * PACKED_LENGTH
    assert summary["steps"] * capacity > summary["tokens"], "rows are not full"
    assert summary["steps"] > steps
    # The run ends with the first step that reaches the tokens.
    assert steps * step_tokens <= summary["tokens"] < steps * step_tokens + capacity
    rates = [point["learning_rate"] for point in read_metrics(tmp_path / "out")]
    rising = [rate for rate in rates if rate < 0.01]
    assert rates[0] == 0.0
    assert len(rising) > warmup, "the rate follows the tokens, not the steps"
    assert set(rates[len(rising) :]) == {0.01}


@pytest.mark.slow
def test_a_killed_phase_goes_on_bit_equal(tmp_path: Path, text: Path, pretrain: Pretrain) -> None:
    """The preset `small`, as a separate process."""
    sizes = ["--length", LENGTH, "--batch", ROWS, "--vocab-size", 300, "--warmup-tokens", 300]
    words = ["--preset", "small", "--tokens", 40 * STEP, *sizes]
    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "mlbert", "pretrain", text, "--out", killed, *words]
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL)
    checkpoints = killed / "run_0/checkpoints"
    wait_for(lambda: process.poll() is not None or len(list(checkpoints.glob("step_*"))) > 1, 300)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "run_0/summary.json").exists()
    output = pretrain(killed, *words)
    assert "was interrupted; resuming" in output
    pretrain(tmp_path / "whole", *words)
    assert_equal_tensors(newest(killed), newest(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("modernbert-base", 149),
        ("modernbert-large", 395),
        ("ettin-17m", 17),
        ("ettin-32m", 32),
        ("ettin-68m", 68),
        ("ettin-150m", 150),
        ("ettin-400m", 400),
        ("ettin-1b", 1028),
    ],
)
def test_presets_have_the_published_sizes(name: str, millions: float) -> None:
    preset = presets.find(name, "--preset")
    assert preset.shape.num_parameters / 1e6 == pytest.approx(millions, rel=0.015)
    assert preset.shape.hidden_size // preset.shape.num_attention_heads == 64
    assert preset.first_rows < preset.rows
    assert preset.published["decay"] == 50_000_000_000


@pytest.mark.parametrize("phase", [STAGE1, EXTEND])
def test_a_row_is_no_longer_than_the_positions_of_a_bert(phase: str) -> None:
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 40}
    shape = BertConfig(**sizes)
    parent = Parent("bert", shape, None)
    request = PhaseRequest("tiny", phase, 10_000, 40, ROWS, None)
    plan = plan_phase(request, 0, parent)
    assert BertConfig(**plan.shape) == shape, "a model without rotary positions keeps its shape"
    with user_error("config.conflict", "--length 48"):
        plan_phase(replace(request, length=48), 0, parent)


def test_a_batch_that_does_not_divide_well_gets_a_better_one() -> None:
    request = PhaseRequest("tiny", STAGE1, 10**9, 1024, 509, None)
    plan = plan_phase(request, 0, None)
    assert easier_batch(plan, 1) == 448, "509 is a prime number"
    assert easier_batch(replace(plan, rows=512), 1) is None
    assert easier_batch(replace(plan, rows=1018), 2) == 896


def test_what_is_refused(tmp_path: Path, text: Path, pretrain: Pretrain, assert_fails) -> None:
    out = tmp_path / "out"

    def refused(code: str, subject: str, *words: object) -> None:
        assert_fails(["pretrain", text, "--out", out, *words], code, subject)

    refused("config.missing", "--preset", "--preset", "tiny")
    refused("config.missing", "--phase", "--phase", "decay")
    refused("config.missing", "--tokens", "--tokens", "1e6")
    refused("config.range", "--tokens 0", "--tokens", "0")
    refused("config.conflict", "--tokens", *stage1(1000), "--minutes", 1)
    refused("config.conflict", "--tokens", *stage1(1000), "--size", "tiny")
    refused("config.choice", "--preset modernbert-bas", *stage1(1000), "--preset", "modernbert-bas")
    refused("config.missing", "--phase decay", *stage1(1000), "--phase", "decay")
    words = ["--preset", "tiny", "--tokens", 1000, "--from", tmp_path / "no"]
    refused("file.missing", "no", *words)
    assert not (out / "pretrain.json").exists()

    pretrain(out, *stage1(2 * STEP))
    final = tmp_path / "final"
    decay = ["--phase", "decay", "--from", out, "--batch", ROWS, "--tokens"]
    pretrain(final, *decay, 2 * STEP)
    words = ["pretrain", text, "--out", final, *decay, 8 * STEP]
    said = assert_fails(words, "run.other-settings", final)
    assert "a different --tokens" in said
    # The same folder with another phase.
    assert_fails(["pretrain", text, "--out", out, *decay, 8 * STEP], "run.other-settings", out)

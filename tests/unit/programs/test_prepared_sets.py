"""``mlbert pretrain SET --preset NAME --tokens N``: sets that were prepared, in place of text."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mlbert.config import presets
from mlbert.data.formats.mds import MdsReader, MdsWriter
from mlbert.data.formats.tokenizer import load_tokenizer
from mosaic_texts import make_texts
from programs import RunMlbert
from tiny_phases import TINY, newest
from training_settings import read_metrics, read_summary

LENGTH = 24
ROWS = 8
TOKENS = 3_000
SIZES = ["--length", LENGTH, "--batch", ROWS, "--tokens", TOKENS]


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    known = presets._file()
    monkeypatch.setattr(presets, "_file", lambda: {**known, "tiny": TINY})
    monkeypatch.setenv("CPU_THREADS", "1")


@pytest.fixture
def work(tmp_path: Path, tree_root: Path) -> Path:
    """Write sets of text (text/train, text/val), and of its token ids (ids/train, ids/val)."""
    make_texts(tmp_path, tree_root)
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    columns = {"input_ids": "ndarray:uint16", "len": "int", "id": "str"}
    for split, name in (("train_small", "train"), ("val", "val")):
        texts = [sample["text"] for sample in MdsReader(tmp_path / "data" / split)]
        with MdsWriter(tmp_path / "text" / name, {"text": "str"}, size_limit=4000) as writer:
            for text in texts:
                writer.write({"text": text})
        with MdsWriter(tmp_path / "ids" / name, columns, size_limit=3000) as writer:
            for number, text in enumerate(texts):
                ids = np.array([tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id])
                writer.write({"input_ids": ids, "len": len(ids), "id": str(number)})
    return tmp_path


@pytest.fixture
def pretrain(run_mlbert: RunMlbert, work: Path) -> Callable[..., str]:
    def run(*words: object) -> str:
        status, output, errors = run_mlbert("pretrain", *words)
        assert status == 0, output + errors
        return output

    return run


@pytest.mark.parametrize("kind", ["ids", pytest.param("text", marks=pytest.mark.slow)])
def test_a_set_trains_and_the_next_phase_reads_another(
    work: Path, pretrain: Callable[..., str], kind: str
) -> None:
    out = work / "out"
    words = ["--preset", "tiny", "--tokenizer", work / "vocab.txt", *SIZES]
    output = pretrain(work / kind, "--out", out, *words)
    assert "sets: 400 texts to train on, about " in output
    assert "; 40 to evaluate on" in output
    assert "finished: held-out accuracy" in output
    step = ROWS * LENGTH
    asked = -(-TOKENS // step) * step
    assert asked <= read_summary(out)["tokens"] < asked + step
    losses = [point["loss"] for point in read_metrics(out)]
    assert losses[-1] < losses[0]
    assert "400 texts of a prepared set" in (out / "model/README.md").read_text()
    assert "is finished; trained on" in pretrain(work / kind, "--out", out, *words)
    # A set itself, and --eval.
    sets = [work / kind / "train", "--eval", work / kind / "val"]
    final = work / "final"
    output = pretrain(*sets, "--phase", "decay", "--from", out, "--out", final, *SIZES)
    assert f"starting from {newest(out)}, with its optimizer state" in output


def test_what_prepare_tokens_writes_has_its_tokenizer_and_facts(
    work: Path, run_mlbert: RunMlbert, pretrain: Callable[..., str]
) -> None:
    draw = random.Random(1)
    vocabulary = ["".join(draw.choices("aeilnorst", k=5)) for _ in range(400)]
    sources = [work / "one.jsonl", work / "two.jsonl"]
    for source in sources:
        rows = [{"text": " ".join(draw.choices(vocabulary, k=8))} for _ in range(900)]
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = work / "prepared"
    sizes = ["--length", LENGTH, "--proportions", "0.7,0.3", "--out", prepared]
    words = ["prepare", "tokens", *sources, "--tokenizer", "bert-base-uncased", *sizes]
    status, output, errors = run_mlbert(*words)
    assert status == 0, output + errors
    output = pretrain(prepared, "--out", work / "out", "--preset", "tiny", *SIZES)
    assert "documents, " in output
    assert "tokens: about" not in output
    assert '"proportion": 0.7' in (work / "out/run_0/settings.txt").read_text()


def test_what_is_refused(
    work: Path, pretrain: Callable[..., str], assert_fails: Callable[..., str]
) -> None:
    ids = work / "ids"
    out = ["--out", work / "out"]
    phase = ["--preset", "tiny", *SIZES]
    named = ["--tokenizer", work / "vocab.txt"]
    assert_fails(["pretrain", ids, *out, *phase], "config.missing", "--tokenizer")
    assert_fails(["pretrain", ids, *out, *named], "data.format", ids)
    train = ids / "train"
    assert_fails(["pretrain", train, *out, *phase, *named], "config.missing", train)
    words = f"the prepared set {ids}"
    assert_fails(["pretrain", ids, *out, *phase, *named, "--skip-bad"], "config.conflict", words)
    output = pretrain(ids, "--dry-run", *phase, *named)
    assert output.startswith("sets: 400 texts to train on")
    pretrain(ids, *out, *phase, *named)
    other = ["pretrain", work / "text", *out, *phase, *named]
    assert_fails(other, "run.other-settings", work / "out")

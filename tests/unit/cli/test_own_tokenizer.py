"""Train a tokenizer and a model with it, then add domain words to both."""

import random
from pathlib import Path

import pytest

from programs import RunMlbert, write_files

pytestmark = pytest.mark.usefixtures("one_cpu")

SUBJECTS = ["The old", "A young", "Every", "My"]
NAMES = ["river", "teacher", "engine", "window", "Gärtner"]
VERBS = ["finds", "builds", "paints", "ändert"]
ENDS = ["slowly.", "twice today.", "again and again."]


def write_text(folder: Path) -> Path:
    """Write paragraphs of five sentences; return their folder."""
    draw = random.Random(1)
    lines = []
    for number in range(1500):
        parts = [SUBJECTS, NAMES, VERBS, ["the"], NAMES, ENDS]
        words = " ".join(draw.choice(part) for part in parts)
        lines.append(f"{words} Number {draw.randrange(10**6)} follows.")
        if number % 5 == 4:
            lines.append("")
    return write_files(folder, {"a.txt": "\n".join(lines)})


@pytest.mark.slow
def test_from_text_to_a_model_with_more_words(tmp_path: Path, run_mlbert: RunMlbert) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    text = write_text(tmp_path / "text")
    write_files(tmp_path, {"words.txt": "hepatitis\nCOVID-19\n"})
    length = ["--minutes", "0.05"]
    first = tmp_path / "first"
    more = tmp_path / "more"
    pretrain = ["pretrain", text, *length]
    for words in (
        ["prepare", "tokenizer", text, "--size", 576, "--out", tmp_path / "tokenizer"],
        [*pretrain, "--tokenizer", tmp_path / "tokenizer", "--out", first, "--size", "tiny"],
        ["fill-mask", first / "model", "The old river [MASK] the window twice today."],
        ["convert", "add-words", first / "model", more, "--words", tmp_path / "words.txt"],
        ["fill-mask", more, "The old hepatitis [MASK] the COVID-19 twice today."],
        [*pretrain, "--from", more, "--out", tmp_path / "second"],
    ):
        status, out, err = run_mlbert(*words)
        assert status == 0, f"{words}\n{out}\n{err}"
    model = tmp_path / "second/model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer("hepatitis", add_special_tokens=False)["input_ids"]
    assert len(ids) == 1
    loaded = AutoModelForMaskedLM.from_pretrained(model, trust_remote_code=True)
    assert loaded.config.vocab_size == len(tokenizer) == 640

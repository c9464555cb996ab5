"""The example that trains embeddings, and the lines of docs/checkpoints.md about other runtimes."""

import csv
import json
import random
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labeled_texts import OTHER, PLACES
from programs import RunMlbert

DOCS = Path(__file__).parents[3] / "docs"
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WORDS = [word for words in PLACES.values() for word in words]
FAST = 1e-2 * 32  # learning rate times hidden size
COLUMNS = "needs rows with the columns anchor and positive"


def rows_of_pairs(count: int, with_negative: bool) -> list[dict[str, str]]:
    """Return rows whose texts share no word that says what belongs together: a word's answer is
    the next word.
    """
    draw = random.Random(1)
    rows = []
    for number in range(count):
        place = draw.randrange(len(WORDS))
        anchor = [WORDS[place], *draw.choices(OTHER, k=3), f"number{number}"]
        draw.shuffle(anchor)
        row = {"anchor": " ".join(anchor), "positive": f"{WORDS[place - 1]} is the answer"}
        if with_negative:
            row["negative"] = f"{WORDS[place - 2]} is the answer"
        rows.append(row)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("with_negative", [False, True], ids=["pairs", "triplets"])
def test_pairs_and_triplets_train_embeddings(
    with_negative: bool, small_models: Path, tmp_path: Path, run_mlbert: RunMlbert
) -> None:
    from sentence_transformers import SentenceTransformer

    rows = rows_of_pairs(200, with_negative)
    if with_negative:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        file = tmp_path / "rows.csv"
        with file.open("w", newline="") as output:
            writer = csv.DictWriter(output, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    example = runpy.run_path(str(DOCS / "examples/train_embeddings.py"))
    example["train"].__globals__.update(RATE=FAST, BATCH=8)  # nine different positives
    out = tmp_path / "embeddings"
    scores = example["main"](str(small_models / "model"), file, str(out), 40)
    assert scores["TF-IDF"] < 0.5
    assert scores["before training"] < 0.2  # one of nine is right by chance
    assert scores["after training"] > 0.7

    written = tmp_path / "written"
    words = ["--to", "sentence-transformers", "--out", written]
    status, _, complaint = run_mlbert("export", out, *words)
    assert status == 0, complaint
    texts = [row["anchor"] for row in rows[:5]]
    vectors = [SentenceTransformer(str(folder)).encode(texts) for folder in (out, written)]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-5)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read"),
        ("", COLUMNS),
        ("anchor,positive\n", COLUMNS),
        ("question,answer\na,b\n", COLUMNS),
        ("anchor,positive\na,b\nc\n", "row 2 has no positive"),
        ("anchor,positive\na,b\na,c\n", "needs two or more different anchors"),
    ],
)
def test_a_file_without_pairs_is_one_line(
    tmp_path: Path, content: str | None, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    example = runpy.run_path(str(DOCS / "examples/train_embeddings.py"))
    file = tmp_path / "rows.csv"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit) as ended:
        example["main"]("no model", file, tmp_path / "out")
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{file}: {reason}")


@pytest.mark.slow
def test_the_lines_about_other_runtimes_run(
    small_models: Path, tmp_path: Path, run_mlbert: RunMlbert, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(small_models / "model", "my-model/model")
    words = ["--from", "my-model/model", "--train", small_models / "rows.csv", "--epochs", "1"]
    assert run_mlbert("finetune", *words)[0] == 0
    _, _, part = (DOCS / "checkpoints.md").read_text().partition("## Where a model runs")
    blocks = BLOCK.findall(part)
    assert [language for language, _ in blocks].count("python") == 3
    found: dict[str, Any] = {}
    for language, text in blocks:
        if language == "python":
            Path("block.py").write_text(text)
            found |= runpy.run_path("block.py")
            continue
        for line in text.splitlines():
            program, *words = line.removeprefix("$ ").split()
            assert program == "mlbert"
            status, _, complaint = run_mlbert(*words)
            assert status == 0, complaint
    assert {guess["token_str"] for guess in found["guesses"]} <= set(
        (small_models / "vocab.txt").read_text().split()
    )
    kinds = sorted(PLACES)
    assert found["labels"][0]["label"] == kinds[found["logits"][0].argmax()]
    np.testing.assert_allclose(found["means"][0], found["vectors"][0], atol=1e-4)

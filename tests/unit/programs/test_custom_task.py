"""Fine-tuning without a YAML: what is guessed, held out, reported, exported and refused;
the programs of the docs.
"""

import csv
import json
import re
import runpy
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from labeled_texts import PLACES, sentences, write_csv
from mlbert.data.formats.tasks import TaskForm, TaskRows, read_training
from mlbert.programs import custom_task
from mlbert.programs.custom_task import draw_held_out
from mlbert.programs.task_folder import held_folder, new_folder
from mlbert.programs.task_guess import find_form
from mlbert.programs.task_report import baselines, joined_texts
from programs import RunMlbert
from user_errors import user_error

HIDDEN_SIZE = 32  # of the models
NO_WORDS = (None, None, None)

GOOD = "text,label\n" + "".join(f"some text {n},{'ab'[n % 2]}\n" for n in range(30))


@pytest.fixture
def folder(small_models: Path) -> Path:
    return small_models


@pytest.mark.slow
def test_classes_from_one_file(
    folder: Path, tmp_path: Path, run_mlbert: RunMlbert, monkeypatch
) -> None:
    # These 200 rows are learnt in few steps.
    monkeypatch.setattr(custom_task, "RATE", 1e-2 * HIDDEN_SIZE)
    out = tmp_path / "out"
    words = ["--from", folder / "model", "--train", folder / "rows.csv", "--out", out]
    code, said, _ = run_mlbert("finetune", *words)
    assert code == 0, said
    assert "columns: text note; label kind (3 classes: cold, warm, wet)" in said
    run_folder = out / "run_0"
    parts = [
        read_training(run_folder / f"{name}.csv", TaskForm(("note",), "kind"))
        for name in ("train", "eval")
    ]
    assert len(parts[0]) + len(parts[1]) == 200
    with (run_folder / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["note"] for row in rows] == parts[1].texts[0]
    report = (run_folder / "report.txt").read_text()
    accuracy = sum(row["label"] == row["prediction"] for row in rows) / len(rows)
    ((most, _),) = Counter(parts[0].classes[int(label)] for label in parts[0].labels).most_common(1)
    majority = sum(row["label"] == most for row in rows) / len(rows)
    lines = dict(re.findall(r"^ *(.+?) +(\d\.\d{4}) +\d\.\d{4} $", report, re.MULTILINE))
    assert lines["this model"] == f"{accuracy:.4f}"
    assert lines[f"always {most}"] == f"{majority:.4f}"
    assert float(lines["TF-IDF + logistic regression"]) > 0.9
    assert accuracy > majority + 0.3
    assert all(f"\n {name} " in report for name in PLACES)

    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    exported = run_folder / "huggingface"
    peer = AutoModelForSequenceClassification.from_pretrained(exported).eval()
    assert type(peer).__name__ == "ModernBertForSequenceClassification", "no code in the folder"
    assert peer.config.problem_type == "single_label_classification"
    tokenizer = AutoTokenizer.from_pretrained(exported)
    with torch.no_grad():
        found = peer(
            **tokenizer([row["note"] for row in rows], padding=True, return_tensors="pt")
        ).logits.argmax(1)
    assert [peer.config.id2label[number] for number in found.tolist()] == [
        row["prediction"] for row in rows
    ]


def test_numbers_of_a_saved_bert_by_the_clock(
    folder: Path, tmp_path: Path, run_mlbert: RunMlbert, assert_fails
) -> None:
    from transformers import AutoModelForSequenceClassification

    rows = [[text, f"{list(PLACES).index(kind) / 2}"] for text, kind in sentences(60)]
    train = write_csv(tmp_path / "train.csv", ["text", "degree"], *rows[:39], ["", "0.5"])
    held_out = write_csv(tmp_path / "eval.csv", ["text", "degree"], *rows[38:])
    words = ["--from", folder / "bert", "--train", train, "--eval", held_out, "--minutes", "0.05"]
    seen = write_csv(
        tmp_path / "new.csv", ["text"], ["the sun " * 40], *([text] for text, _ in rows)
    )
    for number in (0, 1):  # the second call keeps the first one's run
        code, said, _ = run_mlbert("finetune", *words, "--out", tmp_path / "out")
        assert code == 0, said
        assert "label degree (numbers)" in said
        both = "warning: 1 texts to evaluate on are also trained on: eval.csv line 2 is train.csv"
        assert both in said
        assert f"warning: {train}: 1 of 40 rows have no text in 'text'" in said
        lines = {line.rsplit(maxsplit=2)[0].strip() for line in said.splitlines() if line.strip()}
        assert {"always the mean", "TF-IDF + ridge regression", "this model"} <= lines
        exported = tmp_path / f"out/run_{number}/huggingface"
        assert AutoModelForSequenceClassification.from_pretrained(exported).config.num_labels == 1
    out = tmp_path / "out.csv"
    words = ["--predict", seen, "--model", tmp_path / "out/run_0", "--out", out]
    code, _, warned = run_mlbert("finetune", *words)
    assert code == 0, warned
    assert f"warning: {seen}: 1 of 61 rows are longer than" in warned
    assert len(out.read_text().splitlines()) == 1 + 61

    for model in (tmp_path / "out/run_0/huggingface", tmp_path / "out/run_0/weights"):
        other = tmp_path / "other.csv"
        words[3] = model
        assert run_mlbert("finetune", *words[:-1], other)[0] == 0
        assert other.read_bytes() == out.read_bytes()
    (tmp_path / "out/run_0/huggingface/task.json").unlink()  # as an earlier version left it
    words[3] = tmp_path / "out/run_0/huggingface"
    assert run_mlbert("finetune", *words)[0] == 0
    for model, code in ((tmp_path / "out", "checkpoint.missing"), ("no", "file.missing")):
        wrong = ["finetune", "--predict", seen, "--model", model]
        assert_fails(wrong, code, model)
    assert_fails(
        ["finetune", "--predict", seen, "--model", folder / "bert"], "checkpoint.missing", "bert"
    )

    before = seen.read_bytes()
    words = ["finetune", *words[:-1]]
    assert_fails([*words, seen], "config.conflict", f"--out {seen}")
    assert seen.read_bytes() == before
    (tmp_path / "folder.csv").mkdir()
    assert_fails([*words, tmp_path / "folder.csv"], "file.wrong-kind", "folder.csv")
    assert run_mlbert(*words, tmp_path / "new/deep.csv")[0] == 0
    assert (tmp_path / "new/deep.csv").read_bytes() == out.read_bytes()


def test_columns_and_task_are_guessed(tmp_path: Path) -> None:
    for header, row, words, expected in (
        ("id,body,label", "{n},some longer text {n},{c}", NO_WORDS, (("body",), "label", None)),
        (
            "question,sentence,label",
            "why {n},so {n},{c}",
            NO_WORDS,
            (("question", "sentence"), "label", None),
        ),
        ("a,b,c", "short {n},some longer text {n},{c}", NO_WORDS, (("b",), "c", None)),
        ("a,b,c", "short {n},some longer text {n},{c}", ("a", None, None), (("a",), "c", None)),
        (
            "a,b,c",
            "short {n},some longer text {n},{c}",
            ("a, b", "c", None),
            (("a", "b"), "c", None),
        ),
        ("a,b,c,,", "short {n},some longer text {n},{c},,", NO_WORDS, (("b",), "c", None)),
        ("d,b,c,d", "{n},some longer text {n},{c},{n}", NO_WORDS, (("b",), "c", None)),
        ("text,score", "some text {n},{n}", NO_WORDS, (("text",), "score", 1)),
        ("text,score", "some text {n},0.{c}", NO_WORDS, (("text",), "score", 1)),
        ("text,stars", "some text {n},{c}", NO_WORDS, (("text",), "stars", None)),
        ("split,text,kind", "train,some text {n},{c}", NO_WORDS, (("text",), "kind", None)),
        ("text,stars", "some text {n},{c}", ("", "", None), (("text",), "stars", None)),
        ("text,stars", "some text {n},{c}", (None, None, "numbers"), (("text",), "stars", 1)),
        ("text,score", "some text {n},0.{c}", (None, None, "classes"), (("text",), "score", None)),
    ):
        path = tmp_path / "rows.csv"
        path.write_text("\n".join([header, *(row.format(n=n, c=n % 3) for n in range(60))]))
        form = find_form(path, *words)
        assert (form.text_columns, form.label_column, form.num_labels) == expected


def test_a_share_of_each_class_is_held_out_and_no_text_is_on_both_sides() -> None:
    texts = (
        [f"text {n // 2}" for n in range(100)] + ["both", "both"] + [f"rare {n}" for n in range(4)]
    )
    labels = np.array([n // 2 % 2 for n in range(100)] + [0, 1] + [2] * 4, np.float32)
    rows = TaskRows(Path("rows.csv"), (texts,), labels, ("a", "b", "c"), "")
    held_out = draw_held_out(rows)
    assert [int(held_out[labels == label].sum()) for label in range(3)] == [10, 10, 0]
    sides = set(zip(joined_texts(rows), held_out.tolist(), strict=True))
    assert len(sides) == len(set(joined_texts(rows)))
    with user_error("data.too-small", "rows.csv"):
        draw_held_out(rows.first(6))


def test_without_scikit_learn_the_majority_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    rows = TaskRows(
        Path("rows.csv"), (["a b", "c d", "e f"],), np.array([0, 1, 1], np.float32), ("x", "y"), ""
    )
    found, note = baselines(rows, rows)
    assert {name: values.tolist() for name, values in found.items()} == {"always y": [1, 1, 1]}
    assert ".[finetune]" in note


@pytest.mark.parametrize(
    ("train", "held_out", "words", "code", "subject"),
    [
        (GOOD, None, ("--label", "labels"), "data.columns", "train.csv"),
        (GOOD, None, ("--label", "text"), "data.labels", "train.csv"),
        (GOOD, None, ("--label", "text", "--text", "text"), "config.conflict", "--label text"),
        (GOOD, None, ("--text", "text,text"), "config.conflict", "--text text,text"),
        (GOOD, None, ("--label", "a,a"), "config.conflict", "--label a,a"),
        (GOOD, None, ("--text", "a", "--label", "a,b"), "config.conflict", "--label a,b"),
        (
            "id,text,by,no\n" + "".join(f"{n},some {n},{n},{n}\n" for n in range(30)),
            None,
            (),
            "config.ambiguous",
            "train.csv",
        ),
        (GOOD, "text,label\nsome,c\n", (), "data.labels", "eval.csv"),
        (GOOD, "text,label\n ,a\n,b\n", (), "data.empty", "eval.csv"),
        ("text,label\n" + 9 * " ,a\n,b\n", None, (), "data.empty", "train.csv"),
        ("text,price\n" + 9 * "some,2.50\n", None, (), "data.labels", "train.csv"),
        ("text;price\n" + 9 * "some;2,50\n", None, ("--numbers",), "data.labels", "train.csv"),
        (
            "text;price\n" + "".join(f"some {n};{n},5\n" for n in range(30)),
            None,
            (),
            "data.labels",
            "train.csv",
        ),
        ("text|label\nsome|a\n", None, (), "data.columns", "train.csv"),
        (GOOD.partition("\n")[2], None, (), "data.columns", "train.csv"),
        (GOOD.replace("text,label", "text,text"), None, (), "data.columns", "train.csv"),
        ("a,a\nsome,b\n", None, (), "data.columns", "train.csv"),
        ("Anchor,positive\nwho,she\nwhat,that\n", None, (), "data.columns", "train.csv"),
        (GOOD, "text,kind\nsome,a\n", (), "data.columns", "eval.csv"),
        (GOOD, None, ("--from", "{folder}"), "checkpoint.missing", "{folder}"),
        (GOOD, None, ("--from", "{folder}/none"), "file.missing", "none"),
        (GOOD, None, ("--minutes", "0"), "config.range", "--minutes 0"),
        (GOOD, None, ("some.yaml",), "config.conflict", "--from and --train"),
        (GOOD, None, ("--out", "{folder}/train.csv"), "file.unwritable", "{folder}/train.csv"),
        (GOOD, None, ("--predict", "rows.csv", "--model", "model"), "config.conflict", "--predict"),
    ],
)
def test_bad_input_is_one_line(
    train, held_out, words, code, subject, folder, tmp_path, assert_fails
) -> None:
    path = tmp_path / "train.csv"
    path.write_text(train)
    given = ["--from", folder / "model", "--train", path, "--out", tmp_path / "out"]
    if held_out is not None:
        (tmp_path / "eval.csv").write_text(held_out)
        given += ["--eval", tmp_path / "eval.csv"]
    words = ["finetune", *given, *(word.format(folder=tmp_path) for word in words)]
    assert_fails(words, code, subject.format(folder=tmp_path.name))
    assert not (tmp_path / "out").exists()


def test_runs_that_start_at_once_have_different_folders(tmp_path: Path) -> None:
    (tmp_path / "run_3").mkdir()
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: new_folder(tmp_path).number, range(40)))
    assert sorted(numbers) == [number for number in range(41) if number != 3]
    assert {path.name for path in tmp_path.iterdir()} == {f"run_{number}" for number in range(41)}


def test_a_link_that_leads_nowhere_is_no_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.symlink_to(tmp_path / "none")
    with user_error("file.unwritable", out), held_folder(out, {}):
        pytest.fail("the folder was created")


def test_the_programs_of_the_docs_start_from_the_same_folder(folder, tmp_path, capsys) -> None:
    tags = {word: f"B-{kind.upper()}" for kind, words in PLACES.items() for word in words}
    rows = [text.split() for text, _ in sentences(16)]
    lines = [
        json.dumps({"words": words, "tags": [tags.get(word, "O") for word in words]})
        for words in rows
    ]
    (tmp_path / "tagged.jsonl").write_text("\n".join(lines))
    (tmp_path / "sentences.txt").write_text(
        "the sun was near\na river was seen\nthe sun was near a\n"
    )
    examples = Path(__file__).parents[3] / "docs/examples"
    named_entities = runpy.run_path(str(examples / "named_entities.py"))
    sentence_embeddings = runpy.run_path(str(examples / "sentence_embeddings.py"))
    named_entities["main"](folder / "model", tmp_path / "tagged.jsonl", str(tmp_path / "tagger"), 1)
    capsys.readouterr()
    sentence_embeddings["main"](str(folder / "model"), tmp_path / "sentences.txt")
    config = json.loads((tmp_path / "tagger/config.json").read_text())
    assert config["id2label"] == {"0": "B-COLD", "1": "B-WARM", "2": "B-WET", "3": "O"}
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith("the sun was near  <->  the sun was near a")
    assert 0.5 < float(first.split()[0]) <= 1.0

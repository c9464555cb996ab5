"""Fine-tuning on several labels a row, on a tag for each word, and on numbers: what transformers
computes from the exported folders, and that a stopped run continues to the same weights.
"""

import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tokenizer_kinds
from labeled_texts import OTHER, PLACES, sentences, write_csv
from mlbert.data.formats.tagged_words import read_tagged, read_task
from mlbert.data.formats.tasks import TaskForm, TaskRows, read_texts
from mlbert.distributed.world import World
from mlbert.host.console import standard_output
from mlbert.models.task_figures import draw_confusion_matrix
from mlbert.models.task_model import TaskCard, predict, read_card, write_predictions
from mlbert.programs import custom_task
from mlbert.programs.task_folder import new_folder
from mlbert.programs.task_guess import find_form
from mlbert.training import loop
from programs import RunMlbert
from user_errors import user_error

FAST = 1e-2 * 32  # rate times hidden size: these rows are learnt in few steps


def texts_with_sets(count: int) -> list[tuple[str, list[str]]]:
    draw = random.Random(0)
    rows = []
    for number in range(count):
        kinds = [kind for kind in PLACES if draw.random() < 0.5]
        words = [word for kind in kinds for word in draw.choices(PLACES[kind], k=2)]
        words += [*draw.choices(OTHER, k=3), f"number{number}"]
        draw.shuffle(words)
        rows.append((" ".join(words), kinds))
    return rows


def write_conll(path: Path, count: int) -> Path:
    """Write texts with one or two entities of one or two words each."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            for kind in draw.sample(list(PLACES), draw.choice([1, 2])):
                file.write(f"{draw.choice(OTHER)} O\n")
                file.write(f"{draw.choice(PLACES[kind])} B-{kind}\n")
                if draw.random() < 0.4:
                    file.write(f"{draw.choice(PLACES[kind])} I-{kind}\n")
            file.write("was O\n\n")
    return path


@pytest.mark.parametrize("model", ["model", pytest.param("bert", marks=pytest.mark.slow)])
def test_sets_of_classes_in_transformers(
    small_models: Path, tmp_path: Path, run_mlbert: RunMlbert, model: str
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    rows = texts_with_sets(60)
    train = tmp_path / "rows.jsonl"
    train.write_text("".join(json.dumps({"text": t, "kinds": k}) + "\n" for t, k in rows))
    words = ["--from", small_models / model, "--train", train, "--label", "kinds"]
    out = tmp_path / "out"
    code, said, err = run_mlbert("finetune", *words, "--epochs", "1", "--out", out)
    assert code == 0, said + err
    assert "label kinds (any number of 3 classes: cold, warm, wet)" in said
    assert all(name in said for name in ("micro F1", "macro F1", "TF-IDF", "this model"))
    exported = out / "run_0/huggingface"
    peer = AutoModelForSequenceClassification.from_pretrained(exported).eval()
    assert peer.config.problem_type == "multi_label_classification"
    assert peer.config.id2label == {0: "cold", 1: "warm", 2: "wet"}
    tokenizer = AutoTokenizer.from_pretrained(exported)
    form = TaskForm(("text",), "labels", kind="set")
    held_out = read_texts(out / "run_0/eval.csv", form)
    with torch.no_grad():
        inputs = tokenizer(held_out.texts[0], padding=True, return_tensors="pt")
        logits = peer(**inputs).logits
    card = read_card(out / "run_0/weights")
    own = predict(out / "run_0/weights", card, held_out, torch.device("cpu"), lambda _: None)
    assert np.abs(logits.sigmoid().numpy() - np.array(own)).max() < 1e-5
    with (out / "run_0/predictions.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    labels = dict(rows)
    assert [line["label"].split("|") for line in lines] == [
        sorted(labels[line["text"]]) or [""] for line in lines
    ]
    assert lines[0]["prediction"] == "|".join(
        name for name, p in zip(card.classes, own[0], strict=True) if p >= 0.5
    )


def test_sets_of_a_text_that_is_called_labels(tmp_path: Path) -> None:
    rows = [(text, "|".join(kinds)) for text, kinds in texts_with_sets(30)]
    train = write_csv(tmp_path / "train.csv", ["labels", "kinds"], *rows)
    asked = custom_task.Asked(
        start=tmp_path,
        train=train,
        held_out=None,
        form=find_form(train, "labels", "kinds", "labels"),
        out=tmp_path / "out",
    )
    run = custom_task._Run(asked, {}, new_folder(asked.out), World(), standard_output())
    given = read_task(train, asked.form)
    run.write_parts(given, custom_task.draw_held_out(given))
    parts = run.read_parts()
    found = {
        text: {part.classes[number] for number in numbers}
        for part in parts
        for text, numbers in zip(part.texts[0], part.label_lists, strict=True)
    }
    assert found == {text: set(kinds.split("|")) - {""} for text, kinds in rows}


def test_sets_are_read_alike(tmp_path: Path) -> None:
    import pandas

    rows = texts_with_sets(40)
    names = list(PLACES)
    lists = pandas.DataFrame(rows, columns=["text", "kinds"])
    joined = lists.assign(kinds=["|".join(kinds) for kinds in lists["kinds"]])
    ones = pandas.DataFrame(
        [[text, *(int(name in kinds) for name in names)] for text, kinds in rows],
        columns=["text", *names],
    )
    lists.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    lists.to_parquet(tmp_path / "b.parquet")
    joined.to_csv(tmp_path / "c.csv", index=False)
    joined.to_csv(tmp_path / "d.tsv", index=False, sep="\t")
    ones.to_csv(tmp_path / "e.csv", index=False)
    ones.astype(dict.fromkeys(names, bool)).to_parquet(tmp_path / "f.parquet")
    found = {}
    for path in sorted(tmp_path.iterdir()):
        label = ",".join(names) if path.name[0] in "ef" else None
        read = read_task(path, find_form(path, None, label, None))
        found[path.name] = [
            (text, {read.classes[number] for number in numbers})
            for text, numbers in zip(read.texts[0], read.label_lists, strict=True)
        ]
    expected = [(text, set(kinds)) for text, kinds in rows]
    assert len(found) == 6
    assert all(rows == expected for rows in found.values())


@pytest.mark.parametrize("model", ["model", pytest.param("bert", marks=pytest.mark.slow)])
def test_tags_of_words_in_transformers(
    small_models: Path, tmp_path: Path, run_mlbert: RunMlbert, assert_fails, monkeypatch, model: str
) -> None:
    from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline

    monkeypatch.setattr(custom_task, "RATE", FAST)
    train = write_conll(tmp_path / "train.conll", 60)
    out = tmp_path / "out"
    words = ["--from", small_models / model, "--train", train, "--out", out, "--epochs", "4"]
    code, said, err = run_mlbert("finetune", *words)
    assert code == 0, said + err
    assert "--predict FILE.jsonl" in said
    assert "words with tags (7: O, B-cold, B-warm, B-wet, I-cold, I-warm, I-wet)" in said
    assert all(name in said for name in ("precision", "each word's most frequent tag"))
    exported = out / "run_0/huggingface"
    peer = AutoModelForTokenClassification.from_pretrained(exported)
    names = {"model": "ModernBertForTokenClassification", "bert": "BertForTokenClassification"}
    assert type(peer).__name__ == names[model]
    texts = (out / "run_0/predictions.conll").read_text().strip().split("\n\n")
    tagger = pipeline(
        "token-classification", peer, tokenizer=AutoTokenizer.from_pretrained(exported)
    )
    seen = set()
    for text in texts:
        word_lines = [line.split(" ") for line in text.split("\n")]
        plain = " ".join(word for word, _, _ in word_lines)
        tags_at = {piece["start"]: piece["entity"] for piece in tagger(plain)}  # without O
        start = 0
        for word, _, tag in word_lines:
            assert tags_at.get(start, "O") == tag
            seen.add(tag)
            start += len(word) + 1
    assert len(seen) > 2, "it has learnt something"

    (tmp_path / "new.txt").write_text("the sun\nwas\n\na river\n")
    predicted = tmp_path / "new.jsonl"
    words = ["--predict", tmp_path / "new.txt", "--model", out / "run_0", "--out", predicted]
    code, said, err = run_mlbert("finetune", *words)
    assert code == 0, err
    lines = [json.loads(line) for line in predicted.read_text().splitlines()]
    assert [line["text"] for line in lines] == ["the was", "a"], "a word is a line's first column"
    before = predicted.read_bytes()
    moved = shutil.copytree(exported, tmp_path / "moved")
    words[3] = moved
    assert run_mlbert("finetune", *words)[0] == 0
    assert predicted.read_bytes() == before, "the folder for transformers is enough"
    table = tmp_path / "new.csv"
    table.write_text("text\nthe sun was\n")
    assert_fails(
        ["finetune", "--predict", table, "--model", out / "run_0"], "file.wrong-kind", table
    )


def test_tags_are_read_alike(tmp_path: Path) -> None:
    conll = write_conll(tmp_path / "a.conll", 30)
    rows = read_tagged(conll, None, skip_bad=False)
    lists = tmp_path / "b.jsonl"
    spans = tmp_path / "c.jsonl"
    with lists.open("w") as as_lists, spans.open("w") as as_spans:
        for words, numbers in zip(rows.words, rows.label_lists, strict=True):
            plain = [word.strip() for word in words]
            tags = [rows.classes[number] for number in numbers]
            as_lists.write(json.dumps({"tokens": plain, "ner_tags": tags}) + "\n")
            found = []
            end = 0
            for word, tag in zip(words, tags, strict=True):
                end += len(word)
                start = end - len(word.strip())
                if tag.startswith("B"):
                    found.append({"start": start, "end": end, "label": tag[2:]})
                elif tag.startswith("I"):
                    found[-1]["end"] = end
            as_spans.write(json.dumps({"text": "".join(words), "spans": found}) + "\n")
    for path in (lists, spans):
        again = read_tagged(path, None, skip_bad=False)
        assert again.texts == rows.texts
        assert again.words == rows.words
        assert again.label_lists == rows.label_lists


def test_numbers_start_at_the_mean_and_keep_their_unit(
    small_models: Path, tmp_path: Path, run_mlbert: RunMlbert
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    rows = [[text, 1000 + 5 * list(PLACES).index(kind)] for text, kind in sentences(60)]
    train = write_csv(tmp_path / "train.csv", ["text", "price"], *rows)
    words = ["--from", small_models / "model", "--train", train, "--numbers", "--epochs", "1"]
    code, said, err = run_mlbert("finetune", *words, "--out", tmp_path / "out")
    assert code == 0, said + err
    scores = {
        line.rsplit(maxsplit=2)[0].strip(): line.split()[-2]
        for line in said.splitlines()
        if line.strip().startswith(("this model", "always the mean"))
    }
    assert float(scores["this model"]) < 1.3 * float(scores["always the mean"])
    exported = tmp_path / "out/run_0/huggingface"
    peer = AutoModelForSequenceClassification.from_pretrained(exported).eval()
    with (tmp_path / "out/run_0/predictions.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    tokenizer = AutoTokenizer.from_pretrained(exported)
    with torch.no_grad():
        inputs = tokenizer([line["text"] for line in lines], padding=True, return_tensors="pt")
        found = peer(**inputs).logits[:, 0].tolist()
    assert found == pytest.approx([float(line["prediction"]) for line in lines], rel=1e-5)


def test_a_stopped_run_continues_to_the_same_weights(
    small_models: Path, tmp_path: Path, run_mlbert: RunMlbert, monkeypatch
) -> None:
    train_one_step = loop.train_one_step
    words = ["--from", small_models / "bert", "--train", small_models / "rows.csv"]
    words += ["--epochs", "2", "--seed", "7"]
    code, said, err = run_mlbert("finetune", *words, "--out", tmp_path / "whole")
    assert code == 0, said + err

    def stopped(run: loop.Run, clock: loop.Clock) -> bool:
        if run.state.step == 13:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_one_step(run, clock)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_one_step", stopped)
        code, said, _ = run_mlbert("finetune", *words, "--out", tmp_path / "parts")
    assert code == 128 + signal.SIGTERM
    assert "a checkpoint is saved. Run the same command to resume." in said
    assert not (tmp_path / "parts/run_0/summary.json").exists()
    code, said, err = run_mlbert("finetune", *words, "--seed", "8", "--out", tmp_path / "parts")
    assert code == 0, err
    assert (tmp_path / "parts/run_1/report.txt").exists(), "another request has its own folder"
    code, said, err = run_mlbert("finetune", *words, "--out", tmp_path / "parts")
    assert code == 0, err
    assert "run_0 was interrupted; resuming" in said
    assert "resumed at step 14" in said
    for name in ("weights/model.safetensors", "predictions.csv", "report.txt"):
        whole = (tmp_path / "whole/run_0" / name).read_bytes()
        assert (tmp_path / "parts/run_0" / name).read_bytes() == whole
    assert not (tmp_path / "parts/run_0/checkpoints").exists()
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["run_0", "run_1"]


@pytest.mark.slow
def test_a_killed_process_continues_to_the_same_weights(
    small_models: Path, tmp_path: Path, run_mlbert: RunMlbert
) -> None:
    words = ["--from", small_models / "model", "--train", small_models / "rows.csv"]
    words += ["--epochs", "3", "--patience", "0"]
    code, said, err = run_mlbert("finetune", *words, "--out", tmp_path / "whole")
    assert code == 0, said + err
    program = (
        "import os, signal, sys\n"
        "from mlbert.cli.main import main\n"
        "from mlbert.training import loop\n"
        "one_step = loop.train_one_step\n"
        "def killed(run, clock):\n"
        "    if run.state.step == 25:\n"
        "        run.snapshots.wait()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return one_step(run, clock)\n"
        "loop.train_one_step = killed\n"
        "main(sys.argv[1:])\n"
    )
    out = tmp_path / "parts"
    command = [sys.executable, "-c", program, "finetune", *map(str, words), "--out", str(out)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    code, said, err = run_mlbert("finetune", *words, "--out", out)
    assert code == 0, err
    assert "resumed at step" in said
    weights = "run_0/weights/model.safetensors"
    assert (out / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()


def test_training_stops_and_keeps_the_best_weights(
    small_models: Path, tmp_path: Path, run_mlbert: RunMlbert, monkeypatch
) -> None:
    monkeypatch.setattr(custom_task, "RATE", FAST)
    words = ["--from", small_models / "model", "--train", small_models / "rows.csv"]
    words += ["--epochs", "12", "--patience", "1", "--out", tmp_path / "out"]
    code, said, err = run_mlbert("finetune", *words)
    assert code == 0, said + err
    summary = json.loads((tmp_path / "out/run_0/summary.json").read_text())
    assert summary["reason"].startswith("no better evaluation since step")
    points = [
        json.loads(line) for line in (tmp_path / "out/run_0/metrics.jsonl").read_text().splitlines()
    ]
    accuracies = [point["eval_accuracy"] for point in points if point["kind"] == "evaluation"]
    assert len(accuracies) < 12
    assert summary["accuracy"] == accuracies[-1] == max(accuracies)


def test_rows_without_a_label_and_the_only_column_left(
    small_models: Path, tmp_path: Path, run_mlbert: RunMlbert, assert_fails
) -> None:
    """The figure warns neither of characters that its font lacks nor of a long name."""
    kinds = {kind: kind.translate({97: "東", 101: "京"}) for kind in PLACES}
    rows = [[text, kinds[kind]] for text, kind in sentences(60)]
    rows[3][1] = rows[40][1] = " "
    train = write_csv(tmp_path / "train.csv", ["comment", "colour of it"], *rows)
    words = ["--from", small_models / "model", "--train", train, "--out", tmp_path / "out"]
    said = assert_fails(["finetune", *words], "data.row", train)
    assert "lines 5, 42 have no label" in said
    assert "--skip-bad" in said
    code, out, err = run_mlbert(
        "finetune", *words, "--skip-bad", "--epochs", "1", "--class-weights"
    )
    assert code == 0, out + err
    assert f"left out: 2 rows of {train}" in out
    assert "text comment; label colour of it (3 classes" in out
    assert "class weights: " in out
    assert "Glyph" not in out + err


def test_labels_that_are_not_numbers_are_listed_or_left_out(tmp_path: Path) -> None:
    """A few words among prices do not make classes of them."""
    rows = [[text, f"{number / 4}"] for number, (text, _) in enumerate(sentences(60))]
    rows[3][1] = "n/a"
    rows[40][1] = "1e99"
    train = write_csv(tmp_path / "train.csv", ["text", "price"], *rows)
    form = find_form(train, None, None, None)
    assert form.num_labels == 1
    with user_error("data.labels", train) as error:
        read_task(train, form)
    assert "lines 5, 42 have labels that are not finite numbers, such as 'n/a'" in str(error.value)
    kept = read_task(train, replace(form, skip_bad=True))
    assert (len(kept), kept.left_out) == (58, 2)
    assert "n/a" not in kept.texts[0]
    assert kept.labels.tolist() == [n / 4 for n in range(60) if n not in (3, 40)]
    assert kept.lines == tuple(n + 2 for n in range(60) if n not in (3, 40))


def test_columns_of_0_and_1_without_a_value(tmp_path: Path) -> None:
    rows = [[text, *(int(k in kinds) for k in PLACES)] for text, kinds in texts_with_sets(20)]
    rows[2][1] = rows[9][3] = ""
    train = write_csv(tmp_path / "train.csv", ["text", *PLACES], *rows)
    form = find_form(train, None, ",".join(PLACES), None)
    with user_error("data.row", train) as error:
        read_task(train, form)
    assert "lines 4, 11 have no label" in str(error.value)
    kept = read_task(train, replace(form, skip_bad=True))
    assert kept.texts[0] == [row[0] for number, row in enumerate(rows) if number not in (2, 9)]


@pytest.mark.parametrize("name", ["prediction", "row", "label"])
def test_a_text_column_is_not_overwritten(tmp_path: Path, name: str) -> None:
    texts = ["a river", "the sun"]
    card = TaskCard(text_columns=(name,), label_column="kind", classes=("x", "y"), max_seq_length=8)
    part = TaskRows(tmp_path / "rows.csv", (texts,), np.array([0, 1], np.float32), ("x", "y"), "")
    write_predictions(tmp_path / "out.csv", [part], [("y", 0.75), ("x", 0.5)], card)
    with (tmp_path / "out.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line[f"{name}_"] for line in lines] == texts
    found = [(line["row"], line["label"], line["prediction"]) for line in lines]
    assert found == [("1", "x", "y"), ("2", "y", "x")]


@pytest.mark.parametrize("kind", ["numbers", "labels", "words"])
def test_class_weights_need_one_class_a_row(
    small_models: Path, tmp_path: Path, assert_fails, kind: str
) -> None:
    train = write_conll(tmp_path / "train.conll", 10)
    if kind != "words":
        label = "a|b" if kind == "labels" else "1.5"
        rows = [[text, label] for text, _ in sentences(20)]
        train = write_csv(tmp_path / "train.csv", ["text", "label"], *rows)
    words = ["--from", small_models / "model", "--train", train, "--out", tmp_path / "out"]
    assert_fails(["finetune", *words, "--class-weights"], "config.conflict", "--class-weights")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["modernbert", "roberta"])
def test_tags_of_words_with_other_tokenizers(
    tmp_path: Path, run_mlbert: RunMlbert, monkeypatch, kind: str
) -> None:
    """Byte pairs: a space belongs to the word after it, and may be its first piece."""
    import transformers

    monkeypatch.setattr(custom_task, "RATE", FAST)
    model = tmp_path / kind
    getattr(tokenizer_kinds, kind)(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=130,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
    )
    config.type_vocab_size = 1
    transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(model)
    train = write_conll(tmp_path / "train.conll", 60)
    out = tmp_path / "out"
    words = ["--from", model, "--train", train, "--out", out, "--epochs", "6"]
    code, said, err = run_mlbert("finetune", *words)
    assert code == 0, said + err
    exported = out / "run_0/huggingface"
    tagger = transformers.pipeline("token-classification", str(exported), ignore_labels=[])
    seen = set()
    for text in (out / "run_0/predictions.conll").read_text().strip().split("\n\n"):
        lines = [line.split(" ") for line in text.split("\n")]
        plain = " ".join(word for word, _, _ in lines)
        tags_at: dict[int, str] = {}
        for piece in tagger(plain):
            start = piece["start"] + (plain[piece["start"]] == " ")
            tags_at.setdefault(start, piece["entity"])
        start = 0
        for word, _, tag in lines:
            assert tags_at[start] == tag
            seen.add(tag)
            start += len(word) + 1
    assert len(seen) > 2, "it has learnt something"


@pytest.mark.filterwarnings("error")
def test_long_names_fit_the_figure(tmp_path: Path) -> None:
    draw_confusion_matrix(tmp_path / "figure.png", np.eye(2, dtype=np.int64), ["x" * 300, "y"])
    assert (tmp_path / "figure.png").stat().st_size > 1000

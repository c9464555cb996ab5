"""Tasks' files: every form gives the same rows, damage is named with its line;
GLUE's files, fetched or made here.
"""

import csv
import datetime
import itertools
import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from mlbert.data.formats.glue_tasks import TASKS
from mlbert.data.formats.tasks import (
    TaskForm,
    column_names,
    form_of_task,
    read_columns,
    read_evaluation,
    read_texts,
    read_training,
)
from mlbert.data.prepare import glue_download, glue_files, glue_stand_ins
from mlbert.data.prepare.python_text import documents_by_file
from stored_sets import tree
from user_errors import user_error

FORM = TaskForm(("text",), "label")
# Column names of Hugging Face's copy.
TEXTS = {
    "mnli": ("premise", "hypothesis"),
    "stsb": ("sentence1", "sentence2"),
    "cola": ("sentence",),
}


def write(folder: Path, text: str, name: str = "train.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8", newline="")
    return path


fields = st.text(
    st.characters(codec="utf-8", exclude_characters="\0\r", exclude_categories=("Cs",)), max_size=12
)


@given(rows=st.lists(st.tuples(fields, fields), min_size=1, max_size=8))
def test_quoted_csv_and_json_bring_every_text_back(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("forms")
    with (folder / "rows.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *rows])
    lines = [json.dumps({"b": b, "a": a, "more": 1}) for a, b in rows]
    write(folder, "\n".join(lines) + "\n", "rows.jsonl")
    write(folder, f"[{','.join(lines)}]", "rows.json")
    for name in ("rows.csv", "rows.jsonl", "rows.json"):
        table = read_columns(folder / name, ("b", "a"))
        assert list(zip(*reversed(table.columns), strict=True)) == rows, name


def test_quotes_hold_separators_and_line_breaks(tmp_path: Path) -> None:
    text = '\ufefftext,label\r\n"one, ""two""\nthree",yes\r\nfour,no\r\n\r\nfive,yes\r\n'
    table = read_columns(write(tmp_path, text), ("text",))
    assert table.columns == [['one, "two"\nthree', "four", "five"]]
    assert table.lines == [2, 4, 6]
    semicolons = write(tmp_path, 'text;label\n"one; two, three";yes\n')
    assert read_columns(semicolons, ("text",)).columns == [["one; two, three"]]
    tabs = write(tmp_path, 'text\tlabel\n"one\ttwo, three"\tyes\n', "TRAIN.CSV")
    assert read_columns(tabs, ("text",)).columns == [["one\ttwo, three"]]


def test_tsv_knows_no_quotes(tmp_path: Path) -> None:
    path = write(tmp_path, 'text\tlabel\nsay "so\t1\n"\t0\n', "x.tsv")
    assert read_columns(path, ("text", "label")).columns == [['say "so', '"'], ["1", "0"]]
    assert column_names(path) == ["text", "label"]


def test_classes_are_sorted_and_those_of_training(tmp_path: Path) -> None:
    train = write(tmp_path, "text,label\nx,no\ny,maybe\nz,yes\n")
    rows = read_training(train, FORM)
    assert rows.classes == ("maybe", "no", "yes")
    assert rows.labels.tolist() == [1, 0, 2]
    evaluation = read_evaluation(
        write(tmp_path, "text,label\nq,yes\n", "dev.csv"), FORM, rows.classes
    )
    assert evaluation.labels.tolist() == [2]
    unknown = write(tmp_path, "text,label\nx,yes\ny,yess\n", "dev.csv")
    with user_error("data.labels", unknown):
        read_evaluation(unknown, FORM, rows.classes)
    numbers = read_training(write(tmp_path, "text,label\nx,10\ny,9\nz,2\n"), FORM)
    assert numbers.classes == ("2", "9", "10")
    assert read_texts(train, FORM).labels is None


def test_a_declared_class_without_rows_is_a_warning(tmp_path: Path) -> None:
    path = write(tmp_path, "text,label\nx,0\ny,2\n")
    rows = read_training(path, TaskForm(("text",), "label", 4))
    assert rows.classes == ("0", "1", "2", "3")
    assert [line.split(": ")[-1] for line in rows.warnings] == [
        "no row has the class '1'",
        "no row has the class '3'",
    ]


@pytest.mark.parametrize(
    ("text", "form", "code", "named"),
    [
        ("", FORM, "data.empty", ""),
        ("text,label\n", FORM, "data.empty", ""),
        ("txt,label\nx,1\n", FORM, "data.columns", "txt?"),
        ("text,label\nx,1\ny,0,more\n", FORM, "data.row", "line 3"),
        ("text,label\nx,1\ny\n", FORM, "data.row", "line 3"),
        ('text,label\nx,1\n"y,0\nz,1\n', FORM, "data.row", "line 3"),
        ("text,label\nx,1\ny,\n", FORM, "data.row", "line 3"),
        ("text,label\nx,1\ny,1\n", FORM, "data.labels", "'1'"),
        ("text,label\nx,a\ny,b\nz,c\n", TaskForm(("text",), "label", 2), "data.labels", "line 4"),
        ("text,label\nx,a\ny,b\n", TaskForm(("text",), "label", 3), "data.labels", "(a, b)"),
        ("text,label\nx,1.5\ny,nan\n", TaskForm(("text",), "label", 1), "data.labels", "line 3"),
        ("text,label\nx,1.5\ny,good\n", TaskForm(("text",), "label", 1), "data.labels", "line 3"),
        ("a,label\nx,1\n", TaskForm(("a", "b"), "label"), "data.columns", "'b'"),
        ("text,label,text\nx,1,z\ny,0,z\n", FORM, "data.columns", "'text'"),
        ("text,label,label\nx,1,z\ny,0,z\n", FORM, "data.columns", "'label'"),
        ("good,yes\nbad,no\nfine,yes\n", TaskForm(("good",), "yes"), "data.columns", "'yes'"),
        ("good,1\nbad,0\nfine,1\n", TaskForm(("good",), "1"), "data.columns", "'1'"),
        ("good,4.5\nbad,1\n", TaskForm(("good",), "4.5", 1), "data.columns", "'4.5'"),
    ],
)
def test_damage_is_reported_in_one_line(
    tmp_path: Path, text: str, form: TaskForm, code: str, named: str
) -> None:
    path = write(tmp_path, text)
    with user_error(code, path) as error:
        read_training(path, form)
    assert named in str(error.value)
    if not text:
        with user_error(code, path):
            column_names(path)


def test_columns_that_pandas_numbered_are_named(tmp_path: Path) -> None:
    rows = read_training(write(tmp_path, "0,1\ngood,1\nbad,0\n"), TaskForm(("0",), "1"))
    assert rows.texts == (["good", "bad"],)


def test_a_model_of_a_file_without_header_reads_no_other(tmp_path: Path) -> None:
    form = TaskForm(("good",), "yes", 2, ("no", "yes"))
    path = write(tmp_path, "good,yes\nbad,no\n")
    with user_error("data.columns", path):
        read_texts(path, form)
    objects = write(tmp_path, '{"good": "some text", "yes": "no"}\n', "rows.jsonl")
    assert read_texts(objects, form).texts == (["some text"],)


def test_rows_without_text_are_counted_by_column(tmp_path: Path) -> None:
    path = write(tmp_path, "a,b,label\nx,,0\n ,y,1\nz,,1\nu,v,0\n")
    form = TaskForm(("a", "b"), "label")
    expected = ["1 of 4 rows have no text in 'a'", "2 of 4 rows have no text in 'b'"]
    for rows in (
        read_training(path, form),
        read_evaluation(path, form, ("0", "1")),
        read_texts(path, form),
    ):
        assert rows.warnings == tuple(f"warning: {path}: {what}" for what in expected)


def test_types_of_parquet_that_json_does_not_have(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    day = datetime.date(2024, 2, 29)
    table = {"text": ["a"], "label": [Decimal("1.5")], "day": [day], "raw": [b"a"]}
    parquet.write_table(pyarrow.table(table), file)
    assert read_columns(file, ["text", "label", "day"]).columns == [["a"], ["1.5"], ["2024-02-29"]]
    with user_error("data.row", file):
        read_columns(file, ["raw", "label"])


def test_a_class_of_a_set_with_a_separator_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a", "label": ["folk", "soul|funk"]}\n')
    with user_error("data.labels", file):
        read_training(file, TaskForm(("text",), "label", kind="set"))


def test_damaged_bytes(tmp_path: Path) -> None:
    for name, content, code, named in (
        ("x.jsonl", b'{"text": "x"\n', "data.row", "line 1"),
        ("x.jsonl", b'{"text": "x", "label": 1}\n\n{"text": }\n', "data.row", "line 3"),
        ("x.json", b'[{"text": "x", "label": 1},\n{"text": }]\n', "data.row", "line 2"),
        ("x.jsonl", b'{"text": "x", "label": ' + b"[" * 20_000, "data.row", ""),
        ("x.jsonl", b'{"text": ["x"], "label": 1}', "data.row", "line 1"),
        ("x.jsonl", b"[1]\n", "data.row", "line 1"),
        ("x.jsonl", b'{"text": "x"}\n{"tex": "y"}\n', "data.columns", "line 2"),
        ("x.csv", b"text\nx\n\xff\n", "data.encoding", "line 3"),
        ("x.xlsx", b"", "data.format", ""),
        ("x.parquet", b"", "data.damaged", "pyarrow"),
    ):
        (tmp_path / name).write_bytes(content)
        # pyarrow's words depend on its version
        with user_error(code, tmp_path / name, wording=code != "data.damaged") as error:
            read_columns(tmp_path / name, ("text",))
        assert named in str(error.value)
    with user_error("file.unreadable", tmp_path / "none.csv"):
        read_columns(tmp_path / "none.csv", ("text",))


@pytest.mark.parametrize("name", TASKS)
def test_glues_official_forms(tmp_path: Path, name: str) -> None:
    """The table's columns read what is written in the official form, quotes and all."""
    task = TASKS[name]
    labels = [task.classes[-1]] * 3 if task.classes else ["3.250", "3.250", "5.000"]
    rows = [(tuple(f'{column} "{n}' for column in task.texts), labels[n]) for n in range(3)]
    form = form_of_task(name)
    glue_files.write_file(task.train_file(tmp_path), task, rows)
    with task.train_file(tmp_path).open("a") as file:
        file.write("a row\tof\ta wrong number of fields\n" if name != "cola" else "a row\n")
    found = read_training(task.train_file(tmp_path), form)
    assert list(zip(*found.texts, strict=True)) == [texts for texts, _ in rows]
    assert "1 rows have a wrong number of fields" in found.warnings[0]
    for path in task.evaluation_files(tmp_path).values():
        glue_files.write_file(path, task, rows)
        expected = [len(task.classes) - 1] * 3 if task.classes else [3.25, 3.25, 5]
        assert np.array_equal(read_evaluation(path, form, task.classes).labels, expected)


@pytest.mark.parametrize("name", TEXTS)
def test_fetched_rows_are_read_as_official_files(name, tmp_path, monkeypatch, capsys):
    import datasets

    labels = [0, 1, len(TASKS[name].classes) - 1] if TASKS[name].classes else [0.5, 3.25, 5.0]
    asked = []

    def load(path: str, task: str, split: str) -> datasets.Dataset:
        asked.append((path, task, split))
        texts = {column: [f"{split} {column}", "a\ttab", "a\nline"] for column in TEXTS[name]}
        return datasets.Dataset.from_dict({**texts, "label": labels, "idx": [0, 1, 2]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(glue_download, "hub_problem", lambda: None)
    glue_download.fetch(tmp_path, [name])
    task = TASKS[name]
    form = form_of_task(name)
    train = read_training(task.train_file(tmp_path), form)
    assert train.labels.tolist() == labels
    assert [texts[1:] for texts in train.texts] == [["a tab", "a line"]] * len(TEXTS[name])
    assert [texts[0] for texts in train.texts] == [f"train {column}" for column in TEXTS[name]]
    splits = [
        "train",
        *(["validation_matched", "validation_mismatched"] if name == "mnli" else ["validation"]),
    ]
    assert asked == [("nyu-mll/glue", name, split) for split in splits]
    for path in task.evaluation_files(tmp_path).values():
        assert read_evaluation(path, form, train.classes).texts[0][0].startswith("validation")
    glue_download.fetch(tmp_path, [name])
    assert len(asked) == len(splits), "what is there stays"
    assert capsys.readouterr().out.count("wrote ") == len(splits)


def test_without_a_network_one_line_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with user_error("network.unreachable", "RTE/train.tsv"):
        glue_download.fetch(tmp_path, ["rte"])
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("python glue")
    again = tmp_path_factory.mktemp("again")
    documents = list(itertools.islice(documents_by_file(), 250))  # all take seconds
    for place in (folder, again):
        glue_stand_ins.make(place, 0.1, documents)
        assert glue_files.is_complete(place)
    assert tree(folder) == tree(again)
    return folder


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_rows_of_every_class(made: Path, name: str) -> None:
    task = TASKS[name]
    form = form_of_task(name)
    train = read_training(task.train_file(made), form)
    assert (train.warnings, train.classes) == ((), task.classes)
    for path in task.evaluation_files(made).values():
        rows = read_evaluation(path, form, train.classes)
        if task.classes:
            assert len(set(rows.labels.tolist())) == len(task.classes)
        if name != "qnli":  # its sentences may be asked about twice
            assert not set(zip(*rows.texts, strict=True)) & set(zip(*train.texts, strict=True))


def test_labels_follow_from_the_texts(made: Path) -> None:
    assert len(list(made.rglob("*.tsv"))) == 17
    rows, scores = (
        read_training(TASKS[name].train_file(made), form_of_task(name)) for name in ("qnli", "stsb")
    )
    for question, sentence, label in zip(*rows.texts, rows.labels, strict=True):
        assert (question in sentence) == (label == 0)
    for first, second, label in zip(*scores.texts, scores.labels, strict=True):
        a = set(first.split())
        b = set(second.split())
        assert label == pytest.approx(5 * len(a & b) / len(a | b), abs=1e-3)

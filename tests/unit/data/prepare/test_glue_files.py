"""GLUE through the datasets library: its rows become the official files; without a network one line says so."""

import itertools
from pathlib import Path

import pytest

from mlbert.data.formats.glue import TASKS
from mlbert.data.formats.tasks import form_of_task, read_evaluation, read_training
from mlbert.data.prepare import glue_files
from mlbert.data.prepare.python_text import documents_by_file
from stored_sets import tree
from user_errors import user_error

# Column names of Hugging Face's copy.
TEXTS = {"mnli": ("premise", "hypothesis"), "stsb": ("sentence1", "sentence2"), "cola": ("sentence",)}


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
    monkeypatch.setattr(glue_files, "hub_problem", lambda: None)
    glue_files.fetch(tmp_path, [name])
    task, form = TASKS[name], form_of_task(name)
    train = read_training(task.train_file(tmp_path), form)
    assert train.labels.tolist() == labels
    assert [texts[1:] for texts in train.texts] == [["a tab", "a line"]] * len(TEXTS[name])
    assert [texts[0] for texts in train.texts] == [f"train {column}" for column in TEXTS[name]]
    splits = ["train", *(["validation_matched", "validation_mismatched"] if name == "mnli" else ["validation"])]
    assert asked == [("nyu-mll/glue", name, split) for split in splits]
    for path in task.evaluation_files(tmp_path).values():
        assert read_evaluation(path, form, train.classes).texts[0][0].startswith("validation")
    glue_files.fetch(tmp_path, [name])
    assert len(asked) == len(splits), "what is there stays"
    assert capsys.readouterr().out.count("wrote ") == len(splits)


def test_without_a_network_one_line_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with user_error("network.unreachable", "nyu-mll/glue rte"):
        glue_files.fetch(tmp_path, ["rte"])
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, again = tmp_path_factory.mktemp("python glue"), tmp_path_factory.mktemp("again")
    documents = list(itertools.islice(documents_by_file(), 250))  # all take seconds
    for place in (folder, again):
        glue_files.make(place, 0.1, documents)
        assert glue_files.is_complete(place)
    assert tree(folder) == tree(again)
    return folder


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_rows_of_every_class(made: Path, name: str) -> None:
    task, form = TASKS[name], form_of_task(name)
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
    rows, scores = (read_training(TASKS[name].train_file(made), form_of_task(name)) for name in ("qnli", "stsb"))
    for question, sentence, label in zip(*rows.texts, rows.labels, strict=True):
        assert (question in sentence) == (label == 0)
    for first, second, label in zip(*scores.texts, scores.labels, strict=True):
        a, b = set(first.split()), set(second.split())
        assert label == pytest.approx(5 * len(a & b) / len(a | b), abs=1e-3)

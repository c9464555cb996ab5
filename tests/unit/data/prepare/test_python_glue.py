"""Stand-ins for GLUE: the same files again, labels that mean what they say, nothing of evaluation in training."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlbert.data.formats.glue import TASKS
from mlbert.data.formats.tasks import form_of_task, read_evaluation, read_training
from mlbert.data.prepare import glue_files

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("python glue")
    glue_files.make(folder, size=0.1)
    return folder


def test_the_same_files_again(made: Path, tmp_path: Path) -> None:
    assert glue_files.is_complete(made)
    glue_files.make(tmp_path, size=0.1)
    files = sorted(path.relative_to(made) for path in made.rglob("*.tsv"))
    assert len(files) == 17
    assert all((made / name).read_bytes() == (tmp_path / name).read_bytes() for name in files)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_rows_of_every_class(made: Path, name: str) -> None:
    task, form = TASKS[name], form_of_task(name)
    train = read_training(task.train_file(made), form)
    assert train.warnings == ()
    assert train.classes == task.classes
    for path in task.evaluation_files(made).values():
        rows = read_evaluation(path, form, train.classes)
        if task.classes:
            assert rows.labels is not None
            assert len(set(rows.labels.tolist())) == len(task.classes)
        if name not in ("qnli",):  # its sentences may be asked about twice
            assert not set(zip(*rows.texts, strict=True)) & set(zip(*train.texts, strict=True))


def test_labels_follow_from_the_texts(made: Path) -> None:
    rows = read_training(TASKS["qnli"].train_file(made), form_of_task("qnli"))
    assert rows.labels is not None
    for question, sentence, label in zip(*rows.texts, rows.labels, strict=True):
        assert (question in sentence) == (label == 0)
    scores = read_training(TASKS["stsb"].train_file(made), form_of_task("stsb"))
    assert scores.labels is not None
    for first, second, label in zip(*scores.texts, scores.labels, strict=True):
        a, b = set(first.split()), set(second.split())
        assert label == pytest.approx(5 * len(a & b) / len(a | b), abs=1e-3)

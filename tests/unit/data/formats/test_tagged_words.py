"""Tagged words: what could be read as something else is an error, not a class or a lost word."""

from pathlib import Path

import pytest

from mlbert.data.formats.tagged_words import read_tagged, read_untagged
from mlbert.data.formats.tasks import TaskForm
from mlbert.models.task_model import TaskCard, write_predictions
from user_errors import user_error


@pytest.mark.parametrize(
    "row",
    [
        '{"words": ["Ada", "sings"], "tags": ["B-PER", null]}',
        '{"words": ["Ada", "sings"], "tags": ["B-PER", {"id": 0}]}',
        '{"text": "Ada sings", "words": [[0, 3], [4, 900]], "tags": ["B-PER", "O"]}',
        '{"text": "Ada sings", "words": [[0, 3], [4, -1]], "tags": ["B-PER", "O"]}',
        '{"text": "Ada sings", "words": [[4, 9], [0, 3]], "tags": ["O", "B-PER"]}',
        '{"text": "Ada sings", "words": [[0, 3], 4], "tags": ["B-PER", "O"]}',
    ],
)
def test_what_is_no_tag_or_place_is_one_line(tmp_path: Path, row: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{row}\n")
    with user_error("data.row", file):
        read_tagged(file, None, skip_bad=False)


def test_a_number_sign_inside_of_a_text_is_a_word(tmp_path: Path) -> None:
    file = tmp_path / "rows.conll"
    file.write_text("# sent_id = 1\nUse O\n# O\nAda B-PER\n\n# sent_id = 2\nYes O\n")
    rows = read_tagged(file, None, skip_bad=False)
    assert rows.words == [["Use", " #", " Ada"], ["Yes"]]
    assert rows.label_lists == [[0, 0, 1], [0]]
    assert rows.classes == ("O", "B-PER")


def test_unpaired_surrogates_can_be_encoded(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"words": ["\\ud800x", "b"]}\n{"text": "\\ud800x"}\n')
    form = TaskForm(("text",), "label", None, kind="tags", classes=("O", "B-PER"))
    assert read_untagged(file, form).texts == (["?x b", "?x"],)


def test_a_predicted_word_with_a_space_is_one_column(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"words": ["New York", "", "\\u00a0is"], "tags": ["B-LOC", "O", "O"]}\n')
    rows = read_tagged(file, None, skip_bad=False)
    card = TaskCard(
        text_columns=("text",),
        label_column="label",
        classes=rows.classes,
        max_seq_length=8,
        kind="tags",
    )
    written = tmp_path / "predictions.conll"
    write_predictions(written, [rows], [["B-LOC", "O", "B-LOC"]], card)
    read = read_tagged(written, rows.classes, skip_bad=False)
    assert read.words == [["New_York", " _", " is"]]
    assert read.label_lists == [[1, 0, 1]]

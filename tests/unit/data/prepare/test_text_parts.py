"""Text parts: found in files and folders, sorted, and refused if they are missing or invalid."""

import hashlib
from pathlib import Path

import pytest

from mlbert.data.prepare.text_parts import expand_inputs, inspect_parts
from programs import write_files
from user_errors import user_error


def make(folder: Path, *names: str) -> Path:
    return write_files(folder, {name: f"text of {name}\n" for name in names})


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_a_folder_gives_its_parts_sorted_or_has_none(tmp_path):
    folder = make(
        tmp_path / "parts",
        "part-00001-of-00002",
        "part-00000-of-00002",
        "more.txt",
        # No parts:
        "eval.txt",
        "eval_2.txt",
        "part-00000.md5",
        "notes.md",
        "part-00000-of-00002.tfrecord",
        "x.txt.tmp",
    )
    (folder / "part-00003").mkdir()
    assert names(expand_inputs([folder])) == [
        "more.txt",
        "part-00000-of-00002",
        "part-00001-of-00002",
    ]
    with user_error("data.missing", tmp_path / "text"):
        expand_inputs([make(tmp_path / "text", "eval.txt")])
    one = make(tmp_path / "one", "eval.txt", "b")
    two = make(tmp_path / "two", "a.txt")
    assert names(expand_inputs([one / "eval.txt", two, one / "b"])) == ["eval.txt", "a.txt", "b"], (
        "the order given"
    )


@pytest.mark.parametrize("name", ["part-{}-of-00004", "train-{}-of-00004.txt"])
def test_missing_parts_of_a_folder(tmp_path, name):
    folder = make(tmp_path / "text", name.format("00000"), name.format("00003"))
    with user_error("data.incomplete", folder):
        expand_inputs([folder])
    expanded = expand_inputs([folder], skip_bad=True)
    assert names(expanded) == [name.format(f"{index:05d}") for index in range(4)]
    assert [bool(part.problem) for part in inspect_parts(expanded, skip_bad=True)] == [
        False,
        True,
        True,
        False,
    ]
    assert len(expand_inputs([folder / name.format("00000")])) == 1


def test_invalid_parts_are_refused(tmp_path):
    folder = write_files(
        tmp_path / "text", {"a": "a", "copy": "a", "b": "b", "empty": "", "empty_too": ""}
    )
    paths = [folder / name for name in ("b", "a", "empty", "copy", "empty_too", "absent", "a", ".")]
    codes = [None, None, "data.empty", "data.duplicate", "data.empty"]
    codes += ["file.unreadable", "data.duplicate", "file.wrong-kind"]
    for path, code in zip(paths, codes, strict=True):
        if code:
            with user_error(code, path):
                inspect_parts([folder / "a", path])
    found = inspect_parts(paths, skip_bad=True)
    assert (found[0].num_bytes, found[0].sha256) == (1, hashlib.sha256(b"b").hexdigest())
    assert [part.problem and part.problem.code for part in found] == codes
    with user_error("data.damaged", "--input"):
        inspect_parts([folder / "empty", folder / "empty_too"], skip_bad=True)
    with user_error("data.missing", "--input"):
        inspect_parts([])

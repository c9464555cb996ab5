"""Files and folders become text parts; what is wrong with them is said before any work."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from mlbert.data.prepare.jobs import Executor, expand_inputs, inspect_parts
from user_errors import user_error


def make(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text(f"text of {name}\n")
    return folder


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_a_folder_gives_its_parts_sorted(tmp_path):
    others = ("eval.txt", "eval_2.txt", "part-00000.md5", "notes.md", "part-00000-of-00002.tfrecord", "x.txt.tmp")
    folder = make(tmp_path / "text", "part-00001-of-00002", "part-00000-of-00002", "more.txt", *others)
    (folder / "part-00003").mkdir()
    assert names(expand_inputs([folder])) == ["more.txt", "part-00000-of-00002", "part-00001-of-00002"]


def test_files_are_read_in_the_order_given(tmp_path):
    one, two = make(tmp_path / "one", "eval.txt", "b"), make(tmp_path / "two", "a.txt")
    assert names(expand_inputs([one / "eval.txt", two, one / "b"])) == ["eval.txt", "a.txt", "b"]


def test_a_folder_without_parts(tmp_path):
    with user_error("data.missing", tmp_path / "text"):
        expand_inputs([make(tmp_path / "text", "eval.txt")])


@pytest.mark.parametrize("name", ["part-{}-of-00004", "train-{}-of-00004.txt"])
def test_missing_parts_of_a_folder(tmp_path, name):
    folder = make(tmp_path / "text", name.format("00000"), name.format("00003"))
    with user_error("data.incomplete", folder):
        expand_inputs([folder])
    expanded = expand_inputs([folder], skip_bad=True)
    assert names(expanded) == [name.format(f"{index:05d}") for index in range(4)]
    assert [bool(part.problem) for part in inspect_parts(expanded, skip_bad=True)] == [False, True, True, False]
    assert len(expand_inputs([folder / name.format("00000")])) == 1


def test_sizes_and_checksums(tmp_path):
    folder = make(tmp_path / "text", "a.txt", "b.txt")
    for part in inspect_parts(expand_inputs([folder]), executor=Executor(workers=2)):
        assert part.num_bytes == part.path.stat().st_size
        assert part.sha256 == hashlib.sha256(part.path.read_bytes()).hexdigest()
        assert part.problem is None


def test_invalid_parts_are_refused(tmp_path):
    folder = make(tmp_path / "text", "a", "b")
    (folder / "copy").write_bytes((folder / "a").read_bytes())
    (folder / "empty").write_bytes(b"")
    (folder / "empty_too").write_bytes(b"")
    paths = [folder / name for name in ("b", "a", "empty", "copy", "empty_too", "absent", "a", ".")]
    codes = [None, None, "data.empty", "data.duplicate", "data.empty", "file.unreadable", "data.duplicate"]
    codes.append("file.wrong-kind")
    for path, code in zip(paths, codes, strict=True):
        if code:
            with user_error(code, path):
                inspect_parts([folder / "a", path])
    found = inspect_parts(paths, skip_bad=True)
    assert [part.problem and part.problem.code for part in found] == codes
    with user_error("data.damaged", "--input"):
        inspect_parts([folder / "empty", folder / "empty_too"], skip_bad=True)
    with user_error("data.missing", "--input"):
        inspect_parts([])

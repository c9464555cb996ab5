"""Where a run's code came from."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from mlbert.core import provenance


def _git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "file.txt").write_text("a\n")
    _git(tmp_path, "init")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-m", "first")
    return tmp_path


def test_the_tree_holds_this_package() -> None:
    root = provenance.tree_root()
    assert (root / "benchmarks/bert/implementations/pytorch/mlbert/core/provenance.py").is_file()


def test_commit_and_dirt(checkout: Path) -> None:
    commit, dirty = provenance.git_state(checkout)
    assert len(commit) == 40
    assert not dirty
    (checkout / "file.txt").write_text("b\n")
    assert provenance.git_state(checkout) == (commit, True)


def test_a_folder_inside_another_checkout_is_not_that_checkout(checkout: Path) -> None:
    inner = checkout / "inner"
    inner.mkdir()
    assert provenance.git_state(inner) == ("unknown", False)


def test_an_export_states_its_commit(tmp_path: Path) -> None:
    (tmp_path / provenance.SOURCE_STATEMENT).write_text(json.dumps({"commit": "abc", "dirty": True}))
    assert provenance.git_state(tmp_path) == ("abc", True)
    (tmp_path / provenance.SOURCE_STATEMENT).write_text("[]")
    assert provenance.git_state(tmp_path) == ("unknown", False)


def test_without_git(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert provenance.git_state(checkout) == ("unknown", False)


def test_facts_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONT", "image:1")
    monkeypatch.setenv("MLBERT_IMAGE_COMMIT", "c0ffee")
    monkeypatch.setenv("MLBERT_IMAGE_DIGEST", "sha256:5eed")
    facts = provenance.provenance(data_manifest_sha256="f00")
    assert (facts["image"], facts["image_commit"], facts["image_digest"]) == ("image:1", "c0ffee", "sha256:5eed")
    assert facts["data_manifest_sha256"] == "f00"
    assert facts["version_torch"] != "unknown"
    assert all(type(value) in (str, bool) for value in facts.values())

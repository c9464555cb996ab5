"""A log of another program, and one of this code in a tree."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from audit import copy_of_ours
from logger_logs import write_log
from mlaudit.cli.main import main


@pytest.fixture
def run_mlaudit(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return run(*words), which runs `mlaudit` in this process and returns its status, output and
    errors.
    """

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def as_json(run_mlbert: Callable[..., tuple[int, str, str]]) -> Callable[..., dict[str, Any]]:
    """Return plan(*words), which runs ``mlbert plan … --json`` and returns what it prints."""

    def plan(*words: object) -> dict[str, Any]:
        code, out, err = run_mlbert("plan", *words, "--json")
        assert code == 0, err
        return json.loads(out)

    return plan


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "result_0.txt")


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """Return a good open log of this code, in a tree."""
    return copy_of_ours(tmp_path)[0]

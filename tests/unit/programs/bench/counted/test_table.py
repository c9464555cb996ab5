"""`mlbert bench step --model`: the table, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from user_errors import assert_error_line

pytest.importorskip("triton", reason="Triton is not installed")

from mlbert.cli.main import main


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["bench", "step", "--config", "demo", *words])
    return int(end.value.code or 0)


def test_the_table_says_that_it_is_modelled_and_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record.json"
    assert run("--model", "h200", "--packs", "8", "--json", str(record)) == 0
    told = capsys.readouterr().out
    assert "modelled, not measured" in told
    assert "sequences/s" in told
    rows = json.loads(record.read_text())
    assert [(row["precision"], row["sequences"]) for row in rows] == [("bf16", 16), ("fp8", 16)]
    for row in rows:
        assert f"{sum(row['milliseconds'].values()):.1f}" in told
        assert row["milliseconds"].keys() == row["launches"].keys() == row["gigabytes"].keys()


def test_a_gpu_without_rates_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "b200") == 2
    assert_error_line(capsys.readouterr().err, "config.choice", "--model")

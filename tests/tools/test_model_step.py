"""tools/model_step.py: the table, and rejected arguments."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from model_step import main


def test_table_is_marked_as_modelled_and_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record.json"
    main(["--config", "demo", "--gpu", "h200", "--packs", "8", "--json", str(record)])
    printed = capsys.readouterr().out
    assert "modelled with measured rates" in printed
    assert "sequences/s" in printed
    rows = json.loads(record.read_text())
    assert [(row["precision"], row["sequences"]) for row in rows] == [("bf16", 16), ("fp8", 16)]
    for row in rows:
        assert f"{sum(row['milliseconds'].values()):.1f}" in printed
        assert row["milliseconds"].keys() == row["launches"].keys() == row["gigabytes"].keys()

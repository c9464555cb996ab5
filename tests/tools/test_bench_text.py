"""tools/bench_text.py on a small set."""

import json
from pathlib import Path

import pytest

import bench_text
from text_sets import random_texts, write_texts


def test_record_is_complete_and_consistent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_text, "SEQUENCES", 8)
    monkeypatch.setattr(bench_text, "STEPS", 10)
    folder = write_texts(tmp_path / "set", random_texts(60, most_words=200))
    record = json.loads(json.dumps(bench_text.run(folder, rounds=2)))
    assert record["texts"] == 60
    assert record["tokenising"]["compiled MB/s"]["least"] > 0
    assert 0 < record["share of tokens that truncation drops"] < 1
    for mode in ("truncate", "split"):
        for start in ("first", "tokenised"):
            speeds = record[f"{mode}, {start}"]
            assert speeds["sequences/s"]["least"] > 0
            assert speeds["longest wait ms"]["median"] >= speeds["99th percentile of waits ms"]["least"]
    assert record["truncate, evaluation set"]["sequences"] == 60

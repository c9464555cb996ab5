"""The comparison of TensorFlow's step implementations times all sides."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from programs import run_checked


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed (the tf extra)")
def test_every_side_is_timed(tree_root: Path, tmp_path: Path) -> None:
    words = ["--config", "demo", "--sequences", "6", "--pairs", "1", "--json", str(tmp_path / "record.json")]
    run_checked(sys.executable, tree_root / "tools/bench_tensorflow2.py", *words)
    record = json.loads((tmp_path / "record.json").read_text())
    names = list(record["seconds"])
    assert [name.partition(":")[0] for name in names] == [
        *("tensorflow padded", "tensorflow padded + xla", "tensorflow packed", "tensorflow packed + xla"),
        "pytorch, OPS=plain",
    ]
    assert names[0].endswith("6 rows")
    assert int(names[2].split()[-2]) < 6
    assert record["times_as_fast_as_padded"][names[0]] == [1.0]

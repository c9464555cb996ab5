"""Files of a run are found in a LOGDIR and in a tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlbert.mlperf.result_set import NAMES, run_file


@pytest.mark.parametrize("place", ["bert/run_3/{}", "run_3.{}"])
def test_a_runs_file_is_found_next_to_its_log(tmp_path: Path, place: str) -> None:
    log = tmp_path / "bert" / "result_3.txt"
    for name in NAMES:
        file = tmp_path / place.format(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
        assert run_file(log, name) == file
        assert run_file(log.with_name("result_4.txt"), name) is None
        assert run_file(log.with_name("other.txt"), name) is None

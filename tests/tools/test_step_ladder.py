"""tools/step_ladder.py on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import step_ladder
from gpu_check.parts import tiny_scale


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: with small tensors, several threads mostly wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_profile_of_a_custom_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --profile the rows are those of the GPU check, which test_gpu_check.py covers."""
    shape, out = tmp_path / "bert_config.json", tmp_path / "rows.json"
    shape.write_text(json.dumps(asdict(tiny_scale().config)))
    words = ["--config", str(shape), "--packs", "2", "--device", "cpu", "--json", str(out), "--profile"]
    assert step_ladder.main(words) == 0
    groups = json.loads(out.read_text())["rows"]["all fast ops"]["groups"]
    assert groups["GEMM"]["seconds"] > 0
    assert "GEMM" in capsys.readouterr().out

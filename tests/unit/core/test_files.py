"""Files that others than their owner read."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlbert.core.files import share_file


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_a_file_of_safetensors_gets_the_mode_of_any_new_file(umask: int, mode: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    before = os.umask(umask)
    try:
        save_file({"a": np.zeros(2)}, path)
        share_file(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode

"""Files that others than their owner read."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlbert.core.files import write_tensors


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_a_file_of_safetensors_gets_the_mode_of_any_new_file(umask: int, mode: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    before = os.umask(umask)
    try:
        write_tensors(path, lambda place: save_file({"a": np.zeros(2)}, place))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode


def test_a_place_that_is_not_there_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        write_tensors(tmp_path / "no folder" / "model.safetensors", lambda place: save_file({"a": np.zeros(2)}, place))

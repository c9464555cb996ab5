"""Shared by the tests of Triton kernels."""

from __future__ import annotations

import importlib

import pytest


@pytest.fixture
def use_triton() -> None:
    """Skips where Triton would not interpret kernels: it decides when it is imported, for a whole process."""
    from triton import knobs

    if not knobs.runtime.interpret:
        pytest.skip("kernels are interpreted with TRITON_INTERPRET=1 only; tests/unit/test_interpreted.py sets it")
    importlib.import_module("mlbert.ops.triton")  # repairs the interpreter's casts

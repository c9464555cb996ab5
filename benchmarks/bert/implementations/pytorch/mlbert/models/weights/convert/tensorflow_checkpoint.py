"""TensorFlow checkpoints to our form (`mlbert.models.weights.tensorflow_variables`). Needs ``pip install
mlbert[tf]``."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mlbert.host.environment import environment
from mlbert.host.errors import UserError
from mlbert.models.weights.checkpoint_state import Report
from mlbert.models.weights.convert.common import Checkpoint, find_shape, write_own
from mlbert.models.weights.files import check_target
from mlbert.models.weights.tensorflow_variables import REMEDY, read_variables, without_suffix


def tf1_to_torch(prefix: Path, target: Path, config: Path | None = None) -> Report:
    """Reads a TensorFlow 1 checkpoint, writes our folder. Raises UserError as `read_tf1`."""
    check_target(target)
    return write_own(read_tf1(prefix, config), target)


def read_tf1(prefix: Path, config: Path | None = None) -> Checkpoint:
    """Reads a TensorFlow 1 checkpoint. ``prefix`` is the path, with or without ``.index``. Raises UserError for a
    missing or damaged file, wrong shapes, missing variables, or without TensorFlow."""
    return _read(prefix, config, object_based=False)


def tf2_to_torch(prefix: Path, target: Path, config: Path | None = None) -> Report:
    """Reads an object-based TensorFlow 2 checkpoint of a BERT of Google's model garden, writes our folder. Raises
    UserError as `read_tf1` does."""
    check_target(target)
    return write_own(_read(prefix, config, object_based=True), target)


def _read(prefix: Path, config: Path | None, object_based: bool) -> Checkpoint:
    prefix = prefix.with_name(without_suffix(prefix.name))
    shape = find_shape(config, prefix.parent)
    index = prefix.with_name(f"{prefix.name}.index")
    if not index.is_file():
        raise UserError("file.missing", index, "does not exist", REMEDY)
    tf = _tensorflow(prefix)
    arrays, report = read_variables(tf.train.load_checkpoint, str(prefix), shape, object_based)
    state = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Checkpoint(shape, state, report, prefix.parent)


def _tensorflow(prefix: Path) -> Any:
    if not environment().get("TF_CPP_MIN_LOG_LEVEL"):
        # Read when the library is loaded: its notices are not errors, and its errors come as exceptions.
        os.putenv("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        with _no_notices():
            return importlib.import_module("tensorflow")
    except ImportError:
        raise UserError(
            "package.missing", prefix, "needs TensorFlow to be read", "Run: pip install mlbert[tf]"
        ) from None


@contextmanager
def _no_notices() -> Iterator[None]:
    """Keeps from the screen what TensorFlow 2.21 writes when it is loaded, whatever its log level."""
    screen, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(screen, 2)
        os.close(screen)
        os.close(nowhere)

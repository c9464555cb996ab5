"""Read and write a run's weights: initial weights, checkpoints and final weights.

INIT_CHECKPOINT is a TensorFlow 1 or object-based TensorFlow 2 checkpoint, given by its prefix or by
a folder with a ``checkpoint`` file that names the newest one. It may also be a
``model.safetensors`` or a folder with one (such as a run folder).

checkpoints/step_00000120/variables.*   weights, optimizer state and loss scale
checkpoints/step_00000120/state.json    progress, settings that a resumed run must match,
                                        sha256 of the variables
weights/                                float32 weights as `mlbert` reads them
tf2/model.ckpt                          the same weights as an object-based checkpoint
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import tensorflow as tf
from safetensors import SafetensorError
from safetensors import numpy as safetensors

from mlbert.config.bert_config import BertConfig
from mlbert.host.errors import UserError
from mlbert.host.files import write_weights_file
from mlbert.models.weights.checkpoint_state import Report, check_unseen, numpy_float32, own_state
from mlbert.models.weights.model_card import model_card
from mlbert.models.weights.tensorflow_variables import REMEDY, read_variables, without_suffix
from mlbert.runs.progress import TrainState
from mlbert.runs.step_folders import StepFolders
from tf2_bert.messages import plain
from tf2_bert.model import BertPretrainer

_WEIGHTS = "model.safetensors"
_CONFIG = "bert_config.json"
_TORCH = (".pt", ".pth", ".bin")
_VARIABLES = "variables"
_START = (
    "Set INIT_CHECKPOINT to a TensorFlow checkpoint's prefix or a model.safetensors, or to none"
)


def initial_values(
    path: Path | str, model: BertPretrainer
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the initial weights for `BertPretrainer.assign`, and notes for the user.

    Weights are float32 by our names, matrices [out, in], vocabulary unpadded. Heads that the
    checkpoint lacks keep the model's random values.

    Raises:
        UserError: the checkpoint is missing, damaged, of another shape, or from PyTorch.
    """
    found, report = _read(_address(path), model.config)
    return {**model.values(), **found}, report.warnings(path)


def _address(path: Path | str) -> str:
    """Return the path in TensorFlow's form: pathlib turns ``gs://bucket`` into ``gs:/bucket``."""
    return re.sub(r"^(\w+):/(?!/)", r"\1://", str(path))


def _read(address: str, shape: BertConfig) -> tuple[dict[str, np.ndarray], Report]:
    if tf.io.gfile.isdir(address):
        address = _in_folder(address)
    if address.endswith(".safetensors"):
        return _read_safetensors(address, shape)
    if address.endswith(_TORCH):
        commands = "nvidia-to-torch, composer-to-torch or hf-to-torch"
        reason = "is a PyTorch file"
        raise UserError(
            "checkpoint.format", address, reason, f"Convert it first: mlbert convert {commands}"
        )
    prefix = without_suffix(address)
    if not tf.io.gfile.exists(f"{prefix}.index"):
        raise UserError("file.missing", f"{prefix}.index", "does not exist", REMEDY)
    return read_variables(tf.train.load_checkpoint, prefix, shape)


def _in_folder(folder: str) -> str:
    for name in (f"{folder}/weights/{_WEIGHTS}", f"{folder}/{_WEIGHTS}"):
        if tf.io.gfile.exists(name):
            return name
    newest = tf.train.get_checkpoint_state(folder)
    if newest is not None:
        # Only the last part: the rest is the path at which it was written,
        # and the folder may have moved.
        return f"{folder}/{PurePosixPath(newest.model_checkpoint_path).name}"
    reason = f"contains no {_WEIGHTS} and no checkpoint file that names a checkpoint"
    raise UserError("checkpoint.missing", folder, reason, _START)


def _read_safetensors(address: str, shape: BertConfig) -> tuple[dict[str, np.ndarray], Report]:
    try:
        with tf.io.gfile.GFile(address, "rb") as file:
            arrays = safetensors.load(file.read())
    except tf.errors.OpError as error:
        raise UserError(
            "file.unreadable", address, f"cannot be read ({error.message})", _START
        ) from None
    except SafetensorError as error:
        raise UserError("checkpoint.damaged", address, f"is damaged ({error})", _START) from None
    except KeyError as error:
        reason = f"contains numbers of type {error}"
        raise UserError("checkpoint.format", address, reason, "Save it in float32") from None
    config = Path(address).parent / _CONFIG
    if config.is_file():
        check_unseen(BertConfig.from_json(config), shape, address)
    return own_state(arrays, shape, address, numpy_float32)


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        path: the folder, created by the first save; all workers must see it.
        objects: model, optimizer and loss scale to save, by name; all their variables must exist.
        keep: number of newest checkpoints to keep.
        identity: settings that a checkpoint must match to be resumed; JSON-serializable.
        is_chief: whether to keep the files that this worker writes.
    """

    def __init__(
        self,
        path: Path,
        objects: Mapping[str, Any],
        *,
        keep: int,
        identity: dict[str, object],
        is_chief: bool = True,
    ) -> None:
        self._path = path
        self._is_chief = is_chief
        self._folders = StepFolders(path, keep, identity)
        self._checkpoint = tf.train.Checkpoint(**objects)

    def save(self, state: TrainState) -> None:
        """Write a checkpoint.

        All workers must call it, since TensorFlow may sum saved values over them.

        If the writer is killed, no partial checkpoint looks valid.
        Raises UserError if the disk is full.
        """
        if self._is_chief:
            self._folders.save(state.step, state.to_json(), self._write)
            return
        try:
            with tempfile.TemporaryDirectory() as folder:
                self._write(Path(folder))
        except OSError as error:
            reason = f"cannot be written ({error})"
            raise UserError(
                "file.unwritable", "TMPDIR", reason, "Set it to a folder with space"
            ) from None

    def restore_newest(self, state: TrainState, say: Callable[[str], None]) -> bool:
        """Restore the newest valid checkpoint and return True if there is one;
        report damaged ones to ``say``.

        Call it outside replica context: it sets the variables of all replicas.

        Raises:
            UserError: all are damaged, or the newest valid one has another model, optimizer,
                batch or data set.
        """
        numbers, warnings = self._folders.load_newest(self._load)
        for warning in warnings:
            say(warning)
        if numbers is not None:
            try:
                state.restore(numbers)
            except ValueError as error:
                reason = f"does not match what this version of mlbert saves ({error})"
                remedy = "Resume with the version that wrote it, or set another LOGDIR"
                raise UserError("checkpoint.format", self._path, reason, remedy) from None
        return numbers is not None

    def _write(self, folder: Path) -> None:
        try:
            self._checkpoint.write(str(folder / _VARIABLES))
        except tf.errors.OpError as error:
            raise OSError(plain(error)) from None

    def _load(self, folder: Path, state: dict) -> dict:
        try:
            self._checkpoint.read(str(folder / _VARIABLES)).assert_consumed()
        except (AssertionError, ValueError, tf.errors.OpError):
            reason = "does not match the variables of this run's model and optimizer"
            remedy = "Set model and optimizer as they were, or set another LOGDIR"
            raise UserError("run.other-settings", folder, reason, remedy) from None
        return state


def write_weights(folder: Path, model: BertPretrainer, facts: Mapping[str, object]) -> None:
    """Write ``weights/`` (safetensors, bert_config.json, README.md with the facts)
    and ``tf2/`` into ``folder``.

    Both hold the float32 weights, vocabulary unpadded; `mlbert convert` reads either. Raises
    UserError if a file cannot be written.
    """
    weights = folder / "weights"
    tf2 = folder / "tf2"
    try:
        for target in (weights, tf2):
            target.mkdir(parents=True, exist_ok=True)
            (target / _CONFIG).write_text(model.config.to_json(), encoding="utf-8")
        values = {name: np.ascontiguousarray(value) for name, value in model.values().items()}
        parts = [
            (name, str(one.dtype), one.shape, one.reshape(-1).view(np.uint8).data)
            for name, one in values.items()
        ]
        write_weights_file(weights / _WEIGHTS, parts)
        (weights / "README.md").write_text(
            model_card("BertForPreTraining", facts), encoding="utf-8"
        )
        tf.train.Checkpoint(model=model).write(str(tf2 / "model.ckpt"))
    except (OSError, tf.errors.OpError) as error:
        reason = getattr(error, "strerror", None) or plain(error)
        reason = f"cannot be written ({reason})"
        raise UserError("file.unwritable", folder, reason, "Free space or change LOGDIR") from None


def make_folder(target: Path | str) -> None:
    """Create the target folder of `copy_weights`, which may be in a bucket.

    Raises UserError if it cannot.
    """
    with _writable(_address(target)) as address:
        tf.io.gfile.makedirs(address)


def copy_weights(folder: Path, target: Path | str) -> None:
    """Copy the output of `write_weights` in ``folder`` to ``target``, which may be in a bucket.

    Raises UserError.
    """
    with _writable(_address(target)) as address:
        for source in (
            path for name in ("weights", "tf2") for path in sorted((folder / name).iterdir())
        ):
            place = f"{address}/{source.parent.name}"
            tf.io.gfile.makedirs(place)
            tf.io.gfile.copy(str(source), f"{place}/{source.name}", overwrite=True)


@contextmanager
def _writable(address: str) -> Iterator[str]:
    try:
        yield address
    except (OSError, tf.errors.OpError) as error:
        reason = plain(error)
        reason = f"cannot be written ({reason})"
        raise UserError(
            "file.unwritable", address, reason, "Name another --model_export_path"
        ) from None

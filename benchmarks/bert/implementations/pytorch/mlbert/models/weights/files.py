"""Files of tensors. PyTorch's ``.pt`` files are read without running anything that they name; what is written, a
safetensors file with a checksum of its tensors in its header, is there as a whole or not at all."""

from __future__ import annotations

import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mlbert.host.errors import UserError
from mlbert.host.files import CHECKSUM, Tensors, fsync_path, open_plain, tensors_sha256, write_weights_file


def read_safetensors(path: Path, remedy: str) -> tuple[dict[str, Tensor], bool]:
    """All tensors of a file, and whether it had a checksum that they were compared with.

    Raises UserError: it is missing, no plain file, damaged, or its tensors differ from its checksum.
    """
    try:
        with open_plain(path):  # not a pipe, for which the library waits
            pass
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            wanted = (file.metadata() or {}).get(CHECKSUM)
        is_right = wanted is None or wanted == tensors_sha256(_parts(tensors))
    except OSError as error:
        raise UserError("file.unreadable", path, f"cannot be read ({error.strerror or error})", remedy) from None
    except Exception as error:  # a damaged header can fail in any way
        raise UserError("checkpoint.damaged", path, f"is damaged ({str(error).splitlines()[0]})", remedy) from None
    if not is_right:
        raise UserError("checkpoint.checksum", path, "is damaged: its tensors differ from their checksum", remedy)
    return tensors, wanted is not None


def save_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes contiguous tensors on the CPU, with their checksum. Raises OSError."""
    write_weights_file(path, lambda place, words: save_file(dict(tensors), place, metadata=words), _parts(tensors))


def _parts(tensors: Mapping[str, Tensor]) -> Tensors:
    return (
        (name, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        for name, tensor in tensors.items()
    )


def read_pt(path: Path, remedy: str, allowed: Sequence[tuple[Any, str]] = ()) -> Any:
    """What a ``.pt`` file holds, tensors left on disk until they are read.

    Args:
        path: the file.
        remedy: what to say of a bad one.
        allowed: what to call for a class or function that the file names, beside tensors and containers.

    Raises:
        UserError: the file is missing or damaged, or names anything else; nothing of it has been called.
    """
    try:
        with open_plain(path) as file:
            is_zip = zipfile.is_zipfile(file)
    except OSError as error:
        raise UserError("file.unreadable", path, f"cannot be read ({error.strerror or error})", remedy) from None
    try:
        if is_zip:
            _check_records(path)
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except UserError:
        raise
    except Exception as error:  # a damaged file can fail in any way
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            raise UserError(
                "checkpoint.unsafe", path, f"names {found[1]}, which is not loaded from a checkpoint", remedy
            ) from None
        reason = f" ({str(error).splitlines()[0]})" if str(error) and not isinstance(error, UnpicklingError) else ""
        raise UserError("checkpoint.damaged", path, f"is damaged or no PyTorch file{reason}", remedy) from None


def _check_records(path: Path) -> None:
    """Compares every record of the zip file with its checksum, which torch.load does not."""
    again = "Fetch or convert it again"
    with zipfile.ZipFile(path) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise UserError("checkpoint.damaged", path, "is compressed, which PyTorch never does", again)
        if damaged := archive.testzip():
            raise UserError("checkpoint.damaged", path, f"is damaged at record {damaged}", again)


def write_pt(target: Path, content: dict[str, Any]) -> None:
    """Writes one file that torch.load reads, in place of one that is there; the same content gives the same bytes under
    any name. Raises UserError when it cannot be written."""
    with new_path(target) as path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:  # given a path, torch.save would keep its name in the file
            torch.save(content, file)
        fsync_path(path)


@contextmanager
def new_path(target: Path) -> Iterator[Path]:
    """A temporary name that becomes the target; UserError when it cannot be written, and nothing is left behind."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        yield partial
        partial.rename(target)
        fsync_path(target.parent)
    except (OSError, SafetensorError, RuntimeError) as error:
        # torch.save reports a full disk as RuntimeError.
        shutil.rmtree(partial, ignore_errors=True)
        if not partial.is_dir():
            partial.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(
            "file.unwritable", target, f"cannot be written ({reason})", "Free space or name another place"
        ) from None


def check_target(target: Path) -> None:
    """Raises UserError for a target that is there already; asked before a long conversion begins."""
    if target.exists() or target.is_symlink():
        raise UserError("file.exists", target, "exists already", "Name a new one")

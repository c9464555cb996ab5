"""Reads tensors out of a PyTorch ``.pt`` file that holds other objects too, without making any of them.

``torch.load(weights_only=True)`` refuses a Composer checkpoint, which keeps configurations, times and random states
beside the weights. Here every class of those is replaced by one stand-in that accepts anything and does nothing; a
class or function that is not on the list ends the reading. Only tensors, text, numbers and plain containers come out.
Tensors are read from the file one by one, when they are asked for.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlbert.core.errors import UserError

REMEDY = "Give an undamaged checkpoint that Composer or PyTorch wrote"
_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_INERT = {
    "_codecs.encode",
    "collections.defaultdict",
    "datetime.datetime",
    "datetime.timedelta",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    "numpy.ndarray",
    "omegaconf.base.ContainerMetadata",
    "omegaconf.base.Metadata",
    "omegaconf.dictconfig.DictConfig",
    "omegaconf.listconfig.ListConfig",
    "omegaconf.nodes.AnyNode",
    "torch.torch_version.TorchVersion",
    "typing.Any",
}


class _Inert:
    """Stands in for an object that is not made: takes any argument and state, keeps nothing."""

    def __new__(cls, *_: Any, **__: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        """An item of a list that is not made."""

    def extend(self, _: Any) -> None:
        """Items of a list that is not made."""


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    key: str


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in the file: offset, size and stride in elements of its storage."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> StoredTensor:
    numbers = [offset, *size, *stride]
    if not isinstance(storage, _Storage) or not all(type(number) is int and number >= 0 for number in numbers):
        raise pickle.UnpicklingError("a tensor's description is wrong")
    return StoredTensor(storage, offset, tuple(size), tuple(stride))


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


_REAL: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "builtins.dict": dict,
    "builtins.list": list,
    "builtins.int": int,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The real thing for a few harmless names, a stand-in for the listed ones, an error for all others."""
        full = f"{module}.{name}".replace("__builtin__.long", "builtins.int").replace("__builtin__.", "builtins.")
        if full in _REAL:
            return _REAL[full]
        if module == "torch" and name in _STORAGES:
            return _Storage(_STORAGES[name], "")
        if full in _INERT:
            return _Inert
        raise _ForbiddenError(full)

    def persistent_load(self, pid: Any) -> _Storage:
        """A storage is only noted down here."""
        if not (isinstance(pid, tuple) and len(pid) >= 3 and pid[0] == "storage" and isinstance(pid[1], _Storage)):
            raise pickle.UnpicklingError("a storage's description is wrong")
        return _Storage(pid[1].dtype, str(pid[2]))


class _ForbiddenError(Exception):
    pass


class InertFile:
    """An opened ``.pt`` file: `tree` is its content with `StoredTensor` for tensors and None for stand-ins.

    Raises UserError when the file is missing, damaged, of the old form without zip, or names anything not listed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                    raise UserError(path, "is compressed, which PyTorch never does", REMEDY)
                names = archive.namelist()
                pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
                if len(pickles) != 1:
                    raise UserError(path, "has no data.pkl", REMEDY)
                self._prefix = pickles[0].removesuffix("data.pkl")
                order = f"{self._prefix}byteorder"
                if order in names and archive.read(order) != b"little":
                    raise UserError(path, "was written on a big-endian machine", REMEDY)
                content = _Unpickler(io.BytesIO(archive.read(pickles[0]))).load()
            self.tree = _plain(content, {})
        except UserError:
            raise
        except OSError as error:
            raise UserError(path, f"cannot be read ({error.strerror or error})", REMEDY) from None
        except _ForbiddenError as error:
            raise UserError(path, f"names {error}, which is not loaded from a checkpoint", REMEDY) from None
        except Exception as error:
            # A damaged pickle can fail in any way; nothing outside the lists above has been called.
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(path, f"is damaged or no PyTorch file ({reason})", REMEDY) from None

    def read(self, tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
        """The tensors themselves; two that share their storage share memory. Raises UserError for a damaged one."""
        storages: dict[str, Tensor] = {}
        result = {}
        try:
            with zipfile.ZipFile(self.path) as archive:
                for name, stored in tensors.items():
                    key = stored.storage.key
                    if key not in storages:
                        raw = bytearray(archive.read(f"{self._prefix}data/{key}"))
                        storages[key] = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0).byte()
                    flat = storages[key].view(stored.storage.dtype)
                    result[name] = torch.as_strided(flat, stored.size, stored.stride, stored.offset)
        except (OSError, KeyError, RuntimeError, ValueError, zipfile.BadZipFile) as error:
            reason = str(error).splitlines()[0]
            raise UserError(self.path, f"is damaged at tensor {name} ({reason})", REMEDY) from None
        return result


def _plain(value: Any, done: dict[int, Any]) -> Any:
    """The same tree of dicts, lists, text, numbers and stored tensors; everything else becomes None.

    ``done`` keeps each container once, so that many references to one do not multiply.
    """
    if not isinstance(value, dict | list | tuple):
        return value if isinstance(value, str | int | float | bool | StoredTensor) else None
    if id(value) not in done:
        if isinstance(value, dict):
            done[id(value)] = {key: _plain(item, done) for key, item in value.items() if isinstance(key, str | int)}
        else:
            done[id(value)] = [_plain(item, done) for item in value]
    return done[id(value)]

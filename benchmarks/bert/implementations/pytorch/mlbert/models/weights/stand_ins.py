"""Stand-ins for what ``torch.load(weights_only=True)`` refuses in a Composer checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Classes and functions of which no object is created.
_IGNORED = (
    "datetime.datetime",
    "datetime.timedelta",
    "typing.Any",
    "torch.torch_version.TorchVersion",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.dtype",
    "numpy.ndarray",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "omegaconf.base.ContainerMetadata",
    "omegaconf.base.Metadata",
    "omegaconf.nodes.AnyNode",
    "omegaconf.dictconfig.DictConfig",
    "omegaconf.listconfig.ListConfig",
)
_BUILTINS = ("builtins", "__builtin__")  # module names of Python 3 and 2


def stand_ins() -> list[tuple[Callable[..., Any], str]]:
    """Return (replacement, name) for each name."""
    found: list[tuple[Callable[..., Any], str]] = [(_Inert, name) for name in _IGNORED]
    found.append((_empty_dictionary, "collections.defaultdict"))
    for kind in (dict, list, int):
        for module in _BUILTINS:
            found.append((kind, f"{module}.{kind.__name__}"))
    found.append((int, "__builtin__.long"))
    return found


def _empty_dictionary(*_: Any) -> dict[Any, Any]:
    return {}


class _Inert:
    """Placeholder for an object that is not created:
    accepts any argument and state and ignores it.
    """

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...

"""Which implementation of each op runs: decided once for a kind of device, told in the log, overridable.

Every op module registers its implementations by name with `register`, `mlbert.ops.api` what has to be
loaded for them; `select` takes the user's choice, and the public functions ask `implementation`. The names:

    plain    `mlbert.ops.reference`: any device
    native   C kernels, or PyTorch products around them: CPU
    triton   Triton kernels (`mlbert.ops.triton`): CUDA; on a CPU through Triton's interpreter, where the environment
             has TRITON_INTERPRET=1, for tests
    cublaslt linear layers with cublasLt's epilogues (`mlbert.ops.cublaslt`), the other ops as in ``triton``: CUDA
    flash    attention by the FlashAttention that PyTorch carries, the other ops as in ``auto``: CUDA
    fmha     attention by ``csrc/fmha`` (`mlbert.ops.fmha`), where it was built, the other ops as in ``auto``: CUDA

An op without the chosen implementation runs plain, and so do float64 tensors, and float16 ones where C kernels would.
One that has failed its proof (`mlbert.ops.proof`) is left out, and the next one in order runs.

What was found out about a kind of device, kept in the user's cache folder: proofs of kernels, fastest algorithms.

A file belongs to a device, its driver, the versions of what computes and the sources of all kernels. Anything in it
that is damaged is not believed. Ranks may write at the same time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mlbert.host import native
from mlbert.host.errors import UserError
from mlbert.host.json_files import add_checksum, parse_checksummed
from mlbert.host.native import NativeUnavailable
from mlbert.ops import cublaslt

CHOICES = ("auto", "plain", "native", "triton", "cublaslt", "flash", "fmha")
# Kind of device -> choice -> names to try for each op before plain.
_PREFERENCES: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {"auto": ("native",), "native": ("native",), "triton": ("triton",)},
    "cuda": {
        "auto": ("cublaslt", "triton"),
        "triton": ("triton",),
        "cublaslt": ("cublaslt", "triton"),
        "flash": ("flash", "cublaslt", "triton"),
        "fmha": ("fmha", "cublaslt", "triton"),
    },
}

Form = Callable[..., Any]  # of an op: takes and returns what the op's public function does
_implementations: dict[str, dict[str, Form]] = {}
_remarks: dict[tuple[str, str], Callable[[], str]] = {}
_loaders: dict[str, Callable[[str], None]] = {}


@dataclass(frozen=True)
class _Selection:
    """op -> name on one kind of device, and name -> why an implementation that would be preferred is missing."""

    names: dict[str, str]
    missing: dict[str, str]


_choice = "auto"
_selections: dict[str, _Selection] = {}
_refused: dict[tuple[str, str, str], str] = {}  # kind of device, op, name -> why


def register(op: str, name: str, remark: Callable[[], str] | None = None) -> Callable[[Form], Form]:
    """Decorator: the function is implementation `name` of `op`; `remark()` is what `describe` adds, if anything."""

    def keep(function: Form) -> Form:
        _implementations.setdefault(op, {})[name] = function
        if remark:
            _remarks[op, name] = remark
        return function

    return keep


def loader(name: str) -> Callable[[Callable[[str], None]], Callable[[str], None]]:
    """Decorator: the function makes the implementations `name` usable on a kind of device, or raises NativeUnavailable
    or ImportError with the reason why they can't be had."""

    def keep(function: Callable[[str], None]) -> Callable[[str], None]:
        _loaders[name] = function
        return function

    return keep


def select(choice: str = "auto", device: torch.device | str = "cpu") -> dict[str, str]:
    """Decide the implementation of every op; the last call counts.

    Args:
        choice: ``auto`` (the fastest that can be had on a device: C kernels; cublasLt and Triton's kernels; else plain)
            or a name of the module docstring. On other kinds of device than `device` a name that does not suit them
            means ``auto``.
        device: where the run computes.

    Returns:
        op -> name of its implementation on `device`.

    Raises:
        UserError: unknown choice, or one that can't be had on `device`.
    """
    global _choice
    if choice not in CHOICES:
        raise UserError("config.choice", "OPS", f"{choice!r} is no implementation", f"Use one of {', '.join(CHOICES)}")
    kind = torch.device(device).type
    if choice not in ("auto", "plain", *_PREFERENCES.get(kind, {})):
        raise UserError("ops.unavailable", f"OPS={choice}", f"has nothing for a {kind} device", "Set OPS=auto")
    _choice = choice
    _selections.clear()
    selection = _selection(kind)
    if choice in selection.missing:
        _choice = "auto"
        _selections.clear()
        remedy = "Install gcc, or set OPS=plain (slower)" if choice == "native" else "Set OPS=auto"
        raise UserError("ops.unavailable", f"OPS={choice}", selection.missing[choice], remedy)
    return dict(selection.names)


def describe(device: torch.device | str = "cpu") -> str:
    """The choice on `device` as one line for the log."""
    selection = _selection(torch.device(device).type)
    names = sorted(set(selection.names.values()))
    chosen = sorted(selection.names.items())
    words = f"all {names[0]}" if len(names) == 1 else ", ".join(f"{op} {name}" for op, name in chosen)
    remarks = [text for choice in chosen if choice in _remarks and (text := _remarks[choice]())]
    missing = [f" (no {name} kernels: {reason})" for name, reason in selection.missing.items()]
    kind = torch.device(device).type
    refused = [f" ({op}: {name} {why})" for (where, op, name), why in _refused.items() if where == kind]
    return f"ops: {'; '.join([words, *remarks])}{''.join(missing)}{''.join(refused)}"


def implementation(op: str, tensor: torch.Tensor) -> Form:
    """The function that runs `op` on tensors like this one."""
    name = _selection(tensor.device.type).names[op]
    return _implementations[op][name if takes(name, tensor.dtype) else "plain"]


def takes(name: str, dtype: torch.dtype) -> bool:
    """Whether an implementation of this name is asked for tensors of a type; if not, they run plain."""
    return name == "plain" or not (dtype == torch.float64 or (dtype == torch.float16 and name == "native"))


def available(device: torch.device | str = "cpu") -> dict[str, tuple[str, ...]]:
    """op -> names of its implementations that can be had on `device`, plain first."""
    kind = torch.device(device).type
    wanted = {name for names in _PREFERENCES.get(kind, {}).values() for name in names}
    usable = ["plain", *sorted(name for name in wanted if not _why_missing(name, kind))]
    return {op: tuple(name for name in usable if name in forms) for op, forms in _implementations.items()}


def selected(device: torch.device | str = "cpu") -> dict[str, str]:
    """op -> name of the implementation that runs on `device`."""
    return dict(_selection(torch.device(device).type).names)


def refuse(op: str, name: str, device: torch.device | str, why: str) -> str:
    """From now on implementation `name` of `op` is not chosen on this kind of device; returns what is instead."""
    kind = torch.device(device).type
    _refused[kind, op, name] = why
    _selections.pop(kind, None)
    return _selection(kind).names[op]


def ops() -> tuple[str, ...]:
    """The names of all ops, sorted."""
    return tuple(sorted(_implementations))


def form(op: str, name: str) -> Form:
    """Implementation `name` of `op`, whatever is selected."""
    return _implementations[op][name]


def select_each(names: Mapping[str, str], device: torch.device | str = "cpu") -> None:
    """These implementations (op -> name) on `device`, plain for every other op, until the next `select`."""
    everything = {op: names.get(op, "plain") for op in _implementations}
    _selections[torch.device(device).type] = _Selection(everything, {})


def _selection(kind: str) -> _Selection:
    """The implementations on one kind of device, found when it is first asked for: loading them takes a while."""
    if kind not in _selections:
        choices = _PREFERENCES.get(kind, {})
        wanted = () if _choice == "plain" else choices.get(_choice, choices.get("auto", ()))
        missing = {name: reason for name in wanted if (reason := _why_missing(name, kind))}
        names = {
            op: next((n for n in wanted if n in forms and n not in missing and (kind, op, n) not in _refused), "plain")
            for op, forms in _implementations.items()
        }
        _selections[kind] = _Selection(names, missing)
    return _selections[kind]


def _why_missing(name: str, kind: str) -> str:
    """Loads what implements `name`; the reason in words if it can't be had, else empty."""
    try:
        if name in _loaders:
            _loaders[name](kind)
    except (NativeUnavailable, ImportError) as error:
        return str(error)
    return ""


def load(name: str, device: torch.device, say: Callable[[str], object], *facts: str) -> dict[str, Any]:
    """What was found, by key; nothing where nothing is known, or what is there is damaged.

    Args:
        name: what the file is about.
        device: where it was found out.
        say: told that a file is damaged.
        facts: what else the findings depend on.
    """
    path = _file(name, device, facts)
    try:
        kept = parse_checksummed(path.read_text(encoding="utf-8", errors="replace")) or {}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError:
        kept = {}
    if isinstance(found := kept.get("found"), dict):
        return found
    say(f"cache {path} is damaged or can't be read: everything in it is found out again")
    return {}


def store(name: str, device: torch.device, found: Mapping[str, Any], *facts: str) -> None:
    """Keeps what was found; a folder that can't be written is no failure, the next run finds out again."""
    path = _file(name, device, facts)
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{name}-", dir=path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(add_checksum({"found": found}), file)
        os.replace(temporary, path)


def _file(name: str, device: torch.device, facts: tuple[str, ...]) -> Path:
    everything = [*_software(), *facts, *_hardware(device)]
    digest = hashlib.sha256(json.dumps(everything).encode()).hexdigest()
    return native.cache_folder() / f"{name}-{digest[:32]}.json"


def _hardware(device: torch.device) -> list[str]:
    if device.type != "cuda":
        return [device.type, str(torch.backends.cpu.get_cpu_capability())]
    properties, driver = torch.cuda.get_device_properties(device), Path("/proc/driver/nvidia/version")
    facts = [properties.name, f"{properties.major}.{properties.minor}", driver.read_text() if driver.exists() else ""]
    with contextlib.suppress(native.NativeUnavailable):
        facts.append(str(cublaslt.library().version))
    return facts


@functools.cache
def _software() -> tuple[str, ...]:
    """Versions, and a hash of all sources of kernels."""
    sources = hashlib.sha256()
    folders = (Path(__file__).parent, native.SOURCE_FOLDER.parent)
    for path in sorted(p for f in folders for p in f.rglob("*") if p.suffix in (".py", ".c", ".h", ".cu")):
        sources.update(path.name.encode() + path.read_bytes())
    packages = [f"{d.name} {d.version}" for d in importlib.metadata.distributions() if _computes(d.name)]
    return (torch.__version__, str(torch.version.cuda), *sorted(set(packages)), sources.hexdigest())


def _computes(package: str | None) -> bool:
    return package is not None and (package == "triton" or package.startswith("nvidia-"))

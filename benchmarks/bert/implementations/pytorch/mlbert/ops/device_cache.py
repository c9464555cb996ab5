"""What was found out about a kind of device, kept in the user's cache folder: proofs of kernels, fastest algorithms.

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
from pathlib import Path
from typing import Any

import torch

from mlbert.host import native
from mlbert.host.checksummed_json import add_checksum, parse_checksummed
from mlbert.ops import cublaslt


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

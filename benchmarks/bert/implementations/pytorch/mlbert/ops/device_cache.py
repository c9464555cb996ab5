"""Cache results per kind of device in the user's cache folder:
kernel verification, fastest algorithms.

A file is specific to device, driver, versions of compute libraries, and sources of all kernels.
Damaged files are ignored. Ranks may write concurrently.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from mlbert.host import native
from mlbert.host.json_files import add_checksum, parse_checksummed
from mlbert.ops import cublaslt

SOURCE_SUFFIXES = (".py", ".c", ".h", ".cu")
# Metadata folders of packages that compute on a device; their names have the version.
COMPUTE_PACKAGE = re.compile(r"(triton-|nvidia[-_]).*\.(dist|egg)-info$")


def load(
    name: str, device: torch.device, say: Callable[[str], object], *facts: str
) -> dict[str, Any]:
    """Return cached results by key; empty if there are none or the file is damaged.

    Args:
        name: of the cache.
        device: of the results.
        say: logs that a file is damaged.
        facts: further facts that the results depend on.
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
    say(f"cache {path} is damaged or unreadable and will be rebuilt")
    return {}


def store(name: str, device: torch.device, found: Mapping[str, Any], *facts: str) -> None:
    """Cache results by key. Ignore a folder that is not writable: the next run recomputes them."""
    path = _file(name, device, facts)
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{name}-", dir=path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(add_checksum({"found": found}), file)
        os.replace(temporary, path)


def _file(name: str, device: torch.device, facts: tuple[str, ...]) -> Path:
    all_facts = [*_software(), *facts, *_hardware(device)]
    digest = hashlib.sha256(json.dumps(all_facts).encode()).hexdigest()
    return native.cache_folder() / f"{name}-{digest[:32]}.json"


def _hardware(device: torch.device) -> list[str]:
    if device.type != "cuda":
        return [device.type, str(torch.backends.cpu.get_cpu_capability())]
    properties = torch.cuda.get_device_properties(device)
    driver = Path("/proc/driver/nvidia/version")
    driver_version = driver.read_text() if driver.exists() else ""
    capability = f"{properties.major}.{properties.minor}"
    facts = [properties.name, capability, driver_version]
    with contextlib.suppress(native.NativeUnavailable):
        facts.append(str(cublaslt.library().version))
    return facts


@functools.cache
def _software() -> tuple[str, ...]:
    """Return the versions of compute libraries, and a hash of all kernel sources."""
    sources = hashlib.sha256()
    folders = (Path(__file__).parent, native.SOURCE_FOLDER.parent)
    files = [file for folder in folders for file in folder.rglob("*")]
    for path in sorted(file for file in files if file.suffix in SOURCE_SUFFIXES):
        sources.update(path.name.encode() + path.read_bytes())
    return (torch.__version__, str(torch.version.cuda), *_packages(), sources.hexdigest())


def _packages() -> list[str]:
    """Return names and versions of the installed compute libraries.

    Only folders are listed: thousands of ranks would read the metadata of hundreds of packages from
    one file system.
    """
    found: set[str] = set()
    for folder in sys.path:
        with contextlib.suppress(OSError):
            found.update(name for name in os.listdir(folder or ".") if COMPUTE_PACKAGE.match(name))
    return sorted(found)

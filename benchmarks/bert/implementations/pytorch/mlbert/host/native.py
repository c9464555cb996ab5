"""Compile C kernels at first use and load them through ctypes.

`load` compiles sources in ``csrc`` with GCC for this machine's processor. It caches the library in
``$XDG_CACHE_HOME/mlbert`` (default ``~/.cache/mlbert``) under a name derived from sources, flags,
compiler and processor. A library is written under a temporary name and then renamed, so that
processes can compile at the same time. It ends with its SHA-256, so that a damaged one is detected
and rebuilt. If nothing can be compiled, `load` raises `NativeUnavailable` with the reason, and
callers fall back to their reference implementations.

Kernels may use OpenMP. Two OpenMP runtimes in one process would compete for the cores, so the
library is linked without one and uses the runtime that PyTorch has already loaded: import torch
first. Libraries without OpenMP (`openmp=False`) need neither.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlbert.host.environment import environment
from mlbert.host.machine import read_processors
from mlbert.host.provenance import shipped

SOURCE_FOLDER = shipped("csrc") / "cpu"
MHALIB_FOLDER = SOURCE_FOLDER.with_name("mhalib")
COMPILE_FLAGS = (
    "-std=c11",
    "-O3",
    "-march=native",
    "-fPIC",
    "-fopenmp",
    # The parts of -ffast-math that keep NaN, infinities and the order of additions:
    # FMA, no errno, no traps.
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
)
NO_COMPILER = "no C compiler (gcc) on PATH"
INSTALL = "Install gcc: apt install gcc libc6-dev, dnf install gcc, or conda install gcc"
_COMPILERS = ("gcc", "cc")
_COMPILE_SECONDS = 120
_DIGEST_BYTES = 32
_OPENMP_NAMES = re.compile(r"lib(gomp|iomp5)[-.\w]*\.so[.\d]*$")

# Pointer, int64, int, uint32, float; void is missing.
TYPES = {
    "p": ctypes.c_void_p,
    "l": ctypes.c_int64,
    "i": ctypes.c_int,
    "u": ctypes.c_uint32,
    "f": ctypes.c_float,
}

_loaded: dict[str, ctypes.CDLL] = {}
_messages: dict[str, str] = {}
_digests: dict[str, str] = {}


class NativeUnavailable(RuntimeError):
    """The kernels cannot be compiled or loaded here; the text says why."""


def load(
    name: str,
    sources: Sequence[str],
    functions: Mapping[str, str] | None = None,
    *,
    openmp: bool = True,
    folder: Path | None = None,
) -> ctypes.CDLL:
    """Return the library `name`, built from `sources` in `folder` (default ``csrc/cpu``) unless
    cached.

    `functions` are their signatures by name: a letter of `TYPES` for each argument, a colon,
    and one for the result.

    `openmp` must be true if the sources use OpenMP.

    Raises:
        NativeUnavailable: no compiler, no OpenMP runtime, missing sources, or compilation failed.
    """
    if name in _loaded:
        return _loaded[name]
    try:
        if openmp:
            _share_openmp_runtime()
        library, message = _load(name, [(folder or SOURCE_FOLDER) / source for source in sources])
    except NativeUnavailable as error:
        _messages[name] = f"{name}: unavailable ({error})"
        raise
    for function, signature in (functions or {}).items():
        *arguments, _, result = (TYPES.get(letter) for letter in signature)
        bound = getattr(library, function)
        bound.argtypes = arguments
        bound.restype = result
    _messages[name] = f"{name}: {message}"
    _loaded[name] = library
    return library


def status() -> str:
    """Return the state of every requested library as one line."""
    return "; ".join(_messages.values()) or "no native library was requested"


def problem() -> str | None:
    """Return why requested libraries are not used and how to fix it; None if all are used."""
    absent = [text for name, text in _messages.items() if name not in _loaded]
    if not absent:
        return None
    remedy = f". {INSTALL}" if NO_COMPILER in absent[0] else ""
    return f"C kernels are not used, which is slower: {'; '.join(absent)}{remedy}"


def digests() -> dict[str, str]:
    """Return the SHA-256 of each loaded library's file."""
    return dict(_digests)


def compiler() -> str:
    """Return the compiler's name and version; "none" if no library was requested
    or there is no compiler.
    """
    try:
        return (
            _version(_find_compiler()).decode(errors="replace").partition("\n")[0]
            if _messages
            else "none"
        )
    except NativeUnavailable:
        return "none"


def _load(name: str, sources: Sequence[Path]) -> tuple[ctypes.CDLL, str]:
    compiler = _find_compiler()
    digest = _fingerprint(compiler, sources)
    folder = cache_folder()
    cached = folder / f"{name}-{digest[:32]}.so"
    if _is_intact(cached):
        with contextlib.suppress(NativeUnavailable):  # if it was built for another libc, rebuild it
            return _open(name, cached), f"from {cached}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _compile(compiler, sources, cached)
    except OSError as error:
        with tempfile.TemporaryDirectory(prefix="mlbert-") as temporary:
            once = Path(temporary) / cached.name
            _compile(compiler, sources, once)
            return _open(
                name, once
            ), f"compiled for this process only ({folder}: {error.strerror or error})"
    return _open(name, cached), f"compiled into {cached}"


def _open(name: str, path: Path) -> ctypes.CDLL:
    try:
        _digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"{path.name} does not load: {error}") from error


def _share_openmp_runtime() -> None:
    """Make the symbols of the OpenMP runtime in this process visible to libraries loaded later."""
    path = openmp_runtime() or "libgomp.so.1"
    try:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise NativeUnavailable(f"no OpenMP runtime: {error}") from error


def openmp_runtime() -> str | None:
    """Return the loaded OpenMP runtime, preferring PyTorch's:
    scikit-learn's ignores torch.set_num_threads.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError as error:
        raise NativeUnavailable("native kernels need Linux") from error
    paths = {line.split(maxsplit=5)[5] for line in lines if line.endswith(".so") or ".so." in line}
    runtimes = [path for path in paths if _OPENMP_NAMES.search(path)]
    return min(runtimes, key=lambda path: ("/torch/" not in path, path), default=None)


def _find_compiler() -> str:
    for name in _COMPILERS:
        if path := shutil.which(name):
            return path
    raise NativeUnavailable(NO_COMPILER)


def _fingerprint(compiler: str, sources: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for part in (_version(compiler), _processor(), repr(COMPILE_FLAGS).encode()):
        digest.update(hashlib.sha256(part).digest())
    for path in [*sources, *sorted(sources[0].parent.glob("*.h"))]:
        try:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        except OSError as error:
            raise NativeUnavailable(f"{path}: {error.strerror}") from error
    return digest.hexdigest()


@functools.cache
def _version(compiler: str) -> bytes:
    try:
        return subprocess.run(
            [compiler, "--version"], capture_output=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"{compiler} does not run: {error}") from error


def _processor() -> bytes:
    """Return everything that determines the meaning of ``-march=native``."""
    first = next(iter(read_processors()), {})
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(
        [platform.machine(), *(first[name] for name in wanted if name in first)]
    ).encode()


def cache_folder() -> Path:
    """Return the user's folder for files that can be recreated:
    compiled libraries, indices of data files.
    """
    base = environment().get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "mlbert"


def _is_intact(library: Path) -> bool:
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _compile(compiler: str, sources: Sequence[Path], target: Path) -> None:
    """Raise OSError if the target's folder is not writable,
    NativeUnavailable if compilation fails.
    """
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as folder:
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
        library = Path(folder) / target.name
        for source, result in zip(sources, objects, strict=True):
            _run([compiler, *COMPILE_FLAGS, "-c", str(source), "-o", result])
        _run([compiler, "-shared", *objects, "-lm", "-o", str(library)])
        content = library.read_bytes()
        library.write_bytes(content + hashlib.sha256(content).digest())
        os.replace(library, target)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False
        )
    except subprocess.SubprocessError as error:
        raise NativeUnavailable(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        lines = [
            line for line in done.stderr.splitlines() if "error" in line
        ] or done.stderr.splitlines()
        raise NativeUnavailable(
            f"{command[0]} failed: {lines[0] if lines else f'exit code {done.returncode}'}"
        )

"""Compilation at first use: cache, damage, concurrency, and every way it can fail."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401  (brings the OpenMP runtime that the libraries share)

from mlbert.host import native

SOURCE = """
#include <omp.h>
int threads_seen(int wanted) {
    int seen = 0;
#pragma omp parallel num_threads(wanted) reduction(+ : seen)
    seen += 1;
    return seen;
}
"""
needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc on PATH")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one source, an empty cache, and no library loaded yet."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "tiny.c").write_text(SOURCE)
    monkeypatch.setattr(native, "SOURCE_FOLDER", folder)
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "_messages", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def cached(sources: Path) -> list[Path]:
    return sorted((sources.parent / "cache" / "mlbert").glob("*.so"))


def load_again() -> ctypes.CDLL:
    native._loaded.clear()
    return native.load("tiny", ["tiny.c"])


@needs_compiler
def test_compiles_once_and_keeps_the_library(sources: Path) -> None:
    assert native.load("tiny", ["tiny.c"]).threads_seen(2) == 2
    assert "compiled into" in native.status()
    (library,) = cached(sources)
    time_stamp = library.stat().st_mtime_ns
    assert load_again().threads_seen(1) == 1
    assert "from" in native.status()
    assert library.stat().st_mtime_ns == time_stamp
    assert [path.name for path in library.parent.iterdir()] == [library.name]


@needs_compiler
def test_changed_source_and_header_make_a_new_library(sources: Path) -> None:
    load_again()
    (sources / "tiny.c").write_text(SOURCE + "int other(void) { return 7; }\n")
    assert load_again().other() == 7
    (sources / "some.h").write_text("/* a header */\n")
    load_again()
    assert len(cached(sources)) == 3


@needs_compiler
@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "text"])
def test_damaged_library_is_built_again(sources: Path, damage: str) -> None:
    load_again()
    (library,) = cached(sources)
    content = library.read_bytes()
    broken = {
        "truncated": content[: len(content) // 2],
        "flipped": content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
        "empty": b"",
        "text": b"not a library",
    }[damage]
    # A new file: the one that this process has mapped must not change under it.
    library.unlink()
    library.write_bytes(broken)
    assert load_again().threads_seen(2) == 2
    assert "compiled into" in native.status()
    assert library.read_bytes() == content


@needs_compiler
def test_cache_that_cannot_be_written(sources: Path) -> None:
    (sources.parent / "cache").write_text("a file where the folder should be")
    assert load_again().threads_seen(2) == 2
    assert "for this process only" in native.status()


@needs_compiler
@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_read_only_cache(sources: Path) -> None:
    folder = sources.parent / "cache"
    folder.mkdir(mode=0o500)
    assert load_again().threads_seen(2) == 2
    assert "for this process only" in native.status()


def test_no_compiler(sources: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(native.NativeUnavailable, match="no C compiler"):
        load_again()
    assert "tiny: unavailable" in native.status()


@needs_compiler
def test_library_without_openmp_needs_no_runtime(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise native.NativeUnavailable("no OpenMP runtime")

    monkeypatch.setattr(native, "_share_openmp_runtime", missing)
    (sources / "tiny.c").write_text("int seven(void) { return 7; }\n")
    assert native.load("tiny", ["tiny.c"], openmp=False).seven() == 7
    with pytest.raises(native.NativeUnavailable, match="no OpenMP runtime"):
        load_again()


@needs_compiler
def test_source_that_does_not_compile(sources: Path) -> None:
    (sources / "tiny.c").write_text("int broken( {\n")
    with pytest.raises(native.NativeUnavailable, match=r"tiny\.c:1"):
        load_again()


@needs_compiler
def test_missing_source(sources: Path) -> None:
    with pytest.raises(native.NativeUnavailable, match=r"absent\.c"):
        native.load("absent", ["absent.c"])


@needs_compiler
def test_processes_compile_at_the_same_time(sources: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from mlbert.host import native\n"
        "native.SOURCE_FOLDER = pathlib.Path(sys.argv[1])\n"
        "print(native.load('tiny', ['tiny.c']).threads_seen(2))\n"
    )
    command = [sys.executable, "-c", program, str(sources)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [out.strip() for out, _ in outputs] == ["2"] * 3, outputs
    assert len(cached(sources)) == 1
    assert len(list(cached(sources)[0].parent.iterdir())) == 1


@needs_compiler
def test_kernels_share_the_openmp_runtime_of_torch(sources: Path) -> None:
    """Whatever was loaded before, in this process or in another, torch.set_num_threads holds for the kernels."""
    load_again()
    assert "/torch/" in native.openmp_runtime()
    pytest.importorskip("sklearn")
    program = (
        "import sys, pathlib, sklearn.metrics\n"
        "import torch\n"
        "from mlbert.host import native\n"
        "native.SOURCE_FOLDER = pathlib.Path(sys.argv[1])\n"
        "native.load('tiny', ['tiny.c']).threads_seen(2)\n"
        "print(native.openmp_runtime())\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(sources)], capture_output=True, text=True, check=True)
    assert "/torch/" in done.stdout

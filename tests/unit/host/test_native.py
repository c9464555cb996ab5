"""Compilation at first use: cache, damage, concurrency, and every way it can fail."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch  # noqa: F401  (brings the OpenMP runtime that the libraries share)

from mlbert.host import native
from programs import run_quietly

SOURCE = """
#include <omp.h>
int threads_seen(int wanted) {
    int seen = 0;
#pragma omp parallel num_threads(wanted) reduction(+ : seen)
    seen += 1;
    return seen;
}
"""
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc on PATH")
DAMAGES = {
    "truncated": lambda content: content[: len(content) // 2],
    "flipped": lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
    "empty": lambda content: b"",
}
LOAD = (
    "import sys, pathlib; from mlbert.host import native; "
    "native.SOURCE_FOLDER = pathlib.Path(sys.argv[1])"
    "; tiny = native.load('tiny', ['tiny.c'])"
)


@pytest.fixture
def sources(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "tiny.c").write_text(SOURCE)
    for name, value in (("SOURCE_FOLDER", folder), ("_loaded", {}), ("_messages", {})):
        monkeypatch.setattr(native, name, value)
    return folder


def cached(sources: Path) -> list[Path]:
    return sorted((sources.parent / "cache" / "mlbert").glob("*.so"))


def load_again() -> ctypes.CDLL:
    native._loaded.clear()
    return native.load("tiny", ["tiny.c"])


def test_compiles_once_and_keeps_the_library(sources):
    assert native.load("tiny", ["tiny.c"]).threads_seen(2) == 2
    assert "compiled into" in native.status()
    (library,) = cached(sources)
    time_stamp = library.stat().st_mtime_ns
    assert load_again().threads_seen(1) == 1
    assert "from" in native.status()
    assert library.stat().st_mtime_ns == time_stamp
    assert [path.name for path in library.parent.iterdir()] == [library.name]


def test_changed_source_and_header_make_a_new_library(sources):
    load_again()
    (sources / "tiny.c").write_text(SOURCE + "int other(void) { return 7; }\n")
    assert load_again().other() == 7
    (sources / "some.h").write_text("/* a header */\n")
    load_again()
    assert len(cached(sources)) == 3


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_library_is_built_again(sources, damage):
    load_again()
    (library,) = cached(sources)
    content = library.read_bytes()
    library.unlink()  # this process has mapped that file, so it must not change
    library.write_bytes(damage(content))
    assert load_again().threads_seen(2) == 2
    assert "compiled into" in native.status()
    assert library.read_bytes() == content


def test_cache_that_cannot_be_written(sources):
    (sources.parent / "cache").write_text("a file where the folder should be")
    assert load_again().threads_seen(2) == 2
    assert "for this process only" in native.status()


def test_no_compiler(sources, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(native.NativeUnavailable, match="no C compiler"):
        load_again()
    assert "tiny: unavailable" in native.status()


def test_library_without_openmp_needs_no_runtime(sources, monkeypatch):
    missing = Mock(side_effect=native.NativeUnavailable("no OpenMP runtime"))
    monkeypatch.setattr(native, "_share_openmp_runtime", missing)
    (sources / "tiny.c").write_text("int seven(void) { return 7; }\n")
    assert native.load("tiny", ["tiny.c"], openmp=False).seven() == 7
    with pytest.raises(native.NativeUnavailable, match="no OpenMP runtime"):
        load_again()


def test_source_that_does_not_compile_or_is_missing(sources):
    (sources / "tiny.c").write_text("int broken( {\n")
    for name, words in (("tiny", r"tiny\.c:1"), ("absent", r"absent\.c")):
        with pytest.raises(native.NativeUnavailable, match=words):
            native.load(name, [f"{name}.c"])


def test_processes_compile_at_the_same_time(sources):
    command = [sys.executable, "-c", f"{LOAD}; print(tiny.threads_seen(2))", str(sources)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [out.strip() for out, _ in outputs] == ["2"] * 3, outputs
    assert len(cached(sources)) == 1
    assert len(list(cached(sources)[0].parent.iterdir())) == 1


def test_kernels_share_the_openmp_runtime_of_torch(sources):
    """Whatever was loaded before, in this process or in another,
    torch.set_num_threads holds for the kernels.
    """
    load_again()
    assert "/torch/" in native.openmp_runtime()
    pytest.importorskip("sklearn")
    program = (
        f"import sklearn.metrics, torch; {LOAD}; tiny.threads_seen(2); "
        "print(native.openmp_runtime())"
    )
    assert "/torch/" in run_quietly(sys.executable, "-c", program, sources).stdout

"""Fixtures for prepared sets of random sequences, the sample data
and interpreted Triton kernels.
"""

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlbert.config.recipe import Recipe
from mlbert.ops import api as ops
from mlbert.ops import peak
from random_set import random_rows
from simple_recipe import FOLDERS, simple_recipe
from stored_sets import write_set
from unit.test_interpreted import SUITES

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"

# List the language's functions once; Triton does it at each call of a function,
# a third of its time.
if INTERPRETS:
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @functools.cache
    def _builtins(package: object) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def _patch_builtins(package: object, builder: object, scope: object) -> None:
        for name in _builtins(package):
            if is_builtin(member := getattr(package, name)):  # not yet patched
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = _patch_builtins


def _uses_triton(item: pytest.Item) -> bool:
    chosen = item.callspec.params if hasattr(item, "callspec") else {}
    names = ("choice", "expand", "implementation", "kernels")
    return "use_triton" in item.fixturenames or "triton" in map(chosen.get, names)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the files of test_interpreted, run what uses Triton with TRITON_INTERPRET=1,
    and everything else without.
    """
    files = {
        Path(__file__).parent / test.partition("::")[0]
        for suite in SUITES.values()
        for test in suite
    }
    others = {item for item in items if item.path in files and _uses_triton(item) != INTERPRETS}
    items[:] = [item for item in items if item not in others]
    config.hook.pytest_deselected(items=list(others))


@pytest.fixture(scope="session", autouse=True)
def small_peak_products() -> Iterator[None]:
    """Measure the peak of matrix products with small ones:
    each run measures it, in bfloat16 for seconds.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(peak.SIZES, "cpu", 256)
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return `../shared/data`, next to the tree; skip the test if it does not exist."""
    folder = Path(__file__).resolve().parents[3] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the sample data in {folder}, which a clone does not have")
    return folder


@pytest.fixture
def restore_selection() -> Iterator[None]:
    """Select the default implementations of the ops again after the test."""
    yield
    ops.select("auto")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder that this process uses for its caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def recipe() -> Recipe:
    """Return a recipe that needs only the three folders."""
    return simple_recipe()


@pytest.fixture
def environ() -> dict[str, str]:
    """Return the minimal exports of a sourced config."""
    return dict(FOLDERS)


@pytest.fixture
def use_triton() -> None:
    """Skip the test unless Triton interprets kernels, which it decides once per process,
    on import.
    """
    from triton import knobs

    if not knobs.runtime.interpret:
        pytest.skip(
            "kernels are interpreted with TRITON_INTERPRET=1 only; "
            "tests/unit/test_interpreted.py sets it"
        )
    importlib.import_module("mlbert.ops.triton")  # fixes the interpreter's casts


@pytest.fixture
def make_set(tmp_path: Path) -> Callable[..., Path]:
    """Return make_set(count, shards=...), which writes a prepared set and returns its folder."""

    def make(
        count: int = 300,
        shards: int = 3,
        name: str = "set",
        seed: int = 0,
        vocabulary: str = "a" * 64,
    ) -> Path:
        return write_set(tmp_path / name, random_rows(count, seed), shards, vocabulary=vocabulary)

    return make


@pytest.fixture
def one_cpu() -> Iterator[None]:
    """Keep the test and its processes on one CPU."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)

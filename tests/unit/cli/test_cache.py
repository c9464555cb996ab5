"""``mlbert cache``: what it lists, measures and deletes."""

import mmap
import os
import time
from pathlib import Path

import pytest

from mlbert.cli.main import main
from mlbert.host import native

DAY = 86_400


@pytest.fixture
def cache(own_cache: Path) -> Path:
    """Fill the user's cache; each entry was used one day longer ago than the one before."""
    folder = native.cache_folder()
    names = {
        "mds/abc/shard.mds": 40_000,
        "packs/def/order.npy": 20_000,
        f"ops-{'0' * 32}.so": 8_000,
        "weights/0/model.safetensors": 80_000,
        "mds/.lock": 0,
        "notes.txt": 5_000,
        "photos/one.jpg": 5_000,
    }
    for number, (name, size) in enumerate(names.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
        os.utime(path, (time.time() - (number + 0.5) * DAY,) * 2)
    return folder


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["cache", *words])
    assert end.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def left(cache: Path) -> set[str]:
    return {path.name for path in cache.rglob("*") if path.is_file() and path.stat().st_size}


def test_entries_are_listed_and_measured(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    listed = run(capsys, "list")
    places = [listed.index(name) for name in ("mds/abc", "packs/def", "ops-0", "weights/0")]
    assert places == sorted(places), "the last used first"
    assert "notes" not in listed
    assert "photos" not in listed
    assert "by a run" not in listed
    assert ": 151.6 kB, of which runs are using 0 bytes" in run(capsys, "size")


def test_what_a_run_holds_is_not_cleared(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (cache / "weights/0/model.safetensors").open("rb") as file:
        held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert "are using 81.9 kB" in run(capsys, "size")
    assert "deleted 3 entries (69.6 kB); 81.9 kB remain" in run(capsys, "clear")
    assert left(cache) == {"model.safetensors", "notes.txt", "one.jpg"}
    held.close()
    assert "deleted 1 entry" in run(capsys, "clear")
    assert left(cache) == {"notes.txt", "one.jpg"}


def test_the_least_recently_used_go_first(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "deleted 1 entry" in run(capsys, "clear", "--unused-for", "3")
    assert left(cache) == {"shard.mds", "order.npy", f"ops-{'0' * 32}.so", "notes.txt", "one.jpg"}
    assert "deleted 2 entries" in run(capsys, "clear", "--down-to", "0.00005")
    assert left(cache) == {"shard.mds", "notes.txt", "one.jpg"}


def test_an_empty_cache(own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "0 bytes" in run(capsys, "size")
    assert "deleted 0 entries" in run(capsys, "clear")

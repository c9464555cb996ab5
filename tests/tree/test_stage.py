"""launch/stage.sh, which copies a data set to a node's own disk."""

import os
import subprocess
from pathlib import Path

import pytest

from programs import assert_refused, run_quietly


def stage(tree_root: Path, source: Path, target: Path, largest: int = 0) -> subprocess.CompletedProcess[str]:
    script = tree_root / "benchmarks/bert/implementations/pytorch/launch/stage.sh"
    return run_quietly("prlimit", f"--fsize={largest or 'unlimited'}", script, source, target, timeout=60)


def test_a_folder_is_staged_once(tree_root: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "a set", tmp_path / "node/a set"
    (source / "below").mkdir(parents=True)
    (source / "one").write_bytes(os.urandom(300_000))
    (source / "below/it's two").write_bytes(b"two")

    def copied() -> dict[str, tuple[bytes, int, int]]:
        files = [path for path in target.rglob("*") if path.is_file()]
        return {str(p.relative_to(target)): (p.read_bytes(), p.stat().st_mtime_ns, p.stat().st_ino) for p in files}

    assert (done := stage(tree_root, source, target)).returncode == 0, done.stderr
    first = copied()
    assert {name: found[:2] for name, found in first.items()} == {
        name: ((source / name).read_bytes(), (source / name).stat().st_mtime_ns) for name in ("one", "below/it's two")
    }
    assert stage(tree_root, source, target).returncode == 0
    assert copied() == first, "a complete copy is kept"
    (target / "below/it's two").unlink()  # by a clean-up of the disk
    assert stage(tree_root, source, target).returncode == 0
    assert set(copied()) == set(first)
    (source / "one").write_bytes(b"another")
    assert stage(tree_root, source, target).returncode == 0
    assert copied()["one"][0] == b"another"
    (target.parent / "a set.staged").unlink()  # an interrupted copy
    (target / "left over").touch()
    assert stage(tree_root, source, target).returncode == 0
    assert set(copied()) == set(first)


@pytest.mark.parametrize("why", ["missing", "empty", "target", "full"])
def test_a_failed_copy_is_one_line(tree_root: Path, tmp_path: Path, why: str) -> None:
    source, target = tmp_path / "set", tmp_path / "node/set"
    if why != "missing":
        source.mkdir()
    if why in ("target", "full"):
        (source / "one").write_bytes(bytes(100_000))
    if why == "target":
        (tmp_path / "node").touch()
    done = stage(tree_root, source, target, 50_000 * (why == "full"))
    assert_refused(done, f"{source} was not copied to {target}: ")
    assert not target.exists()
    assert not target.with_name("set.staged").exists()

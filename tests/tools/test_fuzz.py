"""The fuzzer finds what is wrong, keeps it, and finds nothing in cases that are run each time."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

import fuzz
import fuzz_damage

# Formats with cases that are quick, and so many of each; the longer search is tools/fuzz.py by hand.
CASES = {"log": 12, "run files": 10, "system": 6, "prepared set": 8, "mds": 4, "tfrecord": 6, "hdf5": 6, "shape": 6}


def test_a_fixed_set_of_cases_finds_nothing(tmp_path: Path, tree_root: Path) -> None:
    for count in sorted(set(CASES.values())):
        names = [word for name, number in CASES.items() if number == count for word in ("--format", name)]
        words = [*names, "--seed", "9000", "--cases", str(count), "--keep", str(tmp_path / "kept")]
        done = subprocess.run([sys.executable, tree_root / "tools/fuzz.py", *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("status", "is_late", "max_bytes", "words", "failure"),
    [
        (1, False, 0, "the target was missed", ""),
        (2, False, 0, "mlbert: error: x: is wrong.\n", ""),
        (2, False, 0, "", "exit 2 without one line that says why"),
        (-9, True, 0, "", "hang"),
        (-11, False, 0, "", "crash: SIGSEGV"),
        (0, False, 3 << 30, "", "memory"),
        (
            70,
            False,
            0,
            'Traceback (most recent call last)\n File "/x/a/b.py", line 1, in f\nKeyError: 1',
            "traceback: KeyError in a/b.py f",
        ),
    ],
)
def test_what_counts_as_a_failure(status: int, is_late: bool, max_bytes: int, words: str, failure: str) -> None:
    assert fuzz.Ended(status, is_late, max_bytes, words).failure == failure


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": [1, {"b": 0.5}]}', b":::MLLOG {}\nx\n", bytes(range(256)) * 9])
@pytest.mark.parametrize("name", ["a.json", "a.txt", "a.safetensors", "a.tfrecord"])
def test_damage_is_a_function_of_its_seed(tmp_path: Path, content: bytes, name: str) -> None:
    def damaged(seed: int) -> tuple[str, bytes]:
        path = tmp_path / name
        path.unlink(missing_ok=True) if not path.is_dir() else path.rmdir()
        path.write_bytes(content)
        told = fuzz_damage.damage(path, random.Random(seed))
        return told, path.read_bytes() if path.is_file() else b""

    for seed in range(12):
        assert damaged(seed) == damaged(seed)

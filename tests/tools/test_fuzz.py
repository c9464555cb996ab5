"""The fuzzer classifies results, is deterministic, and finds no failure in a few fixed cases."""

import hashlib
import random
import sys
from pathlib import Path

import pytest

import fuzz
import fuzz_campaign
import fuzz_damage
from programs import run_checked

TRACE = "Traceback (most recent call last)"
# Quick formats; run tools/fuzz.py by hand for a long search.
FORMATS = (
    "log",
    "prepared set",
    "tfrecord",
    "hdf5",
)


@pytest.mark.slow
def test_fixed_cases_do_not_fail(tmp_path: Path, tree_root: Path) -> None:
    words = [word for name in FORMATS for word in ("--format", name)]
    words += ["--seed", "9000", "--cases", "1", "--keep", tmp_path / "kept"]
    assert "4 cases" in run_checked(sys.executable, tree_root / "tools/fuzz.py", *words).stdout


def test_classification_of_failures() -> None:
    for status, is_late, max_bytes, words, failure in (
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
            f'{TRACE}\n File "/x/a/b.py", line 1, in f\nKeyError: 1',
            "traceback: KeyError in a/b.py f",
        ),
    ):
        assert fuzz.Ended(status, is_late, max_bytes, words).failure == failure


@pytest.mark.parametrize("name", ["a.json", "a.txt", "a.safetensors", "a.tfrecord"])
def test_damage_is_determined_by_its_seed(tmp_path: Path, name: str) -> None:
    content = b'{"a": [1, {"b": 0.5}]}' if name == "a.json" else bytes(range(256)) * 9

    def damaged(folder: Path, seed: int) -> tuple[str, bytes]:
        (path := folder / name).parent.mkdir()
        path.write_bytes(content)
        return fuzz_damage.damage(
            path, random.Random(seed)
        ), path.read_bytes() if path.is_file() else b""

    for seed in range(12):
        assert damaged(tmp_path / f"{seed}", seed) == damaged(tmp_path / f"{seed} again", seed)


def test_verdicts_of_a_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fuzz_campaign,
        "_usual",
        lambda *_: ["0", f"x.csv {hashlib.sha256(b'usual').hexdigest()[:12]}"],
    )
    (tmp_path / "out").mkdir()
    for status, words, result, verdict in (
        (2, "mlbert: error: in/a.txt: is empty.", "", "refused"),
        (0, "", "usual", "unchanged"),
        (0, "warning: a.txt is left out", "other", "reported: exit 0"),
        (0, "finished", "other", "accepted"),
        (-11, "", "", "failed: crash: SIGSEGV"),
    ):
        (tmp_path / "out/x.csv").write_text(result)
        ended = fuzz.Ended(status, False, 0, words)
        assert fuzz_campaign._verdict(ended, Path("a.txt"), tmp_path, tmp_path, "report") == verdict

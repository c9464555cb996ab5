"""Run every command in hostile surroundings, and write a row per case with its verdict.

python tools/fuzz_campaign.py --seed N [--cases 1000] [--table FILE.tsv]

Verdicts: refused, reported, unchanged, failed, or accepted if the result differs from that of the
undamaged input without any message. Needs root to mount a small tmpfs as a full disk; cases about
permissions drop root's rights. Exit status: 1 if a case failed.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import fuzz
import fuzz_damage
import fuzz_surroundings
from fuzz_formats import CAMPAIGN
from fuzz_inputs import Format

_RESULTS = (".h5", ".hdf5", ".tfrecord", ".safetensors", ".csv", ".mds", ".zstd")
_WORDS = (
    "٣",
    "1_000",
    "nan",
    "{empty}",
    "[" * fuzz_surroundings.DEEP + "]" * fuzz_surroundings.DEEP,
    "1e999",
    "0x10",
    "9" * 400,
    "/dev/zero",
    "\ud800",
)
DAMAGES: dict[str, Callable[[Path, random.Random], object]] = {
    "depth": fuzz_surroundings.nest,
    "size": fuzz_surroundings.resize,
    "encoding": fuzz_surroundings.reencode,
    "special": fuzz_damage.replace_file,
    "permissions": fuzz_surroundings.forbid,
}
KINDS = (*DAMAGES, "symlink loop", "type", "full disk", "clock")
# (command, its valid input) -> what the command does without damage
_USUAL: dict[tuple[str, Path], list[str]] = {}


def _obey_permissions() -> None:
    """Drop root's right to ignore permissions; unlike another user,
    this process can still import modules.
    """
    libc = ctypes.CDLL(None)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    rights = (ctypes.c_uint32 * 6)()
    libc.capget(header, rights)
    # Effective and permitted rights, without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.
    rights[0] &= ~0b110
    rights[1] &= ~0b110
    if libc.capset(header, rights):
        raise OSError("capset failed")


def _jump() -> None:
    """Let the clock of this process jump at every tenth call."""
    now = time.time
    calls = itertools.count()
    jumps = (0, -86_400, 10**9)  # seconds
    time.time = lambda: now() + jumps[next(calls) // 10 % len(jumps)]


def _result(ended: fuzz.Ended, out: Path) -> list[str]:
    """Return the exit status, and what a command wrote or printed,
    without what differs from run to run.
    """
    files = [path for path in sorted(out.rglob("*")) if path.is_file() and path.suffix in _RESULTS]
    sums = [
        f"{path.relative_to(out)} {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
        for path in files
    ]
    said = re.sub(r"mlbert-\w+-\w+", "", ended.words)  # random names of temporary folders
    words = [] if files else sorted(set(re.findall(r"[a-z]{4,}", said)))
    return [str(ended.status), *sums, *words]


def _do_nothing() -> None:
    """Change nothing in the started process."""


def run_case(
    form: Format, words: str, kind: str, valid: Path, folder: Path, rng: random.Random
) -> tuple[str, str]:
    """Run one case; return a description of the damage, and the verdict."""
    shutil.copytree(valid / "in", folder / "in", symlinks=True)
    (folder / "out").mkdir()
    files = form.files(folder / "in")
    given = [folder / "in" / name for name in re.findall(r"\{in\}/([^\s]+)", words)]
    named = [path for path in files if any(place in (path, *path.parents) for place in given)]
    path = rng.choice(named or files)
    what = str(path.relative_to(folder / "in"))
    child: Callable[[], None] = _do_nothing
    if kind == "type":
        numbers = [
            word
            for word in words.split()[1:]
            if re.fullmatch(r"(\w+=)?([\d.]+|\{(in|out)\}\S*)", word)
        ]
        old = rng.choice(numbers or [words.split()[-1]])
        new = rng.choice(_WORDS)
        new = f"{old.partition('=')[0]}={new}" if "=" in old else new
        words = " ".join(new if word == old else word for word in words.split())
        what = f"{old} -> {new[:20]!a}"
    elif kind == "full disk":
        what = "out"
        size = rng.choice(("4k", "16k", "64k"))
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder / "out"], check=True
        )
    elif kind == "clock":
        os.utime(path, (0, 0) if rng.random() < 0.5 else (2**33, 2**33))
        child = _jump
    else:
        (DAMAGES | {"symlink loop": fuzz_surroundings.link_to_itself})[kind](path, rng)
        child = _obey_permissions if kind == "permissions" else child
    ended = fuzz.run(words, folder, child=child)
    return f"{what}\t{words[:160]!a}", _verdict(ended, path, folder, valid, words)


def _verdict(ended: fuzz.Ended, path: Path, folder: Path, valid: Path, words: str) -> str:
    if ended.failure:
        return f"failed: {ended.failure}"
    if ended.status == 2:
        return "refused"
    found = _result(ended, folder / "out")
    usual = _usual(words, valid, folder)
    if found == usual:
        return "unchanged"
    is_named = path.name in ended.words or re.search(
        r"warning|left out|skipped|damaged|cannot", ended.words
    )
    return f"reported: exit {ended.status}" if ended.status or is_named else "accepted"


def _usual(words: str, valid: Path, folder: Path) -> list[str]:
    """Return what a command does with undamaged input.

    It runs in a folder of the same name, because messages contain the name.
    """
    if (words, valid) not in _USUAL:
        folder.rename(folder.with_name("kept"))
        shutil.copytree(valid / "in", folder / "in", symlinks=True)
        _USUAL[words, valid] = _result(fuzz.run(words, folder), folder / "out")
        shutil.rmtree(folder)
        folder.with_name("kept").rename(folder)
    return _USUAL[words, valid]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument(
        "--inputs", type=Path, help="folder for the undamaged inputs, which other runs can use too"
    )
    parser.add_argument("--table", type=Path, default=Path("campaign.tsv"))
    given = parser.parse_args()
    fuzz.import_all()
    fuzz.SLACK = 12  # the table must not depend on other programs on the machine
    found: Counter[str] = Counter()
    commands = [
        (name, words.strip())
        for name, form in CAMPAIGN.items()
        for words in form.commands.splitlines()
    ]
    with (
        tempfile.TemporaryDirectory(prefix="mlbert-fuzz-") as temporary,
        given.table.open("w") as table,
    ):
        root = Path(temporary)
        valid = given.inputs or Path(temporary)
        root.chmod(0o755)
        for name, form in CAMPAIGN.items():
            if not (valid / name / "in").exists():
                fuzz.make_inputs(form, valid / name, False)
        for number in range(given.first, given.first + given.cases):
            rng = random.Random(f"{given.seed} {number}")
            folder = root / "case"
            kind = KINDS[number % len(KINDS)]
            name, words = rng.choice(commands)
            folder.mkdir(mode=0o755)
            what, verdict = run_case(CAMPAIGN[name], words, kind, valid / name, folder, rng)
            found[verdict.partition(":")[0]] += 1
            table.write(f"{number}\t{kind}\t{name}\t{verdict}\t{what}\n")
            table.flush()
            if verdict.startswith(("failed", "accepted")):
                print(f"{number} {kind}, {name}, {what}: {verdict}", flush=True)
                said = (folder / "said.txt").read_text(errors="replace")[-3000:]
                given.table.with_suffix(f".{number}.txt").write_text(said, errors="replace")
            subprocess.run(["umount", "-q", folder / "out"], check=False)
            shutil.rmtree(folder)
    print(", ".join(f"{count} {verdict}" for verdict, count in found.most_common()))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

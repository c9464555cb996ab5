"""Run the real commands on damaged inputs, and report tracebacks, hangs,
crashes and excessive memory use.

python tools/fuzz.py [--minutes 60] [--format NAME] [--seed N] [--cases N] [--keep DIR] [--quick]
[--check]

Each case takes valid inputs of one format (tools/fuzz_formats.py), damages one or two files
(tools/fuzz_damage.py) and runs a command on them in a fork of this process, which has imported
everything. A case depends only on the format and its number: `--format NAME --seed N --cases 1`
repeats it. The first failure of each kind is saved in --keep with its inputs, command and output.
Exit status: 0 if nothing was found, 1 otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import fuzz_damage
from forked import run_forked
from fuzz_formats import FORMATS
from fuzz_inputs import Format

SECONDS = 10  # CPU time limit of a command
SLACK = 3  # wall-clock limit as a multiple of it, because the machine may be busy
BYTES = 2 * 2**30
NUMBER_OF_FILES = (1, 1, 1, 2)
_IMPORTED = (
    "mlaudit.report.page",
    "mlbert.recipes.packed_lamb_build",
    "mlbert.recipes.task_inputs",
    "mlbert.recipes.masked_lm_stored_build",
    "mlbert.recipes.masked_lm_text_build",
    "mlbert.training.experiment",
    "mlbert.models.weights.convert",
    "matplotlib.pyplot",
    "tokenizers",
    "pandas",
    "sklearn.metrics",
    "transformers.models.bert.modeling_bert",
    "torch.distributed.tensor",
)
_FRAME = re.compile(r'File "[^"]*/(\w+/\w+\.py)", line \d+, in (\w+)')
_ERROR = re.compile(r"^(\w[\w.]*(?:Error|Exception|Interrupt|Warning|Exit)\b)[^\n]*", re.MULTILINE)


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit status (negative after a signal), memory,
    and everything it printed.
    """

    status: int
    is_late: bool
    max_bytes: int
    words: str

    @property
    def failure(self) -> str:
        """Return the kind of failure, or an empty string."""
        if self.is_late or self.status == -signal.SIGXCPU:
            return "hang"
        if "Traceback (most recent call last)" in self.words:
            frames = [f"{place} {name}" for place, name in _FRAME.findall(self.words)]
            own = [frame for frame in frames if not frame.startswith("tools/")]
            errors = _ERROR.findall(self.words)
            return f"traceback: {errors[-1] if errors else '?'} in {own[-1] if own else '?'}"
        if self.status < 0:
            return f"crash: {signal.Signals(-self.status).name}"
        if self.max_bytes > BYTES or "memory: not enough" in self.words:
            return "memory"
        if self.status == 2 and len(re.findall(r"^mlbert: error: ", self.words, re.MULTILINE)) != 1:
            return "exit 2 without one line that says why"
        return "" if self.status in (0, 1, 2, 3) else f"exit status {self.status}"


def run(
    words: str, folder: Path, is_limited: bool = True, child: Callable[[], None] = lambda: None
) -> Ended:
    """Run ``mlbert`` in a fork, with {in} and {out} below ``folder``;
    the fork calls ``child`` first.
    """
    out = folder / "out"
    out.mkdir(exist_ok=True)
    known = {"{in}": str(folder / "in"), "{out}": str(out), "{empty}": ""}
    given = [
        re.sub(r"\{(in|out|empty)\}", lambda found: known[found[0]], word) for word in words.split()
    ]
    said = folder / "said.txt"
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def work() -> None:
        os.chdir(folder)
        if is_limited:
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 2))
            resource.setrlimit(resource.RLIMIT_DATA, (before + 2 * BYTES, resource.RLIM_INFINITY))
            resource.setrlimit(resource.RLIMIT_FSIZE, (BYTES, BYTES))
        child()
        from mlbert.cli.main import main

        main(given)

    status, usage = run_forked(work, said, SECONDS * SLACK * (1 if is_limited else 10))
    text = said.read_text(errors="replace")[-100_000:]
    is_late = status is None
    return Ended(
        -signal.SIGKILL if status is None else status,
        is_late,
        usage.ru_maxrss * 1024 - before,
        text,
    )


def make_inputs(form: Format, folder: Path, is_tried: bool) -> None:
    """Write valid inputs below ``folder/in``; if ``is_tried``,
    also run every command of the format on them.

    Raises:
        RuntimeError: a command fails other than by missing its target.
    """

    def mlbert(words: str, place: Path = folder) -> None:
        ended = run(words, place, is_limited=False)
        if ended.failure or ended.status not in (0, 1):
            raise RuntimeError(
                f"mlbert {words}: exit {ended.status} {ended.failure}\n{ended.words}"
            )

    (folder / "in").mkdir(parents=True)
    form.make(folder / "in", mlbert)
    if not is_tried:
        return
    for words in form.commands.splitlines():
        shutil.copytree(folder / "in", folder / "try/in")
        mlbert(words, folder / "try")
        shutil.rmtree(folder / "try")


def run_case(name: str, number: int, valid: Path, folder: Path) -> tuple[str, Ended]:
    """Run one case in ``folder``; return the damage done and how the command ended."""
    form = FORMATS[name]
    rng = random.Random(f"{name} {number}")
    shutil.copytree(valid / "in", folder / "in", symlinks=True)
    files = form.files(folder / "in")
    chosen = rng.sample(files, min(rng.choice(NUMBER_OF_FILES), len(files)))
    damages = [fuzz_damage.damage(path, rng) for path in chosen]
    words = rng.choice(form.commands.splitlines()).strip()
    return f"{'; '.join(damages)}: mlbert {words}", run(words, folder)


def import_all() -> None:
    """Import what the commands import lazily, so that forks need not,
    and set the environment of all commands.
    """
    import importlib

    os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "80"}

    from mlbert.cli.main import COMMANDS

    for command in COMMANDS.values():
        command.load()
    for module in _IMPORTED:
        importlib.import_module(module)


def fuzz(
    names: Sequence[str],
    numbers: range | itertools.count[int],
    minutes: float,
    keep: Path,
    is_checked: bool,
) -> Counter[str]:
    """Run cases of all formats in turn until the time is up;
    return the number of failures of each kind.
    """
    found: Counter[str] = Counter()
    done = 0
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="mlbert-fuzz-") as temporary:
        valid = {name: Path(temporary) / f"valid {name}" for name in names}
        for name in names:
            make_inputs(FORMATS[name], valid[name], is_checked)
        end = max(end, time.monotonic() + 1)
        for number, name in ((number, name) for number in numbers for name in names):
            if time.monotonic() > end:
                break
            folder = Path(temporary) / "case"
            case, ended = run_case(name, number, valid[name], folder)
            done += 1
            if ended.failure:
                kind = f"{name}: {ended.failure}"
                found[kind] += 1
                if found[kind] == 1:
                    print(
                        f"[{done}] {kind}\n    --format '{name}' --seed {number} --cases 1\n    "
                        f"{case}",
                        flush=True,
                    )
                    _keep(folder, keep / f"{name}-{number}".replace(" ", "_"), case, ended)
            shutil.rmtree(folder)
    print(f"{done} cases, {sum(found.values())} failures of {len(found)} kinds")
    return found


def _keep(folder: Path, target: Path, case: str, ended: Ended) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    (target / "case.txt").write_text(
        f"{case}\nexit {ended.status}\n\n{ended.words}", errors="replace"
    )
    shutil.copytree(folder / "in", target / "in", symlinks=True, copy_function=_copy)


def _copy(source: str, target: str) -> None:
    if Path(source).is_file():  # copying a FIFO blocks forever
        shutil.copy2(source, target, follow_symlinks=False)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument(
        "--format", action="append", choices=list(FORMATS), metavar="NAME", help=", ".join(FORMATS)
    )
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument(
        "--cases", type=int, help="cases per format (default: until the time is up)"
    )
    parser.add_argument(
        "--keep", type=Path, default=Path("runs/fuzz"), help="folder for failing inputs"
    )
    parser.add_argument(
        "--quick", action="store_true", help="only formats with cases of a fraction of a second"
    )
    parser.add_argument(
        "--check", action="store_true", help="first run every command on undamaged inputs"
    )
    given = parser.parse_args()
    names = given.format or [
        name for name, form in FORMATS.items() if form.quick or not given.quick
    ]
    numbers = (
        itertools.count(given.seed)
        if given.cases is None
        else range(given.seed, given.seed + given.cases)
    )
    import_all()
    return 1 if fuzz(names, numbers, given.minutes, given.keep, given.check) else 0


if __name__ == "__main__":
    sys.exit(main())

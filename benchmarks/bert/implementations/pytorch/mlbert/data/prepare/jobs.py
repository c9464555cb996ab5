"""Infrastructure of the preparation steps: worker processes, detection of finished output,
and checks of text parts.

A step splits its work into items (a text part, a shard), each of which writes its own file
atomically. Rerunning an interrupted step keeps these files. The output does not depend on the
number of worker processes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import multiprocessing
import os
import re
import shutil
import signal
import threading
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from mlbert.data.formats.checksums import FileSum, check_files, file_sums, listed_sums
from mlbert.data.formats.manifest import MANIFEST, Manifest, file_sha256, read_manifest, reading
from mlbert.data.formats.tfrecord import missing_numbers, missing_text
from mlbert.data.formats.tfrecord_plain import RecordList, read_list
from mlbert.data.prepare.instances import REMEDY, without_text
from mlbert.host import native
from mlbert.host.errors import UserError
from mlbert.host.files import plain_size, read_plain
from mlbert.host.json_files import parse_checksummed
from mlbert.host.progress import SILENT, Progress
from mlbert.host.provenance import files_sha256, installed_version

Item = TypeVar("Item")
Result = TypeVar("Result")

WORK_FOLDER = ".tasks"  # in the output; see `mlbert.data.prepare.step_tasks`
MADE_BY = "made_by"  # key of the `code_identity` in a plan
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl  # found here: a lookup between fork and exec could wait for ever
_MOST_WORKERS = max(2, os.cpu_count() or 1)  # more use memory and save no time
_AHEAD = 2  # items of a stream for each process, so that none waits for the next
_CODE_FOLDERS = ("formats", "prepare")  # of `mlbert.data`
C_SOURCES = (  # of the libraries that these folders load
    "growing.h",
    "instances.c",
    "tfrecord.h",
    "tfrecord_frame.c",
    "tfrecord_read.c",
    "tfrecord_write.c",
    "wordpiece.c",
)
_FEWER = (
    "Use fewer processes: --workers, or CPU_THREADS of `mlbert pretrain`; finished parts are kept"
)
_IN_FOLDER = re.compile(r"part-\d+(-of-\d+)?|(?!eval).*\.txt")  # text parts of a folder


@dataclass(frozen=True)
class Share:
    """What a process does of a step: the tasks whose number modulo ``count`` is ``index`` (none if
    it is 0), and the merge if ``merges``.
    """

    index: int = 0
    count: int = 1
    merges: bool = True

    @property
    def is_all(self) -> bool:
        """Whether it is the whole step."""
        return self.merges and self.count == 1

    def has(self, task: int) -> bool:
        """Return whether a task belongs to this share."""
        return bool(self.count) and task % self.count == self.index


ALL = Share()
MERGE = Share(count=0)


def parse_share(task: str | None, merge: bool) -> Share:
    """Return the share of ``--task I/N`` or ``--merge``; all if neither is given.

    Raises UserError.
    """
    if task is None:
        return MERGE if merge else ALL
    if merge:
        reason = "exclude each other"
        raise UserError(
            "config.conflict",
            "--task and --merge",
            reason,
            "Use --merge after the tasks of all shares",
        )
    found = re.fullmatch(r"([0-9]{1,6})/([1-9][0-9]{0,5})", task)
    if not found:
        raise UserError(
            "config.value", "--task", f"{task} is not I/N", "Use for example 0/4, 1/4, 2/4 and 3/4"
        )
    index, count = map(int, found.groups())
    if index >= count:
        reason = f"{task}: there is no share {index} of {count}"
        raise UserError("config.range", "--task", reason, f"Use 0/{count} to {count - 1}/{count}")
    return Share(index, count, merges=False)


@dataclass(frozen=True)
class Executor:
    """How a step is run.

    Attributes:
        workers: number of processes; 1 works in the current process.
        progress: receives the progress.
        share: the part of a step that can be divided; others are run as a whole.
    """

    workers: int = 1
    progress: Progress = SILENT
    share: Share = ALL

    def run(
        self,
        function: Callable[[Item], Result],
        items: Sequence[Item],
        *,
        name: str,
        where: Path,
        sizes: Sequence[int],
        unit: str = "bytes",
    ) -> list[Result]:
        """Return ``[function(item) for item in items]``, computed by the worker processes.

        Args:
            function: picklable (a module's function or a method of a picklable object);
                processes one item.
            name: name of the work, for the progress bar.
            where: output folder, named in the error if a process is killed.
            sizes: units of work of each item, for the remaining time.
            unit: the unit of ``sizes``.

        Raises UserError: ``function`` raised it, or a process was killed (for example for lack of
        memory). Items not yet started are dropped; finished ones stay.
        """
        results = []
        some = replace(self, workers=min(self.workers, len(items)))
        with (
            self.progress.task(name, sum(sizes), unit) as advance,
            some.stream(function, items, where, ahead=len(items)) as made,
        ):
            for (_, result), size in zip(made, sizes, strict=True):
                results.append(result)
                advance(size)
        return results

    @contextmanager
    def stream(
        self,
        function: Callable[[Item], Result],
        items: Iterable[Item],
        where: Path | str,
        ahead: int = 0,
    ) -> Iterator[Iterator[tuple[Item, Result]]]:
        """Yield an iterator over each item and its result, in the order of the items.

        Items are taken as results are used: ``ahead`` of them at a time, or a few for each process.
        Raises UserError as `run`, or as ``items`` does.
        """
        if self.workers <= 1:
            yield ((item, function(item)) for item in items)
            return
        workers = min(self.workers, _MOST_WORKERS)
        with processes(workers, function, where) as pool:
            yield _in_order(pool, items, ahead or _AHEAD * workers)


LOCAL = Executor()


def _in_order(
    pool: ProcessPoolExecutor, items: Iterable[Item], most: int
) -> Iterator[tuple[Item, Any]]:
    waiting: deque[tuple[Item, Future]] = deque()
    for item in items:
        waiting.append((item, _submit(pool, item)))
        if len(waiting) >= most:
            first, future = waiting.popleft()
            yield first, future.result()
    yield from ((item, future.result()) for item, future in waiting)


def _submit(pool: ProcessPoolExecutor, item: Any) -> Future:
    """Submit an item.

    A process that is started for it never gets Ctrl-C and SIGTERM: the main process ends it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        return pool.submit(_call, item)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def processes(
    workers: int, function: Callable[[Any], Any], where: Path | str
) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of fresh processes in which `_call` calls the function,
    and that end with this one.

    After an error, running work finishes. Ctrl-C and SIGTERM (raised as SystemExit meanwhile) kill
    it at once, which is safe because files are written atomically. Raises UserError if a process
    was killed; ``where`` is its subject.
    """
    # Spawned, not forked: a fork copies locks that other threads (progress bar, OpenMP) hold at
    # that moment.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_begin_worker, initargs=(os.getpid(), function)
    )
    with sigterm_raises():
        try:
            yield pool
        except (KeyboardInterrupt, SystemExit, BrokenProcessPool) as end:
            for process in (
                multiprocessing.active_children()
            ):  # the pool's own way is SIGTERM, which they never get
                process.kill()
            if isinstance(end, BrokenProcessPool):
                reason = "a worker process was killed, possibly for lack of memory"
                raise UserError("machine.memory", where, reason, _FEWER) from None
            raise
        finally:
            # Also releases the pool's semaphores: a signal's default action would leak them,
            # with a warning.
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into an exception, unless it already has a handler;
    only the main thread can set one.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


_function: Callable[[Any], Any]  # of a worker process


def _call(item: Any) -> Any:
    return _function(item)


def _begin_worker(parent: int, function: Callable[[Any], Any]) -> None:
    """Make a worker end at once if the main process is killed.

    Keep the function, which is sent only once.
    """
    global _function
    _function = function
    end_with_parent(parent, signal.SIGKILL)


def end_with_parent(parent: int, number: int) -> None:
    """Let the kernel send this process a signal when its parent, a process id, ends.

    May be called before exec.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # killed before this process could ask for the signal
        os._exit(1)


def tool_name() -> str:
    """Return this package and its version, as stored in manifests."""
    return f"mlbert {installed_version('mlbert') or 'unknown'}"


@functools.cache
def code_identity() -> dict[str, str]:
    """Return everything but input and options that decides the bytes of a step's output.

    This is the package and its version; a SHA-256 of the code that reads, generates and writes
    data, in Python and C; and the version of Python's Unicode tables, by which words are split.
    """
    data = Path(__file__).parents[1]
    modules = [
        path.relative_to(data).as_posix()
        for folder in _CODE_FOLDERS
        for path in (data / folder).rglob("*.py")
    ]
    sources = [name for name in C_SOURCES if (native.SOURCE_FOLDER / name).is_file()]
    digests = [files_sha256(data, modules), files_sha256(native.SOURCE_FOLDER, sources)]
    return {
        "tool": tool_name(),
        "code": hashlib.sha256("".join(digests).encode()).hexdigest(),
        "unicode": unicodedata.unidata_version,
    }


def read_summary(path: Path) -> dict[str, Any] | None:
    """Return the summary that a finished step wrote, or None if it did not finish.

    Raises UserError: damaged.
    """
    if not path.exists():
        return None
    remedy = "Remove the folder and prepare again"
    if (found := parse_checksummed(read_plain(path, remedy).decode("utf-8", "replace"))) is None:
        raise UserError("data.damaged", path, "is damaged", remedy)
    return found


def check_options(out: Path, provenance: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Compare the options of a finished folder with the requested ones, which must have the types
    that JSON returns. Raises UserError: they differ.
    """
    if provenance.get("options") != options:
        remedy = "Choose another --out, or remove it"
        raise UserError(
            "prepare.other-options", out, "was prepared with different input or options", remedy
        )


def is_whole(out: Path, check: Callable[[], Iterable[FileSum]], progress: Progress) -> bool:
    """Return whether all files of a finished folder are intact; report that there is nothing to do,
    or what is rebuilt. ``check`` returns the files' checksums and raises UserError if one is
    missing or has another size.
    """
    try:
        sums = list(check())
        with progress.task(f"checking {out}", len(sums), "files") as advance:
            for file in sums:
                if problem := file.problem():
                    raise problem
                advance(1)
    except UserError as problem:
        progress(f"{problem.subject}: {problem.problem}: rebuilding it")
        return False
    # Of a run that was killed after its last file.
    shutil.rmtree(out / WORK_FOLDER, ignore_errors=True)
    progress(f"{out} is finished with these options: nothing to do")
    return True


def whole_shards(*manifests: Manifest) -> list[FileSum]:
    """Check prepared sets, as the ``check`` of `is_whole`."""
    for manifest in manifests:
        check_files(manifest)
    return [file for manifest in manifests for file in file_sums(manifest)]


def finished_manifest(out: Path, options: Mapping[str, Any], progress: Progress) -> Manifest | None:
    """Return the manifest of ``out`` if it was finished with the same options, or None if it was
    not finished or a file is damaged. Raises UserError as `check_options`.
    """
    if not (out / MANIFEST).exists():
        return None
    found = read_manifest(out)
    check_options(out, found.provenance, options)
    return found if is_whole(out, lambda: whole_shards(found), progress) else None


def finished_list(out: Path, options: Mapping[str, Any], progress: Progress) -> RecordList | None:
    """Do the same as `finished_manifest` for TFRecords."""
    found = read_list(out)
    if found is None:
        return None
    check_options(out, found.provenance, options)

    def check() -> list[FileSum]:
        found.check_sizes([out / name for name in found.by_name])
        return listed_sums(out)

    return found if is_whole(out, check, progress) else None


def keep_apart(out: Path, inputs: Iterable[Path]) -> None:
    """Check that no output overwrites an input, also through links. Raises UserError."""
    target = out.resolve()
    for given in inputs:
        inside = given.iterdir() if given.is_dir() else ()
        if given.resolve() == target or (not given.is_dir() and given.resolve().parent == target):
            raise UserError("file.in-input", out, "is the input folder", "Choose another --out")
        if any(path.is_symlink() and path.resolve().parent == target for path in inside):
            raise UserError(
                "file.in-input",
                out,
                f"holds the files that {given} links to",
                "Choose another --out",
            )


@dataclass(frozen=True)
class TextPart:
    """One text part."""

    path: Path
    num_bytes: int  # 0 if it cannot be read
    sha256: str  # of its bytes; empty if it cannot be read
    problem: UserError | None = None  # why it cannot be used


def expand_inputs(inputs: Iterable[Path], *, skip_bad: bool = False) -> list[Path]:
    """Return the text parts of the given files and folders.

    A folder contributes its sorted ``part-*`` and ``*.txt`` files, except ``eval*.txt``;
    files are used as named.

    Raises UserError: a folder holds no part, or not all of its ``part-00000-of-00500``. With
    ``skip_bad``, the missing ones are listed as files that cannot be read.
    """
    parts: list[Path] = []
    for given in inputs:
        if given.is_dir():
            parts += _parts_of_folder(given, skip_bad)
        else:
            parts.append(given)
    return parts


def _parts_of_folder(folder: Path, skip_bad: bool) -> list[Path]:
    with reading(folder):
        found = sorted(
            path
            for path in folder.iterdir()
            if _IN_FOLDER.fullmatch(path.name) and not path.is_dir()
        )
    if not found:
        reason = "holds no text part (part-* or *.txt)"
        raise UserError(
            "data.missing", folder, reason, "Give the folder of the text, or files by name"
        )
    missing = missing_numbers([path.name for path in found])
    if missing and not skip_bad:
        remedy = "Restore what is missing, name the files to use, or use --skip-bad"
        raise UserError("data.incomplete", folder, missing_text(missing), remedy)
    return sorted([*found, *(folder / name for name in missing)])


def inspect_parts(
    paths: Sequence[Path], *, skip_bad: bool = False, executor: Executor = LOCAL
) -> list[TextPart]:
    """Read all parts once for sizes and checksums.

    Raises UserError: a part cannot be read, is empty, or duplicates another (both are named). With
    ``skip_bad`` such errors go into `TextPart.problem` instead, and only having no good part is an
    error.
    """
    if not paths:
        raise UserError(
            "data.missing", "--input", "there is no text part", "Give text files or their folder"
        )
    parts: list[TextPart] = []
    first: dict[str, Path] = {}
    total = sum(path.stat().st_size for path in paths if path.is_file())
    advancing = executor.progress.task("checksums", total, "bytes")
    with ThreadPoolExecutor(max(1, executor.workers)) as pool, advancing as advance:
        for part in pool.map(inspect_part, paths):
            if not part.problem and part.sha256 in first:
                reason = f"has the same content as {first[part.sha256]}"
                part = replace(
                    part,
                    problem=UserError("data.duplicate", part.path, reason, "Give each part once"),
                )
            if not part.problem:
                first[part.sha256] = part.path
            elif not skip_bad:
                raise part.problem
            parts.append(part)
            advance(part.num_bytes)
    if all(part.problem for part in parts):
        raise UserError(
            "data.damaged", "--input", f"none of {len(parts)} parts can be used; {parts[0].problem}"
        )
    return parts


def inspect_part(path: Path) -> TextPart:
    """Read a part once for its size and checksum."""
    try:
        size = plain_size(path, REMEDY)
        return (
            TextPart(path, size, file_sha256(path))
            if size
            else TextPart(path, 0, "", without_text(path))
        )
    except UserError as error:
        return TextPart(path, 0, "", error)

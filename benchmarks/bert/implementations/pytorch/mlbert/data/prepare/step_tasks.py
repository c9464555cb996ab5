"""A step as a plan, passes of independent tasks, and a merge,
which any number of processes and machines may share.

The work folder, ``.tasks`` in the step's output, has ``plan.json`` (written once: input, options,
and the identity of the code that began the step) and a mark for every finished task,
``<pass>-00003.json``, with the task's result if a later pass needs it. A task writes files under
its own temporary names and renames them, and always the same bytes: it may run twice, also at the
same time, and a killed one is repeated alone. The merge checks that no task is missing and
completes the output; then the folder goes.

By default, one process does all of it in a local pool, and replaces the plan of an interrupted
local run with other options. It never replaces a plan that shares work on, which the file
``shared`` marks. It does not replace the plan of other code either, because the finished files of
that code look like its own.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from mlbert.data.formats.index_cache import state_of
from mlbert.data.formats.manifest import make_folder
from mlbert.data.prepare.code_identity import MADE_BY, code_identity
from mlbert.data.prepare.executor import Executor, Item, Result
from mlbert.data.prepare.finished_output import WORK_FOLDER
from mlbert.host.errors import UserError
from mlbert.host.files import read_plain, write_atomically, writing
from mlbert.host.json_files import add_checksum, parse_checksummed

PLAN = "plan.json"
INPUTS = "inputs"
SHARED = "shared"
# Exit status of a share that can do nothing before others finish;
# sysexits.h calls it a temporary failure.
TOO_EARLY = 75
ALL_RESULTS = ".results.json"  # of a pass that is complete
_LISTED = 8  # missing tasks in a message
_DIGITS = 12  # of the code's SHA-256 in a message


class ShareDone(SystemExit):
    """Ends the process of a share before the merge, with status 0, or with `TOO_EARLY`."""


def stamps(paths: Iterable[Path]) -> list[list[str | int]]:
    """Return path, size and time of change of files, which a plan records;
    0 for those that cannot be read.
    """
    found: list[list[str | int]] = []
    for path in paths:
        try:
            found.append([str(path), *state_of(path)])
        except OSError:
            found.append([str(path), 0, 0])
    return found


def _run_marked(
    function: Callable[[Item], Result], mark: str, keep: bool, task: tuple[int, Item]
) -> Result:
    """Run a task and mark it as done; ``mark`` is the path without the number."""
    number, item = task
    result = function(item)
    kept = {"result": result if keep else None}
    write_atomically(Path(f"{mark}-{number:05d}.json"), json.dumps(add_checksum(kept)))
    return result


class StepTasks:
    """Runs this process's share of a step.

    Args:
        out: output folder.
        plan: JSON-able input and options; `INPUTS` lists the `stamps` of files.

    Raises UserError: a share or merge differs from the plan, there is no plan to merge,
    or other code began the step.
    """

    def __init__(self, out: Path, plan: Mapping[str, Any], executor: Executor) -> None:
        self.out = out
        self.executor = executor
        self.share = executor.share
        self.folder = out / WORK_FOLDER
        wanted = _full_plan(plan)
        path = self.folder / PLAN
        found = _read(path)
        is_replaceable = found is None or found.get(MADE_BY) == wanted[MADE_BY]
        if (
            self.share.is_all
            and self.folder.exists()
            and found != wanted
            and is_replaceable
            and not (self.folder / SHARED).exists()
        ):
            shutil.rmtree(self.folder)
        make_folder(out)
        make_folder(self.folder)
        _write_once(path, json.dumps(add_checksum(wanted), indent=1))
        found = _read(path)
        if found is None:
            remedy = f"Remove {out} and begin again"
            raise UserError("data.damaged", path, "is damaged", remedy)
        if found != wanted:
            raise _difference(out, found, wanted)
        if not self.share.is_all:
            write_atomically(self.folder / SHARED, "")

    def run(
        self,
        name: str,
        function: Callable[[Item], Result],
        items: Sequence[Item],
        sizes: Sequence[int],
        *,
        unit: str = "bytes",
        is_last: bool = True,
        keep: bool = False,
    ) -> list[Result]:
        """Run this share of a pass and return the results of all its tasks.

        Args:
            name, function, items, sizes, unit: as in `Executor.run`.
            is_last: whether the merge follows, which needs the results. Unless they are kept, it
                calls ``function`` again, which finds its files written, checks them and returns the
                same.
            keep: keep the results, which are JSON-able, for the merge and for processes that run a
                later pass; otherwise only those of the last pass are returned.

        Raises ShareDone: the share is done with the last pass, or others have to finish this one
        first. Its status is `TOO_EARLY` if the share had already ended once in this state: then it
        was started for the next pass. Raises UserError: tasks are missing for the merge.
        """
        share = self.share
        mark = f"{self.folder / name.replace(' ', '-')}"
        ended = Path(f"{mark}.share-{share.index}-of-{share.count}")
        has_ended = ended.exists()
        marks = self._marks(mark, len(items), keep)
        if share.is_all:
            todo = [number for number in range(len(items)) if not (keep and number in marks)]
        elif share.merges:
            self._check_complete(name, marks, len(items))
            todo = [*range(len(items))] if is_last and not keep else []
        else:
            todo = [
                number for number in range(len(items)) if share.has(number) and number not in marks
            ]
        tasks = [(number, items[number]) for number in todo]
        left = [sizes[number] for number in todo]
        marking = partial(_run_marked, function, mark, keep)
        made = self.executor.run(marking, tasks, name=name, where=self.out, sizes=left, unit=unit)
        if not share.merges:
            marks = self._marks(mark, len(items), keep)
            num_missing = len(items) - len(marks)
            if is_last or num_missing:
                is_early = has_ended and not todo and not is_last
                write_atomically(ended, "")
                self._end_share(name, len(todo), num_missing, is_early)
        results = marks | dict(zip(todo, made, strict=True))
        return [results[number] for number in range(len(items))]

    def finish(self) -> None:
        """Remove the work folder of a finished step."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _marks(self, mark: str, count: int, keep: bool) -> dict[int, Any]:
        """Return the results of finished tasks by number; None without ``keep``.

        The first process that finds all of them writes them to one file, so that the shares of a
        later pass read that instead of a file for each task.
        """
        together = Path(f"{mark}{ALL_RESULTS}")
        if keep and (complete := _read(together)) is not None:
            return dict(enumerate(complete["results"]))
        there = {*os.listdir(self.folder)}
        paths = {number: Path(f"{mark}-{number:05d}.json") for number in range(count)}
        paths = {number: path for number, path in paths.items() if path.name in there}
        if not keep:
            return dict.fromkeys(paths)
        found = {number: _read(path) for number, path in paths.items()}
        results = {number: values["result"] for number, values in found.items() if values}
        if count and len(results) == count:
            ordered = [results[number] for number in range(count)]
            _write_once(together, json.dumps(add_checksum({"results": ordered})))
        return results

    def _check_complete(self, name: str, marks: Mapping[int, Any], count: int) -> None:
        missing = [f"{number}/{count}" for number in range(count) if number not in marks]
        if missing:
            listed = ", ".join(missing[:_LISTED]) + (", ..." if len(missing) > _LISTED else "")
            reason = f"{len(missing)} of {count} tasks of the pass {name} are missing: {listed}"
            remedy = "Make each with --task in place of --merge, or all with --task 0/1"
            raise UserError("data.incomplete", self.out, reason, remedy)

    def _end_share(self, name: str, made: int, left: int, is_early: bool) -> NoReturn:
        share = self.share
        after = (
            f"{left} of other shares are missing; then repeat this"
            if left
            else "all are done; --merge completes it"
        )
        self.executor.progress(
            f"{self.out}: share {share.index}/{share.count} of {name}: {made} tasks made, {after}"
        )
        raise ShareDone(TOO_EARLY if is_early else 0)


def is_begun(out: Path, plan: Mapping[str, Any]) -> bool:
    """Return whether this code has begun the step in ``out`` with this plan, see `StepTasks`,
    and not finished it.
    """
    return _read(out / WORK_FOLDER / PLAN) == _full_plan(plan)


def _full_plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan as it is read from its file."""
    full: dict[str, Any] = json.loads(json.dumps({**plan, MADE_BY: code_identity()}))
    return full


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return parse_checksummed(read_plain(path).decode("utf-8", "replace"))
    except UserError:
        return None


def _write_once(path: Path, content: str) -> None:
    """Write a file unless it exists; of several processes that try, one succeeds."""
    if path.exists():
        return
    own = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    write_atomically(own, content)
    with writing(path, "Choose another output folder"):
        try:
            os.link(own, path)
        except FileExistsError:
            pass
        finally:
            own.unlink()


def _difference(out: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> UserError:
    """Return the error that names the first difference between two plans."""
    if found.get(MADE_BY) != wanted[MADE_BY]:
        reason = (
            f"was begun by {_code_name(found.get(MADE_BY))}, not by {_code_name(wanted[MADE_BY])}"
        )
        remedy = f"Complete it with the same version, or remove {out} and begin again"
        return UserError("prepare.other-version", out, reason, remedy)
    name = next(name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name))
    remedy = f"Repeat the options of the other tasks, or remove {out / WORK_FOLDER} and begin again"
    if name != INPUTS or name not in found:
        reason = f"was started with {name} {found.get(name)}, not {wanted.get(name)}"
        return UserError("prepare.other-options", out, reason, remedy)
    old, new = ({one[0]: one for one in plan[name]} for plan in (found, wanted))
    path = next(path for path in sorted({*old, *new}) if old.get(path) != new.get(path))
    what = (
        "is new"
        if path not in old
        else "is not given any more"
        if path not in new
        else "has changed"
    )
    return UserError("data.changed", path, f"{what} since {out} was begun", remedy)


def _code_name(made_by: Mapping[str, str] | None) -> str:
    """Return a `code_identity` in words; None is that of a plan that has none."""
    if made_by is None:
        return "an earlier version of mlbert"
    code = made_by["code"][:_DIGITS]
    return f"{made_by['tool']} (code {code}, Unicode {made_by['unicode']})"

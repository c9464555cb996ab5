"""Edits of runs that a test has read: of a line's value, metadata, place and time.

Run 3 unless another is named.
"""

from collections.abc import Callable
from typing import Any

Line = dict[str, Any]
Run = list[Line]
Edit = Callable[[list[Run]], None]


def nth(run: Run, key: str, index: int = 0) -> Line:
    """Return the line of a key's occurrence by index."""
    return [line for line in run if line["key"] == key][index]


def put(key: str, value: Any, index: int = 0, which: int = 3) -> Edit:
    return lambda runs: nth(runs[which], key, index).update(value=value)


def mark(key: str, name: str, value: Any, index: int = 0) -> Edit:
    """Return an edit that changes an entry of the metadata."""
    return lambda runs: nth(runs[3], key, index)["metadata"].update({name: value})


def configure(name: str, value: Any, which: int = 3) -> Edit:
    """Return an edit that changes the value of a setting."""
    return lambda runs: nth(runs[which], "configuration")["value"][name].update(value=value)


def drop(key: str, index: int = 0) -> Edit:
    return lambda runs: runs[3].remove(nth(runs[3], key, index))


def keep(is_kept: Callable[[Line], bool]) -> Edit:
    return lambda runs: runs.__setitem__(3, [line for line in runs[3] if is_kept(line)])


def insert(before: str, like: str = "", index: int = 0, which: int = 3, **changes: Any) -> Edit:
    """Return an edit that inserts a changed copy of the first line ``like``,
    or of the line that it is put before.
    """

    def edit(runs: list[Run]) -> None:
        after = nth(runs[which], before, index)
        runs[which].insert(
            runs[which].index(after), (nth(runs[which], like) if like else after) | changes
        )

    return edit


def repeat(key: str, index: int = 0, after: int = 0, which: int = 3) -> Edit:
    """Return an edit that repeats a line ``after`` milliseconds later."""

    def edit(runs: list[Run]) -> None:
        line = nth(runs[which], key, index)
        again = {**line, "metadata": dict(line["metadata"]), "time_ms": line["time_ms"] + after}
        runs[which].insert(runs[which].index(line) + 1, again)

    return edit


def move(key: str, behind: str, index: int = 0) -> Edit:
    """Return an edit that moves a line behind another, 1 ms later."""

    def edit(runs: list[Run]) -> None:
        line = nth(runs[3], key, index)
        other = nth(runs[3], behind, -1)
        runs[3].remove(line)
        runs[3].insert(runs[3].index(other) + 1, line | {"time_ms": other["time_ms"] + 1})

    return edit


def shift(key: str, ms: float, index: int = 0, which: int = 3) -> Edit:
    """Return an edit that delays this line and all later ones by ``ms``."""

    def edit(runs: list[Run]) -> None:
        first = next(
            n for n, line in enumerate(runs[which]) if line is nth(runs[which], key, index)
        )
        for line in runs[which][first:]:
            line["time_ms"] += ms

    return edit


def stamp(make: Callable[[int], Any], key: str = "", index: int = 0, which: int = 3) -> Edit:
    """Return an edit that changes the time of one line or, without a key, of all lines."""

    def edit(runs: list[Run]) -> None:
        lines = [nth(runs[which], key, index)] if key else runs[which]
        for line in lines:
            line["time_ms"] = make(line["time_ms"])

    return edit


def squeezed(factor: float, which: int = 3) -> Edit:
    """Return an edit that scales all times after run_start."""

    def edit(runs: list[Run]) -> None:
        begin = nth(runs[which], "run_start")["time_ms"]
        stamp(lambda ms: round(begin + (ms - begin) * factor) if ms > begin else ms, which=which)(
            runs
        )

    return edit


def cut_evaluations(*ms: int) -> Edit:
    """Return an edit that gives the evaluations these durations, in turn."""

    def edit(runs: list[Run]) -> None:
        for index in range(sum(line["key"] == "eval_stop" for line in runs[3])):
            took = (
                nth(runs[3], "eval_stop", index)["time_ms"]
                - nth(runs[3], "eval_start", index)["time_ms"]
            )
            shift("eval_stop", ms[index % len(ms)] - took, index)(runs)

    return edit


def each(*edits: Edit) -> Edit:
    def edit(runs: list[Run]) -> None:
        for one in edits:
            one(runs)

    return edit

"""Progress on a terminal and in a log file."""

import io
from collections.abc import Callable
from contextlib import nullcontext

import pytest
from rich.console import Console

from mlbert.host import console as module
from mlbert.host.console import console_progress


def recorded(terminal: bool = False) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=terminal, width=120, color_system=None), stream


def test_a_log_file_gets_plain_lines_with_percent_rate_and_estimate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lines are printed even if the work reports nothing, and work since the last report
    does not change the estimate.
    """
    now = [0.0]
    shown: list[Callable[[], None]] = []
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module, "_repeating", lambda show: nullcontext(shown.append(show)))
    console, stream = recorded()
    with console_progress(console).task("cleaning", 4_000_000, "bytes") as advance:
        for seconds, done in ((10, 0), (20, 2_000_000), (30, 0), (39, 2_000_000)):
            now[0] = seconds
            if done:
                advance(done)
            if seconds < 39:
                shown[0]()
    with console_progress(console).task("fetching", 0, "bytes") as advance:
        now[0] = 49
        advance(3000)
        shown[1]()
    assert stream.getvalue().splitlines() == [
        "cleaning: 0 % of 4 MB, 10 s so far",
        "cleaning: 50 % of 4 MB, 100 kB/s, 20 s left",
        "cleaning: 50 % of 4 MB, 100 kB/s, 10 s left",
        "cleaning: 4 MB in 39 s, 103 kB/s",
        "fetching: 3 kB, 10 s so far",
        "fetching: 3 kB in 10 s, 300 B/s",
    ]


def test_a_log_file_gets_one_line_for_quick_work() -> None:
    console, stream = recorded()
    progress = console_progress(console)
    for name, number in (("packing", 12_300_000), ("nothing", 0)):
        with progress.task(name, number, "sequences") as advance:
            advance(number)
    progress("brackets [red] stay as they are")
    lines = ["packing: 12.3 M sequences", "nothing: 0 sequences", "brackets [red] stay as they are"]
    assert stream.getvalue().splitlines() == lines


def test_a_terminal_gets_a_bar_that_ends_full() -> None:
    console, stream = recorded(terminal=True)
    progress = console_progress(console)
    with progress.task("reading", 2000, "records") as advance:
        advance(1000)
        progress("said in between")
        advance(1000)
    assert all(
        part in stream.getvalue() for part in ("said in between", "reading", "100 %", "2 k records")
    )


def test_durations() -> None:
    found = [module.short_duration(seconds) for seconds in (0.4, 59.6, 200, 3900)]
    assert found == ["0 s", "1 min 00 s", "3 min 20 s", "1 h 05 min"]

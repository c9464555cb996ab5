"""Console output of the commands: tables, progress,
and text from files made safe for a terminal.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.console import Console
from rich.filesize import pick_unit_and_suffix
from rich.markup import escape
from rich.progress import (
    BarColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Column, Table
from rich.text import Text

from mlbert.host.files import writing
from mlbert.host.progress import Progress

_MOST_CHARACTERS = 2000  # per text from a file
_MOST_OF_BAR = 40  # columns; a narrow terminal leaves less for the bar
LINE_SECONDS = 10.0  # between lines of progress without a terminal


def standard_output() -> Console:
    """Return a console as wide as the terminal or COLUMNS, otherwise 80 columns."""
    return Console(highlight=False)


def safe(text: object) -> str:
    """Make text from a file safe for a terminal: no Rich markup, no control characters,
    shortened if very long.
    """
    return escape(printable(str(text)))


def printable(text: str) -> str:
    """Return text without control characters, shortened if very long."""
    cut = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
    return "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}"
        for letter in cut
    )


def new_table(title: str, texts: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    """Return a table that fits the console: text columns fold so that numbers fit.

    ``title`` is Rich markup.
    """
    table = Table(
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def write_page(path: Path, page: str) -> None:
    """Write an HTML page. Raises UserError if it cannot be written."""
    with writing(path, "Name a file in a writable folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8", errors="replace")


console = Console()  # shared by all preparation commands


@contextmanager
def _repeating(show: Callable[[], object]) -> Iterator[None]:
    """Call a function every `LINE_SECONDS` in another thread during the block."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(LINE_SECONDS):
            show()

    thread = threading.Thread(target=repeat, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def waiting(words: str) -> Iterator[Callable[[str], None]]:
    """Show on standard error that work of unknown size continues;
    call the yielded function with each step's name.

    On a terminal it is a spinner, otherwise a line every 10 s.
    """
    output = Console(stderr=True)
    started = time.monotonic()
    current = words
    if output.is_terminal:
        with output.status(words) as status:
            yield status.update
        return

    def update(step: str) -> None:
        nonlocal current
        current = f"{words}: {step}"

    say = _Lines(output)
    with _repeating(lambda: say(f"{current}, {short_duration(time.monotonic() - started)} so far")):
        yield update


def console_progress(output: Console = console) -> Progress:
    """Return a progress bar with rate and remaining time on a terminal;
    otherwise a line every 10 s and a last one.
    """
    return _Bars(output) if output.is_terminal else _Lines(output)


class _Lines(Progress):
    """Progress for a log file: no control characters, few lines."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def __call__(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, highlight=False, markup=False)

    @contextmanager
    def task(self, name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """See `mlbert.host.progress.Progress.task`."""
        started = advanced = time.monotonic()
        done = 0

        def advance(units: int) -> None:
            nonlocal done, advanced
            done += units
            advanced = time.monotonic()

        def show() -> None:
            seconds = time.monotonic() - started
            share = _amount(done, unit)
            if total:
                share = f"{100 * done / total:.0f} % of {_amount(total, unit)}"
            if not done or not total:
                self(f"{name}: {share}, {short_duration(seconds)} so far")
                return
            # Divide by the time of the last report, not by now: work since then is not in `done`.
            rate = done / max(1e-9, advanced - started)
            left = short_duration(max(0.0, total / rate - seconds))
            self(f"{name}: {share}, {_amount(rate, unit)}/s, {left} left")

        with _repeating(show):
            yield advance
        seconds = time.monotonic() - started
        if seconds < 1:
            self(f"{name}: {_amount(done, unit)}")
        else:
            self(
                f"{name}: {_amount(done, unit)} in {short_duration(seconds)}, "
                f"{_amount(done / seconds, unit)}/s"
            )

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """See `mlbert.host.progress.Progress.step`."""
        started = time.monotonic()
        with _repeating(
            lambda: self(f"{name}, {short_duration(time.monotonic() - started)} so far")
        ):
            yield


class _Bars(_Lines):
    """Progress for a terminal; other lines scroll above the bar."""

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """See `mlbert.host.progress.Progress.step`."""
        with self.console.status(name):
            yield

    @contextmanager
    def task(self, name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """See `mlbert.host.progress.Progress.task`."""
        with Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None, table_column=Column(max_width=_MOST_OF_BAR)),
            TextColumn("{task.percentage:>3.0f} %"),
            _Rate(unit),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
        ) as bars:
            task = bars.add_task(name, total=total)
            yield lambda units: bars.advance(task, units)


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__(Column(no_wrap=True))
        self.unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        done = _amount(task.completed, self.unit)
        return Text(f"{done}, {_amount(speed, self.unit)}/s" if speed else done)


def _amount(count: float, unit: str) -> str:
    """Format a count with a decimal prefix, such as ``1.5 GB`` or ``12.3 M sequences``."""
    size, prefix = pick_unit_and_suffix(count, ["", "k", "M", "G", "T"], 1000)  # type: ignore[arg-type]
    number = f"{count:.0f}" if not prefix and count == int(count) else f"{count / size:.3g}"
    return (
        f"{number} {prefix}B" if unit == "bytes" else f"{number} {prefix} {unit}".replace("  ", " ")
    )


def short_duration(seconds: float) -> str:
    """Format a duration, such as ``1 h 05 min``, ``3 min 20 s`` or ``12 s``."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"

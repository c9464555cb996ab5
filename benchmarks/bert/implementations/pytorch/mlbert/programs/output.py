"""Where the commands print and write, and what of other people's text may go to a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mlbert.host.errors import UserError

_MOST_CHARACTERS = 2000  # of one text from a file


def standard_output() -> Console:
    """As wide as the terminal or COLUMNS says, else 80 columns."""
    return Console(highlight=False)


def safe(text: object) -> str:
    """Text from a file for a terminal: no markup of Rich's, no control characters, of a very long one the beginning."""
    return escape(printable(str(text)))


def printable(text: str) -> str:
    """Text without control characters, of a very long one the beginning."""
    cut = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in cut)


def new_table(title: str, texts: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    """A table that fits the console: columns of text fold where numbers leave no room; the title is markup."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def write_page(path: Path, page: str) -> None:
    """Writes an HTML page. UserError where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(
            "file.unwritable", path, f"cannot be written ({error.strerror})", "Name a file in a writable folder"
        ) from None

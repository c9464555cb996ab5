"""Where the commands print and write."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from mlbert.core.errors import UserError

FILE_WIDTH = 160  # columns of a table that goes into a file or pipe, where Rich would cut at 80


def wide_console() -> Console:
    """Standard output; on a terminal as wide as that is."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)


def write_page(path: Path, page: str) -> None:
    """Writes an HTML page. UserError where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(path, f"cannot be written ({error.strerror})", "Name a file in a writable folder") from None

"""Where the commands print."""

from __future__ import annotations

from rich.console import Console

FILE_WIDTH = 160  # columns of a table that goes into a file or pipe, where Rich would cut at 80


def wide_console() -> Console:
    """Standard output; on a terminal as wide as that is."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)

"""``mlbert cache``: list, measure and clear the user's cache."""

from __future__ import annotations

import datetime
from typing import Annotated

import typer
from rich.filesize import decimal

from mlbert.host.console import new_table, safe, standard_output
from mlbert.host.native import cache_folder
from mlbert.programs.user_cache import clear, read_entries

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_GIGABYTE = 10**9


@app.callback()
def cache() -> None:
    """List, measure and clear the user's cache: $XDG_CACHE_HOME/mlbert, by default
    ~/.cache/mlbert.

    Everything in it is rebuilt when it is needed.
    """


@app.command("list")
def list_command() -> None:
    """List the entries of the cache, the most recently used first.

    \b
    Examples:
      mlbert cache list
    """
    folder = cache_folder()
    table = new_table(safe(folder), ["entry", "what", "last used", "held"], ["size"])
    for entry in read_entries(folder):
        day = datetime.datetime.fromtimestamp(entry.used).date().isoformat()
        name = safe(entry.path.relative_to(folder))
        held = "by a run" if entry.is_held else ""
        table.add_row(name, entry.meaning, day, held, decimal(entry.num_bytes))
    standard_output().print(table)


@app.command("size")
def size_command() -> None:
    """Print the size of the cache.

    \b
    Examples:
      mlbert cache size
    """
    entries = read_entries(cache_folder())
    size = sum(entry.num_bytes for entry in entries)
    held = sum(entry.num_bytes for entry in entries if entry.is_held)
    typer.echo(f"{cache_folder()}: {decimal(size)}, of which runs are using {decimal(held)}")


@app.command("clear")
def clear_command(
    days: Annotated[
        float,
        typer.Option(
            "--unused-for", min=0, help="Only entries that were not used for this many days."
        ),
    ] = 0,
    down_to: Annotated[
        float,
        typer.Option("--down-to", min=0, help="Stop when the cache is down to this size in GB."),
    ] = 0,
) -> None:
    """Delete entries that no run on this machine is using, the least recently used first.

    \b
    Examples:
      mlbert cache clear --unused-for 30
      mlbert cache clear --down-to 5
    """
    deleted, left = clear(read_entries(cache_folder()), days, round(down_to * _GIGABYTE))
    size = sum(entry.num_bytes for entry in deleted)
    count = "1 entry" if len(deleted) == 1 else f"{len(deleted)} entries"
    typer.echo(f"deleted {count} ({decimal(size)}); {decimal(left)} remain")

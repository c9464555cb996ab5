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

    Everything in it is made again when it is needed.
    """


@app.command("list")
def list_command() -> None:
    """List what is in it, the last used first."""
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
    """Print its size."""
    entries = read_entries(cache_folder())
    size = sum(entry.num_bytes for entry in entries)
    held = sum(entry.num_bytes for entry in entries if entry.is_held)
    typer.echo(f"{cache_folder()}: {decimal(size)}, of which runs hold {decimal(held)}")


@app.command("clear")
def clear_command(
    days: Annotated[
        float, typer.Option("--unused-for", min=0, help="Only what was not used for so many days.")
    ] = 0,
    down_to: Annotated[
        float, typer.Option("--down-to", min=0, help="Only until it has so many GB.")
    ] = 0,
) -> None:
    """Delete what no run on this machine holds, the least recently used first."""
    deleted, left = clear(read_entries(cache_folder()), days, round(down_to * _GIGABYTE))
    size = sum(entry.num_bytes for entry in deleted)
    count = "1 entry" if len(deleted) == 1 else f"{len(deleted)} entries"
    typer.echo(f"deleted {count} ({decimal(size)}); {decimal(left)} remain")

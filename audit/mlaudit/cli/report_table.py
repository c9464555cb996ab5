"""A report's table in the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from mlaudit.report import tables
from mlbert.host.console import new_table, safe


def as_table(
    title: str, table: tables.ReportTable, headers: Mapping[str, str] | None = None
) -> Table:
    """Return some columns of a report's table (default: all),
    given with headers that fit a terminal.
    """
    headers = headers or {name: name for name in table.columns}
    places = [table.columns.index(name) for name in headers]
    num_texts = sum(place < table.texts for place in places)
    found = new_table(
        safe(title), list(headers.values())[:num_texts], list(headers.values())[num_texts:]
    )
    for row in table.rows:
        cells = (row[place] for place in places)
        found.add_row(
            *(safe(cell.text if isinstance(cell, tables.Cell) else cell) for cell in cells)
        )
    return found

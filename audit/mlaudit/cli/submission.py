"""``mlbert submission``: the commands of ``mlaudit`` for a submission tree,
by the names of earlier versions.
"""

from __future__ import annotations

import typer

from mlaudit.cli.main import FOR_SUBMISSIONS
from mlbert.host.command_line import lazy_group

app = typer.Typer(
    cls=lazy_group(FOR_SUBMISSIONS),
    help="Check, describe, extend, seal, export a submission tree.",
    add_completion=False,
    rich_markup_mode=None,
)


@app.callback()
def _group() -> None:
    """Make it a group although Typer knows none of its commands."""

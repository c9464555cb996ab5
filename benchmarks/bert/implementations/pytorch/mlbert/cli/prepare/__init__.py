"""``mlbert prepare``: from text, TFRecords or another pipeline's folder to what training reads. A module a topic."""

from __future__ import annotations

import typer

from mlbert.cli.prepare import estimate, foreign, instances, sets, tasks, text, wiki

app = typer.Typer(help="Text to the shards that training reads.", add_completion=False, rich_markup_mode=None)
for module in (text, wiki, estimate, instances, foreign, sets, tasks):
    app.add_typer(module.app)

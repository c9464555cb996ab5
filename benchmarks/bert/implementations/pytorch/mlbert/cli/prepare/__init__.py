"""``mlbert prepare``: prepare text, TFRecords or another pipeline's data for training.

One module per topic.
"""

from __future__ import annotations

import typer

from mlbert.cli.prepare import foreign, instances, sets, text, tokenizer, tokens, wiki

app = typer.Typer(
    help="Prepare text or data sets for training.", add_completion=False, rich_markup_mode=None
)
for module in (text, tokenizer, tokens, wiki, instances, foreign, sets):
    app.add_typer(module.app)

"""``mlbert fill-mask``: predict the words behind the mask token."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def fill_mask(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="LOGDIR, a run_<i>, its checkpoints/step_<n>, or a model's folder.",
        ),
    ],
    texts: Annotated[
        list[str],
        typer.Argument(
            metavar="TEXT",
            help="Sentences, each with [MASK], or the tokenizer's mask token, in place of a word.",
        ),
    ],
    top: Annotated[int, typer.Option(help="Number of predictions.", min=1, max=1000)] = 5,
) -> None:
    """Print the most probable words for the mask in each text, with their probabilities.

    \b
    Examples:
      mlbert fill-mask my-model/model "The [MASK] was late."
    """
    from mlbert.models import fill_mask as masked  # torch takes a second

    network, tokenizer = masked.open_masked_lm(model)
    for text in texts:
        masked.check_text(text, tokenizer.mask_token)
    if len(texts) == 1:
        for word, probability in masked.fill(network, tokenizer, texts[0], top):
            typer.echo(f"{probability:.4f}  {word}")
        return
    for text in texts:
        guesses = masked.fill(network, tokenizer, text, top)
        typer.echo(text)
        words = [f'"{word}" {probability:.2f}' for word, probability in guesses]
        typer.echo(f"    {'   '.join(words)}")

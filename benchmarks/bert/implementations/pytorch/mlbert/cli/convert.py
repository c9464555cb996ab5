"""``mlbert convert``: checkpoints to and from Hugging Face's form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)

Source = Annotated[Path, typer.Argument(help="Folder that is read.")]
Target = Annotated[Path, typer.Argument(help="Folder that is made.")]


@app.command("torch-to-hf")
def torch_to_hf(source: Source, target: Target) -> None:
    """A run's weights/ folder (bert_config.json, model.safetensors) to a Hugging Face folder."""
    from mlbert.convert.huggingface import torch_to_huggingface

    _print_report(torch_to_huggingface(source, target), target)


@app.command("hf-to-torch")
def hf_to_torch(source: Source, target: Target) -> None:
    """A Hugging Face BERT folder (config.json, model.safetensors) to bert_config.json and model.safetensors."""
    from mlbert.convert.huggingface import huggingface_to_torch

    _print_report(huggingface_to_torch(source, target), target)


def _print_report(report: dict[str, str], target: Path) -> None:
    console = Console()
    for name, fate in sorted(report.items()):
        console.print(f"{name}: {fate}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"wrote {target}", markup=False, highlight=False, soft_wrap=True)

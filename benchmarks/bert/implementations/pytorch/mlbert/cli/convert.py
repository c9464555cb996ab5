"""``mlbert convert``: convert checkpoints of other programs to and from our format.

Each command prints the fate of every tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mlbert.models.weights.checkpoint_state import Report

app = typer.Typer(
    help="Convert checkpoints of other programs to and from our format.", add_completion=False, rich_markup_mode=None
)

Folder = Annotated[Path, typer.Argument(help="Source folder.")]
File = Annotated[Path, typer.Argument(help="Source file.")]
Prefix = Annotated[Path, typer.Argument(help="Checkpoint path, with or without .index.")]
NewFolder = Annotated[Path, typer.Argument(help="New folder.")]
NewFile = Annotated[Path, typer.Argument(help="New file.")]
Config = Annotated[Path | None, typer.Option(help="The checkpoint's bert_config.json; default: the one next to it.")]


@app.command("tf1-to-torch")
def tf1_to_torch(source: Prefix, target: NewFolder, config: Config = None) -> None:
    """Convert a TensorFlow 1 checkpoint (model.ckpt-28252) to bert_config.json and model.safetensors."""
    from mlbert.models.weights.convert import tf1_to_torch

    _print_report(tf1_to_torch(source, target, config), target)


@app.command("tf1-to-nvidia")
def tf1_to_nvidia(source: Prefix, target: NewFile, config: Config = None) -> None:
    """Convert a TensorFlow 1 checkpoint to NVIDIA's .pt file, as their convert_tf_checkpoint.py does."""
    from mlbert.models.weights.convert import tf1_to_nvidia

    _print_report(tf1_to_nvidia(source, target, config), target)


@app.command("tf2-to-torch")
def tf2_to_torch(source: Prefix, target: NewFolder, config: Config = None) -> None:
    """Convert an object-based TensorFlow 2 checkpoint to bert_config.json and model.safetensors."""
    from mlbert.models.weights.convert import tf2_to_torch

    _print_report(tf2_to_torch(source, target, config), target)


@app.command("nvidia-to-torch")
def nvidia_to_torch(source: File, target: NewFolder, config: Config = None) -> None:
    """Convert NVIDIA's .pt file ({'model': state_dict}, weights only) to bert_config.json and model.safetensors."""
    from mlbert.models.weights.convert import nvidia_to_torch

    _print_report(nvidia_to_torch(source, target, config), target)


@app.command("torch-to-nvidia")
def torch_to_nvidia(source: Folder, target: NewFile) -> None:
    """Convert a run's weights/ folder (bert_config.json, model.safetensors) to NVIDIA's .pt file."""
    from mlbert.models.weights.convert import torch_to_nvidia

    _print_report(torch_to_nvidia(source, target), target)


@app.command("composer-to-torch")
@app.command("mosaic-to-torch", hidden=True)
def composer_to_torch(source: File, target: NewFolder, config: Config = None) -> None:
    """Convert a Composer BERT or MosaicBERT checkpoint to bert_config.json and model.safetensors (tensors only)."""
    from mlbert.models.weights.convert import composer_to_torch

    _print_report(composer_to_torch(source, target, config), target)


@app.command("torch-to-composer")
@app.command("torch-to-mosaic", hidden=True)
def torch_to_composer(source: Folder, target: NewFile) -> None:
    """Convert a run's weights/ folder to a file that Composer's BERT or MosaicBERT can start from."""
    from mlbert.models.weights.convert import torch_to_composer

    _print_report(torch_to_composer(source, target), target)


@app.command("hf-to-torch")
def hf_to_torch(source: Folder, target: NewFolder) -> None:
    """Convert a Hugging Face BERT folder (config.json, model.safetensors) to bert_config.json and model.safetensors."""
    from mlbert.models.weights.convert import huggingface_to_torch

    _print_report(huggingface_to_torch(source, target), target)


@app.command("torch-to-hf")
def torch_to_hf(source: Folder, target: NewFolder) -> None:
    """Convert a run's weights/ folder (bert_config.json, model.safetensors) to a Hugging Face folder."""
    from mlbert.models.weights.convert import torch_to_huggingface

    _print_report(torch_to_huggingface(source, target), target)


def _print_report(report: Report, target: Path) -> None:
    for line in [*report.lines(), f"wrote {target}"]:
        typer.echo(line)

"""``mlbert convert``: checkpoints of other programs to our form and back. Every tensor's fate is printed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mlbert.models.weights.checkpoint_state import Report

app = typer.Typer(
    help="Checkpoints of other programs to our form and back.", add_completion=False, rich_markup_mode=None
)

Folder = Annotated[Path, typer.Argument(help="Folder that is read.")]
File = Annotated[Path, typer.Argument(help="File that is read.")]
Prefix = Annotated[Path, typer.Argument(help="The checkpoint's path, with or without .index.")]
NewFolder = Annotated[Path, typer.Argument(help="Folder that is made.")]
NewFile = Annotated[Path, typer.Argument(help="File that is made.")]
Config = Annotated[
    Path | None, typer.Option(help="The checkpoint's bert_config.json; without it the one beside the checkpoint.")
]


@app.command("tf1-to-torch")
def tf1_to_torch(source: Prefix, target: NewFolder, config: Config = None) -> None:
    """A TensorFlow 1 checkpoint (the benchmark's model.ckpt-28252) to bert_config.json and model.safetensors."""
    from mlbert.models.weights.convert import tf1_to_torch

    _print_report(tf1_to_torch(source, target, config), target)


@app.command("tf1-to-nvidia")
def tf1_to_nvidia(source: Prefix, target: NewFile, config: Config = None) -> None:
    """A TensorFlow 1 checkpoint to NVIDIA's .pt file, as their convert_tf_checkpoint.py does."""
    from mlbert.models.weights.convert import tf1_to_nvidia

    _print_report(tf1_to_nvidia(source, target, config), target)


@app.command("tf2-to-torch")
def tf2_to_torch(source: Prefix, target: NewFolder, config: Config = None) -> None:
    """An object-based TensorFlow 2 checkpoint to bert_config.json and model.safetensors."""
    from mlbert.models.weights.convert import tf2_to_torch

    _print_report(tf2_to_torch(source, target, config), target)


@app.command("nvidia-to-torch")
def nvidia_to_torch(source: File, target: NewFolder, config: Config = None) -> None:
    """NVIDIA's .pt file ({'model': state_dict}, weights only) to bert_config.json and model.safetensors."""
    from mlbert.models.weights.convert import nvidia_to_torch

    _print_report(nvidia_to_torch(source, target, config), target)


@app.command("torch-to-nvidia")
def torch_to_nvidia(source: Folder, target: NewFile) -> None:
    """A run's weights/ folder (bert_config.json, model.safetensors) to NVIDIA's .pt file."""
    from mlbert.models.weights.convert import torch_to_nvidia

    _print_report(torch_to_nvidia(source, target), target)


@app.command("composer-to-torch")
@app.command("mosaic-to-torch", hidden=True)
def composer_to_torch(source: File, target: NewFolder, config: Config = None) -> None:
    """A Composer checkpoint of a BERT or MosaicBERT to bert_config.json and model.safetensors; only tensors load."""
    from mlbert.models.weights.convert import composer_to_torch

    _print_report(composer_to_torch(source, target, config), target)


@app.command("torch-to-composer")
@app.command("torch-to-mosaic", hidden=True)
def torch_to_composer(source: Folder, target: NewFile) -> None:
    """A run's weights/ folder to the file that Composer's BERT or MosaicBERT starts from."""
    from mlbert.models.weights.convert import torch_to_composer

    _print_report(torch_to_composer(source, target), target)


@app.command("hf-to-torch")
def hf_to_torch(source: Folder, target: NewFolder) -> None:
    """A Hugging Face BERT folder (config.json, model.safetensors) to bert_config.json and model.safetensors."""
    from mlbert.models.weights.convert import huggingface_to_torch

    _print_report(huggingface_to_torch(source, target), target)


@app.command("torch-to-hf")
def torch_to_hf(source: Folder, target: NewFolder) -> None:
    """A run's weights/ folder (bert_config.json, model.safetensors) to a Hugging Face folder."""
    from mlbert.models.weights.convert import torch_to_huggingface

    _print_report(torch_to_huggingface(source, target), target)


def _print_report(report: Report, target: Path) -> None:
    for line in [*report.lines(), f"wrote {target}"]:
        typer.echo(line)

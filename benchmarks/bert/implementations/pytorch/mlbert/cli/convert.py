"""``mlbert convert``: convert checkpoints of other programs to and from our format.

Each command prints what happened to every tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlbert.host.console import waiting

app = typer.Typer(
    help="Convert checkpoints of other programs to and from our format.",
    add_completion=False,
    rich_markup_mode=None,
)

Folder = Annotated[Path, typer.Argument(help="Source folder.")]
File = Annotated[Path, typer.Argument(help="Source file.")]
Prefix = Annotated[Path, typer.Argument(help="Checkpoint path, with or without .index.")]
NewFolder = Annotated[Path, typer.Argument(help="New folder.")]
NewFile = Annotated[Path, typer.Argument(help="New file.")]
Config = Annotated[
    Path | None,
    typer.Option(help="The checkpoint's bert_config.json; default: the one next to it."),
]


@app.command("tf1-to-torch")
def tf1_to_torch(source: Prefix, target: NewFolder, config: Config = None) -> None:
    """Convert a TensorFlow 1 checkpoint (model.ckpt-28252) to bert_config.json and
    model.safetensors.

    \b
    Examples:
      mlbert convert tf1-to-torch tf1_ckpt/model.ckpt-28252 checkpoint
    """
    _convert("tf1_to_torch", source, target, config)


@app.command("tf1-to-nvidia")
def tf1_to_nvidia(source: Prefix, target: NewFile, config: Config = None) -> None:
    """Convert a TensorFlow 1 checkpoint to NVIDIA's .pt file,
    as their convert_tf_checkpoint.py does.

    \b
    Examples:
      mlbert convert tf1-to-nvidia tf1_ckpt/model.ckpt-28252 model.pt
    """
    _convert("tf1_to_nvidia", source, target, config)


@app.command("tf2-to-torch")
def tf2_to_torch(source: Prefix, target: NewFolder, config: Config = None) -> None:
    """Convert an object-based TensorFlow 2 checkpoint to bert_config.json and model.safetensors.

    \b
    Examples:
      mlbert convert tf2-to-torch tf2/bert_model.ckpt checkpoint
    """
    _convert("tf2_to_torch", source, target, config)


@app.command("nvidia-to-torch")
def nvidia_to_torch(source: File, target: NewFolder, config: Config = None) -> None:
    """Convert NVIDIA's .pt file ({'model': state_dict}, weights only) to bert_config.json and
    model.safetensors.

    \b
    Examples:
      mlbert convert nvidia-to-torch model.ckpt-28252.pt checkpoint
    """
    _convert("nvidia_to_torch", source, target, config)


@app.command("torch-to-nvidia")
def torch_to_nvidia(source: Folder, target: NewFile) -> None:
    """Convert a run's weights/ folder (bert_config.json, model.safetensors) to NVIDIA's .pt
    file.

    \b
    Examples:
      mlbert convert torch-to-nvidia runs/mine/run_0/weights model.pt
    """
    _convert("torch_to_nvidia", source, target)


@app.command("composer-to-torch")
@app.command("mosaic-to-torch", hidden=True)
def composer_to_torch(source: File, target: NewFolder, config: Config = None) -> None:
    """Convert a Composer checkpoint (BERT, MosaicBERT, ModernBERT) to bert_config.json
    and model.safetensors (tensors only).

    \b
    Examples:
      mlbert convert composer-to-torch ep0-ba70000-rank0.pt model
    """
    _convert("composer_to_torch", source, target, config)


@app.command("torch-to-composer")
@app.command("torch-to-mosaic", hidden=True)
def torch_to_composer(source: Folder, target: NewFile) -> None:
    """Convert a run's weights/ folder to a file that Composer's BERT,
    MosaicBERT or ModernBERT can start from.

    \b
    Examples:
      mlbert convert torch-to-composer runs/mine/run_0/weights model.pt
    """
    _convert("torch_to_composer", source, target)


@app.command("hf-to-torch")
def hf_to_torch(source: Folder, target: NewFolder) -> None:
    """Convert a Hugging Face folder (BERT, ModernBERT) to bert_config.json and
    model.safetensors.

    \b
    Examples:
      mlbert convert hf-to-torch bert-base-uncased/ model
    """
    _convert("huggingface_to_torch", source, target)


@app.command("torch-to-hf")
def torch_to_hf(source: Folder, target: NewFolder) -> None:
    """Convert a run's weights/ folder (bert_config.json, model.safetensors) to a Hugging Face
    folder.

    \b
    Examples:
      mlbert convert torch-to-hf runs/mine/run_0/weights my-bert
    """
    _convert("torch_to_huggingface", source, target)


@app.command("grow")
def grow(
    source: Annotated[Path, typer.Argument(help="Smaller model: a folder or file.")],
    target: NewFolder,
    config: Annotated[
        Path, typer.Option(help="The larger model's bert_config.json or config.json.")
    ],
) -> None:
    """Start a larger model from a smaller one: tile each matrix from its middle, and spread the
    layers.

    \b
    Examples:
      mlbert convert grow small/ large/ --config large.json
    """
    _convert("grow_model", source, target, config)


@app.command("add-words")
def add_words(
    source: Annotated[Path, typer.Argument(help="Model with its tokenizer: a folder.")],
    target: NewFolder,
    words: Annotated[Path, typer.Option("--words", help="File with one word per line.")],
) -> None:
    """Add words to a model and its tokenizer: each starts as the mean of its pieces. Writes a
    Hugging Face folder.

    \b
    Examples:
      mlbert convert add-words modernbert/ my-start/ --words words.txt
    """
    _convert("add_words_to_model", source, target, words)


def _convert(function: str, source: Path, target: Path, *config: Path | None) -> None:
    """Run a function of `mlbert.models.weights.convert` and print its report."""
    from mlbert.models.weights import convert, weight_files  # torch takes a second

    weight_files.check_target(target)
    with waiting(f"converting {source}"):
        report = getattr(convert, function)(source, target, *config)
    for line in [*report.lines(), f"wrote {target}"]:
        typer.echo(line)

"""``mlbert export``: export a run or one of its checkpoints to another program's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mlbert.host.errors import UserError

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CHECKPOINT",
            help="LOGDIR, a run_<i>, its checkpoints/step_<n>, or weights.",
        ),
    ],
    to: Annotated[
        Literal["huggingface", "onnx", "sentence-transformers"],
        typer.Option(
            help="Output format: a folder of transformers, one with a model.onnx, "
            "or one for embeddings of texts."
        ),
    ] = "huggingface",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="New folder; default: <name>-<format> here."),
    ] = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="With --to onnx: also write a model in 8 bits.")
    ] = False,
) -> None:
    """Write weights as a folder that transformers loads with from_pretrained(DIR), as ONNX, or for
    sentence-transformers.

    For a run without weights/, export its newest checkpoint.
    For files of other programs, see mlbert convert.

    \b
    Examples:
      mlbert export runs/quickstart --out my-bert
      mlbert export runs/quickstart --to onnx --out my-onnx
    """
    if int8 and to != "onnx":
        raise UserError("config.conflict", "--int8", f"needs ONNX, not {to}", "Add --to onnx")
    target = out or Path(f"{source.resolve().name}-{to}")
    if to == "onnx":
        _export_onnx(source, target, int8)
    elif to == "sentence-transformers":
        from mlbert.models.weights.embedding_folder import export_embeddings

        warnings = export_embeddings(source, target)
        typer.echo(f"wrote {target}")
        for warning in warnings:
            typer.echo(f"warning: {warning}")
    else:
        from mlbert.models.weights.load import export_to_huggingface  # torch takes a second

        missing = sorted(export_to_huggingface(source, target))
        typer.echo(f"wrote {target}")
        if missing:
            typer.echo(
                f"warning: {source} lacks {missing[0]}{' and others' if len(missing) > 1 else ''}: "
                "these have random values now. Fine-tune before you use what they compute"
            )
    if not any((target / name).is_file() for name in ("vocab.txt", "tokenizer.json")):
        typer.echo(
            "no vocabulary found: copy the vocab.txt "
            "that the data was prepared with into this folder"
        )


def _export_onnx(source: Path, target: Path, int8: bool) -> None:
    from mlbert.programs.onnx_export import export_onnx  # torch takes a second

    found = export_onnx(source, target, int8)
    typer.echo(f"wrote {target}; each file against PyTorch on this machine:")
    torch_seconds = found[0].seconds
    for side in found:
        parts = [f"{side.num_bytes / 1e6:.1f} MB"]
        if side is not found[0]:
            parts.append(f"{torch_seconds / side.seconds:.2f} times as fast")
            parts.append(f"outputs differ by at most {side.difference:.1g}")
            if side.agreement is not None:
                parts.append(side.agreement)
        typer.echo(f"  {side.name}: {', '.join(parts)}")

"""``mlbert report``: what finished runs reached, beside what no model could miss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from mlbert.cli.output import wide_console
from mlbert.core.errors import UserError
from mlbert.core.rules import UNVERIFIED, olympic_mean

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="LOGDIR of one or more runs.")],
    data: Annotated[Path | None, typer.Option(help="Prepared data; default FOLDER/data.")] = None,
) -> int:
    """Print the results of the runs in FOLDER and the baselines of their data."""
    summaries = read_summaries(folder)
    console = wide_console()
    table = Table(title=f"Runs in {folder}")
    counts = ("samples", "samples/s", "model GFLOP/s", "of GEMM peak")
    for column in ("run", "status", "time to train, s", "accuracy", "target", *counts):
        table.add_column(column, justify="right")
    for index, s in summaries.items():
        table.add_row(
            str(index),
            s["status"],
            f"{s['seconds_to_train']:.1f}",
            f"{s['accuracy']:.4f}",
            "-" if s["target_accuracy"] is None else f"{s['target_accuracy']:.4f}",
            str(s["samples"]),
            f"{s['samples_per_second']:.0f}",
            f"{s['model_flops_per_second_per_rank'] * s['ranks'] / 1e9:.1f}" if "share_of_gemm_peak" in s else "-",
            f"{100 * s['share_of_gemm_peak']:.0f} %" if "share_of_gemm_peak" in s else "-",
        )
    console.print(table)
    baselines = (data or folder / "data") / "baselines.json"
    if baselines.exists():
        for name, accuracy in json.loads(baselines.read_text(encoding="utf-8")).items():
            if name.endswith("_accuracy"):
                console.print(f"baseline {name.removesuffix('_accuracy')}: accuracy {accuracy:.4f}")
    seconds = [s["seconds_to_train"] for s in summaries.values() if s["status"] == "success"]
    if len(seconds) >= 3:
        console.print(f"olympic mean of {len(seconds)} successful runs: {olympic_mean(seconds):.1f} s")
    console.print(UNVERIFIED)
    return 0 if all(s["status"] == "success" for s in summaries.values()) else 1


def read_summaries(folder: Path) -> dict[int, dict]:
    """``run_<i>/summary.json`` of every finished run, by index. UserError when there is none or one is damaged."""
    found: dict[int, dict] = {}
    for path in sorted(folder.glob("run_*/summary.json")):
        index = path.parent.name.removeprefix("run_")
        try:
            found[int(index)] = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise UserError(path, f"is not a run's summary ({error})", "Remove it and train again") from None
    if not found:
        raise UserError(folder, "holds no finished run (run_<i>/summary.json)", "Train first: mlbert train --help")
    return dict(sorted(found.items()))

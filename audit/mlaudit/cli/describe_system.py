"""``mlaudit describe-system``: write the description of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mlbert.host.console import new_table, safe, standard_output
from mlbert.host.system_description import describe_system as facts_of_system
from mlbert.host.system_description import write_description

app = typer.Typer(add_completion=False, rich_markup_mode=None)

Division = Literal["open", "closed"]
Framework = Literal["PyTorch", "TensorFlow"]


@app.command()
def describe_system(
    out: Annotated[Path, typer.Option(help="File to write, systems/<system>.json.")],
    submitter: Annotated[str, typer.Option(help="Organization, as in the logs.")] = "mlbert",
    division: Annotated[Division, typer.Option(help="Division of the results.")] = "open",
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes like this one.")] = 1,
    framework: Annotated[Framework, typer.Option(help="Training framework.")] = "PyTorch",
) -> None:
    """Write the description of this machine with the 33 fields
    that the official checker requires.

    \b
    Examples:
      mlbert submission describe-system --out systems/acme_x1_n2.json --nodes 2
    """
    facts = facts_of_system(submitter, division, nodes, framework=framework)
    write_description(out, facts)
    console = standard_output()
    table = new_table(safe(out), ("field", "value"))
    for name, value in facts.items():
        table.add_row(name, safe(value))
    console.print(table)
    unknown = [name for name, value in facts.items() if value == "unknown"]
    if unknown:
        console.print(f"Could not be detected, fill in by hand: {', '.join(unknown)}")

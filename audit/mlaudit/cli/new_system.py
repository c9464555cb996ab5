"""``mlaudit new-system``: create a folder for another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlaudit.cli.repository_root import repository_root
from mlaudit.new_system import new_system as make_system

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_NEXT_STEPS = """
Next (details in docs/add_a_system.md):
1. {folder}/env.sh: your site's image, data and LOGDIR, and the submitter.
2. {folder}/{config}: your numbers. Its name states nodes x ranks x batch x accumulation;
   rename it when they change.
3. cd {folder} && source {config} && mlbert train --print-config
4. {folder}/README.md: the machine, and the source of each number.
5. benchmarks/bert/implementations/README.md: add this line to the table:
   {row}
6. On the machine: mlbert submission describe-system --out systems/{name}.json, fill in what it
   could not detect, and remove {template}. To pass as a submission, the repository also needs
   the ten logs of results/{name}/bert."""


@app.command()
def new_system(
    name: Annotated[
        str, typer.Argument(help="Letters, digits and underscores, such as acme_x1_h100_n1.")
    ],
    other: Annotated[str, typer.Option("--from", help="System to copy from.", metavar="OTHER")],
    config: Annotated[
        str | None, typer.Option(help="Which of its configs, if it has several.")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, help="GPUs per node; batch and hyperparameters stay the same."
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, max=65536, help="Nodes; the batch stays the same.")
    ] = None,
    tree: Annotated[
        Path | None, typer.Option(help="Repository to extend; default: this one.")
    ] = None,
) -> None:
    """Create a folder for another machine and a template of its description.

    \b
    Examples:
      mlbert submission new-system acme_x1_n4 --from dgxa100_n1 --nodes 4
    """
    root = repository_root(tree)
    made = make_system(name, other, root, config, nodes, gpus)
    for path in (*sorted(made.folder.iterdir()), made.template):
        typer.echo(f"created {path.relative_to(root)}")
    for line in made.changes:
        typer.echo(line)
    folder = made.folder.relative_to(root)
    template = made.template.relative_to(root)
    typer.echo(
        _NEXT_STEPS.format(
            folder=folder, config=made.config, template=template, name=name, row=made.row
        )
    )

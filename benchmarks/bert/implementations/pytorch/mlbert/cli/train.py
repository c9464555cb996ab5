"""``mlbert train``: one experiment. Every setting of the table is a flag; a flag wins over the exports of a config."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mlbert import recipes
from mlbert.core.config import CommandLine, Resolved, check_exports, environment, peek, resolve, split_arguments
from mlbert.core.errors import UserError
from mlbert.core.rules import eval_interval, reference_point
from mlbert.core.settings import train_settings
from mlbert.dist.world import World
from mlbert.train.experiment import global_batch_size, run_experiment


def app(args: list[str], **_: object) -> int:
    """Runs the command; the words are read by `mlbert.core.config.split_arguments`, the help is Typer's."""
    if any(word in ("--help", "-h") for word in args):
        _help(args=["--help"], prog_name="mlbert train", standalone_mode=False)
        return 0
    print_config = "--print-config" in args
    line = split_arguments([word for word in args if word != "--print-config"])
    resolved = resolve_run(line)
    world = World.identify(environment())
    console = Console(quiet=world.rank != 0)
    _print_config(console, resolved)
    if print_config:
        batch = global_batch_size(resolved.config, world)
        point = reference_point(batch)
        expected = f"{point.mean_samples:.0f}" if point else "no"
        console.print(
            f"global_batch_size {batch}; closed division: evaluation every {eval_interval(batch)} samples, "
            f"{expected} samples expected by the reference convergence points",
            soft_wrap=True,
        )
        return 0
    return _train(resolved, world, console)


def _train(resolved: Resolved, world: World, console: Console) -> int:
    outcome = run_experiment(resolved, recipes.load(resolved.config.recipe).build, world, console)
    state = outcome.state
    console.print(
        f"{outcome.status}: {outcome.reason}; accuracy {state.accuracy:.4f} after {state.samples} samples, "
        f"{outcome.seconds:.1f} s",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return 0 if outcome.status == "success" else 1


def resolve_run(line: CommandLine) -> Resolved:
    """Resolves in two steps: first the recipe's name, then everything on top of that recipe's defaults."""
    name = peek("recipe", None, line.flags, line.yaml_files, line.overrides)
    if name is None:
        raise UserError("RECIPE", "is not set", "Source a config_<system>.sh first, or pass --recipe packed_lamb")
    config_file = environment().get("CONFIG_FILE")
    if config_file:
        check_exports(Path(config_file))
    return resolve(recipes.load(name).DEFAULTS, None, line.flags, line.yaml_files, line.overrides)


def _print_config(console: Console, resolved: Resolved) -> None:
    lines = [f"{env}={value}  ({name}, {origin})" for name, value, env, origin in resolved.as_table()]
    for line in ["configuration:", *lines, *(f"warning: {warning}" for warning in resolved.warnings)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _described() -> Callable[..., None]:
    """A function whose parameters are the rows of the settings table: what the help is made of."""

    def train(**_: object) -> None:
        """Train once. Settings: recipe defaults, then --config YAML files, then the exports of a config_<system>.sh,
        then flags and key=value words; a later one wins."""

    keyword = inspect.Parameter.KEYWORD_ONLY
    options: list[tuple[str, object, object]] = [
        ("config", list[Path] | None, typer.Option("--config", help="YAML file; extends: names a parent.")),
        ("print_config", bool, typer.Option("--print-config", help="Show the resolved configuration and stop.")),
    ]
    for name, row in train_settings().items():
        unit = f" [{row.unit}]" if row.unit else ""
        text = f"{row.meaning}{unit} ({row.type_name}; export {row.env})"
        options.append((name, str | None, typer.Option(row.flag, help=text, metavar="VALUE", show_default=False)))
    parameters = [
        inspect.Parameter(name, keyword, default=False if kind is bool else None, annotation=Annotated[kind, option])
        for name, kind, option in options
    ]
    train.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    train.__annotations__ = {p.name: p.annotation for p in parameters}
    return train


_help = typer.Typer(add_completion=False, rich_markup_mode=None)
_help.command()(_described())


def main() -> None:
    """Entry of a system folder's ``run_pretraining.py``: ``mlbert train`` with the script's arguments."""
    import sys

    from mlbert.cli.main import main as run

    run(["train", *sys.argv[1:]])

"""``mlbert train``: one experiment. Every setting of the table is a flag; a flag wins over the exports of a config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from mlbert import recipes
from mlbert.cli.checks import check_run
from mlbert.core.config import CommandLine, Resolved, check_exports, environment, peek, resolve, split_arguments
from mlbert.core.errors import UserError
from mlbert.core.plan import make_plan, planned_world_size
from mlbert.core.setting import Setting
from mlbert.core.setting_words import REQUIRED, default_words, missing
from mlbert.core.settings import train_settings
from mlbert.dist.lifecycle import exit_status
from mlbert.dist.world import World
from mlbert.train.evaluate_only import BENCHMARK_INITIAL_ACCURACY, evaluate_only
from mlbert.train.experiment import run_experiment

EVALUATE_ONLY_HELP = (
    "Print the masked-LM accuracy of INIT_CHECKPOINT on EVALDIR and stop: no training set, no MLPerf log. The "
    f"benchmark's checkpoint on the benchmark's evaluation samples must read {BENCHMARK_INITIAL_ACCURACY}."
)


class _Train(TyperCommand):
    """Help and completion are Typer's; the words of a call are read by `mlbert.core.config.split_arguments`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keeps the words as they are."""
        if any(word in ctx.help_option_names for word in args):
            args = ["--help"]
        elif not ctx.resilient_parsing:
            ctx.args = list(args)
            return ctx.args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> int:
        """Runs the command; returns its exit status."""
        return _run(ctx.args)


def _run(args: Sequence[str]) -> int:
    words = list(args)
    speed = _take_speed(words)
    print_config = "--print-config" in words
    if speed is not None and not print_config:
        raise UserError("--samples-per-second", "is for the estimate of --print-config", "Give both, or neither")
    settings = [word for word in words if word not in ("--print-config", "--evaluate-only")]
    world = World.identify(environment())

    def resolve_settings() -> Resolved:
        resolved = resolve_run(split_arguments(settings))
        world.meeting.set_join_timeout(resolved.config.join_timeout)  # this first roll call waits as long, too
        return resolved

    resolved = world.meeting.agree("settings", resolve_settings)
    console = Console(quiet=world.rank != 0)
    _print_config(console, resolved)
    if print_config:
        # Outside a launcher the question is about the job that the sourced config describes.
        ranks = world.world_size if world.world_size > 1 else planned_world_size(environment()) or 1
        plan = make_plan(resolved.config, ranks, environment(), speed)
        _print_lines(console, ["plan:", *plan.lines, *(f"warning: {warning}" for warning in plan.warnings)])
        recipe = recipes.load(resolved.config.recipe)
        check_run(resolved.config, recipe, lambda text: _print_lines(console, [text]))
        return 0
    if "--evaluate-only" in words:
        evaluate_only(resolved.config, recipes.load(resolved.config.recipe), world, console)
        return 0
    return _train(resolved, world, console)


def run_resolved(resolved: Resolved, world: World, notes: Sequence[str] = ()) -> int:
    """Prints a configuration and notes about it, trains, and returns the exit status: for programs with YAML of their
    own."""
    world.meeting.set_join_timeout(resolved.config.join_timeout)
    console = Console(quiet=world.rank != 0)
    _print_config(console, resolved)
    _print_lines(console, list(notes))
    return _train(resolved, world, console)


def _train(resolved: Resolved, world: World, console: Console) -> int:
    outcome = run_experiment(resolved, recipes.load(resolved.config.recipe), world, console)
    state = outcome.state
    console.print(
        f"{outcome.status}: {outcome.reason}; accuracy {state.accuracy:.4f} after {state.samples} samples, "
        f"{outcome.seconds:.1f} s",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return exit_status(outcome.status, world.rank)


def resolve_run(line: CommandLine) -> Resolved:
    """Resolves in two steps: first the recipe's name, then everything on top of that recipe's defaults."""
    name = peek("recipe", None, line.flags, line.yaml_files, line.overrides)
    if name is None:
        raise missing(_absent(line), environment().get("CONFIG_FILE", ""))
    config_file = environment().get("CONFIG_FILE")
    if config_file:
        check_exports(Path(config_file))
    return resolve(recipes.load(name).DEFAULTS, None, line.flags, line.yaml_files, line.overrides)


def _absent(line: CommandLine) -> list[Setting]:
    """RECIPE, and what no recipe has a default for and nobody gives."""
    known = [recipes.load(name).DEFAULTS for name in recipes.names()]
    rows = [row for row in train_settings().values() if not row.optional and not any(row.name in one for one in known)]
    absent = [row for row in rows if not peek(row.name, None, line.flags, line.yaml_files, line.overrides)]
    return [train_settings()["recipe"], *absent]


def _print_config(console: Console, resolved: Resolved) -> None:
    lines = [f"{env}={value}  ({name}, {origin})" for name, value, env, origin in resolved.as_table()]
    _print_lines(console, ["configuration:", *lines, *(f"warning: {warning}" for warning in resolved.warnings)])


def _print_lines(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _take_speed(words: list[str]) -> float | None:
    """Takes ``--samples-per-second N`` out of the words."""
    name = "--samples-per-second"
    for index, word in enumerate(words):
        flag, has_value, value = word.partition("=")
        if flag.replace("_", "-") != name:
            continue
        del words[index]
        if not has_value:
            value = words.pop(index) if index < len(words) else ""
        try:
            speed = float(value)
        except ValueError:
            speed = 0.0
        if not 0 < speed < float("inf"):
            raise UserError(name, f"{value!r} is not a number above 0", "Give the speed that a run reported")
        return speed
    return None


def _described() -> Callable[..., None]:
    """A function whose parameters are the rows of the settings table: what the help is made of."""

    def train(**_: object) -> None:
        """Train once. Settings: recipe defaults, then --config YAML files, then the exports of a config_<system>.sh,
        then flags and key=value words; a later one wins."""

    keyword = inspect.Parameter.KEYWORD_ONLY
    options: list[tuple[str, object, object]] = [
        ("config", list[Path] | None, typer.Option("--config", help="YAML file; extends: names a parent.")),
        ("evaluate_only", bool, typer.Option("--evaluate-only", help=EVALUATE_ONLY_HELP)),
        (
            "print_config",
            bool,
            typer.Option("--print-config", help="Show settings and plan, check data, weights and folders, and stop."),
        ),
        (
            "samples_per_second",
            str | None,
            typer.Option("--samples-per-second", help="Measured speed, for --print-config.", metavar="VALUE"),
        ),
    ]
    defaults = {name: recipes.load(name).DEFAULTS for name in recipes.names()}
    for name, row in train_settings().items():
        unit = f" [{row.unit}]" if row.unit else ""
        default = default_words(row, defaults)
        told = default if default.startswith(REQUIRED) else f"default: {default}"
        text = f"{row.meaning}{unit} ({row.type_name}; export {row.env}; {told})"
        options.append((name, str | None, typer.Option(row.flag, help=text, metavar="VALUE", show_default=False)))
    parameters = [
        inspect.Parameter(name, keyword, default=False if kind is bool else None, annotation=Annotated[kind, option])
        for name, kind, option in options
    ]
    train.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    train.__annotations__ = {p.name: p.annotation for p in parameters}
    return train


app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.command("train", cls=_Train, options_metavar="[OPTIONS] [NAME=VALUE]...")(_described())


def main() -> None:
    """Entry of a system folder's ``run_pretraining.py``: ``mlbert train`` with the script's arguments."""
    import sys

    from mlbert.cli.main import main as run

    run(["train", *sys.argv[1:]])

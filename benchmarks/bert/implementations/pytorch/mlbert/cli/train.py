"""``mlbert train``: one experiment. Every setting of the table is a flag; a flag wins over the exports of a config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from mlbert.config.resolution import CommandLine, Resolved, peek, resolve, split_arguments
from mlbert.config.sections import settings_by_key
from mlbert.config.sources import check_exports
from mlbert.config.words import REQUIRED, default_words, missing
from mlbert.data.loading.config import DataConfig
from mlbert.distributed.config import DistributedConfig
from mlbert.distributed.lifecycle import exit_status
from mlbert.distributed.place import Place
from mlbert.host.environment import environment
from mlbert.host.errors import UserError
from mlbert.mlperf.config import SubmissionConfig
from mlbert.mlperf.rules import INITIAL_MLM_ACCURACY
from mlbert.models.config import ModelConfig
from mlbert.optim.config import ScheduleConfig
from mlbert.recipes.registry import RECIPES, find
from mlbert.report.run_plan import make_plan, planned_world_size
from mlbert.training.config import EvaluationConfig, RunConfig

if TYPE_CHECKING:
    from mlbert.distributed.world import World

EVALUATE_ONLY_HELP = (
    "Print the masked-LM accuracy of INIT_CHECKPOINT on EVALDIR and stop: no training set, no MLPerf log. The "
    f"benchmark's checkpoint on the benchmark's evaluation samples must read {INITIAL_MLM_ACCURACY}."
)


class _Train(TyperCommand):
    """Help and completion are Typer's; the words of a call are read by `mlbert.config.resolution.split_arguments`."""

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
        raise UserError(
            "config.conflict", "--samples-per-second", "is for the estimate of --print-config", "Give both, or neither"
        )
    line = [word for word in words if word not in ("--print-config", "--evaluate-only")]
    place = Place.identify(environment())
    if print_config and place.world_size == 1:
        return _print_plan(resolve_run(split_arguments(line)), place, speed)
    from mlbert.distributed.world import World
    from mlbert.training.evaluate_only import evaluate_only

    world = World.identify(environment())

    def resolve_settings() -> Resolved:
        resolved = resolve_run(split_arguments(line))
        # This first roll call waits as long, too.
        world.meeting.set_join_timeout(resolved.config[DistributedConfig].join_timeout)
        return resolved

    resolved = world.meeting.agree("settings", resolve_settings)
    console = Console(quiet=world.rank != 0)
    if print_config:
        return _print_plan(resolved, world, speed)
    _print_config(console, resolved)
    if "--evaluate-only" in words:
        evaluate_only(resolved.config, resolved.recipe, world, console)
        return 0
    return _train(resolved, world, console)


def _print_plan(resolved: Resolved, place: Place, speed: float | None) -> int:
    """Print settings, plan and checks, and return the exit status."""
    from mlbert.cli.checks import check_run

    console = Console(quiet=place.rank != 0)
    _print_config(console, resolved)
    # Outside a launcher the question is about the job that the sourced config describes.
    ranks = place.world_size if place.world_size > 1 else planned_world_size(environment()) or 1
    config = resolved.config
    plan = make_plan(
        config[DataConfig],
        config[ModelConfig],
        config[ScheduleConfig],
        config[DistributedConfig],
        config[EvaluationConfig],
        config[RunConfig],
        config[SubmissionConfig],
        ranks,
        environment(),
        speed,
    )
    _print_lines(console, ["plan:", *plan.lines, *(f"warning: {warning}" for warning in plan.warnings)])
    check_run(config, resolved.recipe, place.local_world_size, lambda text: _print_lines(console, [text]))
    return 0


def run_resolved(resolved: Resolved, world: World, notes: Sequence[str] = ()) -> int:
    """Print a configuration and notes about it, train, and return the exit status: for programs with YAML of their
    own."""
    world.meeting.set_join_timeout(resolved.config[DistributedConfig].join_timeout)
    console = Console(quiet=world.rank != 0)
    _print_config(console, resolved)
    _print_lines(console, list(notes))
    return _train(resolved, world, console)


def _train(resolved: Resolved, world: World, console: Console) -> int:
    from mlbert.training.experiment import run_experiment

    outcome = run_experiment(resolved, world, console)
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
    """Resolve in two steps: first the recipe's name, then everything on top of that recipe's defaults."""

    def look(key: str) -> str | None:
        return peek(key, None, line.flags, line.yaml_files, line.overrides)

    name = look("recipe")
    if name is None:
        needed = [one for one in settings_by_key().values() if all(recipe.requires(one) for recipe in RECIPES.values())]
        absent = [one for one in needed if not look(one.key)]
        raise missing([settings_by_key()["recipe"], *absent], environment().get("CONFIG_FILE", ""))
    config_file = environment().get("CONFIG_FILE")
    if config_file:
        check_exports(Path(config_file))
    readers = list(RECIPES.values())
    return resolve(find(name, look), None, line.flags, line.yaml_files, line.overrides, readers=readers)


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
            raise UserError(
                "config.value", name, f"{value!r} is not a number above 0", "Give the speed that a run reported"
            )
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
    for name, row in settings_by_key().items():
        if not any(recipe.reads(row) for recipe in RECIPES.values()):
            continue  # TensorFlow's
        unit = f" [{row.unit}]" if row.unit else ""
        default = default_words(row, RECIPES.values())
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

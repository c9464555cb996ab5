"""``mlbert train``: run one experiment.

Every setting is a flag; a flag overrides the exports of a config.

``mlbert train --print-config`` also checks for what could end the run before its first step.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from mlbert.cli import main as command_line
from mlbert.config.arguments import CommandLine
from mlbert.config.configuration import Configuration
from mlbert.config.recipe import Recipe
from mlbert.config.resolution import Resolved
from mlbert.config.shell import planned_world_size
from mlbert.config.words import REQUIRED, default_words, missing
from mlbert.data.loading.config import DataConfig
from mlbert.distributed.config import DistributedConfig
from mlbert.distributed.place import RankPlace
from mlbert.host.environment import environment
from mlbert.host.errors import UserError
from mlbert.host.exit_statuses import Terminated, exit_status
from mlbert.host.machine import threads_per_rank
from mlbert.host.texts import parse_number
from mlbert.mlperf.rules import INITIAL_MLM_ACCURACY
from mlbert.models.config import ModelConfig
from mlbert.ops.config import ComputeConfig
from mlbert.programs.run_plan import make_plan
from mlbert.recipes.registry import RECIPES, find
from mlbert.recipes.sections import check_exports, peek, resolve, settings_by_key, split_arguments
from mlbert.runs.config import RunConfig
from mlbert.runs.run_folder import RunFolder
from mlbert.runs.starting_weights import weights_file

if TYPE_CHECKING:
    from mlbert.distributed.world import World
    from mlbert.training.protocols import Inputs
    from mlbert.training.run_options import RunOptions

# Options that print or evaluate in place of training.
_MODES = ("--print-config", "--print-settings", "--evaluate-only")
EVALUATE_ONLY_HELP = (
    "Print the masked-LM accuracy of INIT_CHECKPOINT on EVALDIR and stop: "
    "no training, no MLPerf log. The "
    "benchmark's checkpoint on the benchmark's evaluation samples must give "
    f"{INITIAL_MLM_ACCURACY}."
)


def check_run(
    config: Configuration, recipe: Recipe, local_world_size: int, say: Callable[[str], None]
) -> None:
    """Open the data, read the model shape and starting weights,
    and check folders and threads; ``say`` each result.

    Nothing is written. Facts that only the training machine knows (its GPUs, its memory) are not
    checked.

    Raises:
        UserError: the first problem, after all have been reported.
    """
    problems: list[UserError] = []

    def check(name: str, look: Callable[[], str]) -> None:
        try:
            say(f"{name}: {look()}")
        except UserError as error:
            problems.append(error)
            say(f"{name}: PROBLEM {error}")

    inspect = functools.cache(lambda: recipe.inspect(config))
    say("checks:")
    check("data and model shape", lambda: _data(config[DataConfig], inspect()))
    if (start := config[ModelConfig].init_checkpoint) is not None:
        check("starting weights", lambda: _weights(start, inspect))
    check("run folder", lambda: _folder(config[RunConfig]))
    check(
        "threads",
        lambda: str(threads_per_rank(config[ComputeConfig].cpu_threads, local_world_size)),
    )
    if problems:
        raise problems[0]


def _data(config: DataConfig, inputs: Inputs) -> str:
    if inputs.train_data == inputs.eval_data and not config.synthetic_data:
        return f"{inputs.train_data}; warning: EVALDIR is the training set"
    return f"{inputs.train_data}, evaluation {inputs.eval_data}"


def _weights(start: str, inspect: Callable[[], Inputs]) -> str:
    from mlbert.models.weights.load import read_file
    from mlbert.models.weights.weight_files import own_state, parameters_in

    file = weights_file(start)
    weights = read_file(file)
    shape = inspect().shape
    report = own_state(weights.tensors, shape, str(file), parameters_in(weights.tensors, shape))[1]
    return " ".join([str(file), *report.warnings(file)])


def _folder(config: RunConfig) -> str:
    paths = RunFolder.of(config)
    paths.refuse_finished()
    there = next(
        path
        for path in (paths.folder.absolute(), *paths.folder.absolute().parents)
        if path.exists()
    )
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UserError(
            "file.unwritable", there, "cannot be written", "Set LOGDIR to a writable folder"
        )
    return (
        f"{paths.folder}, not created yet"
        if there != paths.folder.absolute()
        else str(paths.folder)
    )


class _Train(TyperCommand):
    """Typer provides help and completion; `mlbert.config.arguments.split_arguments` reads the
    arguments.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the arguments unparsed."""
        if any(word in ctx.help_option_names for word in args):
            args = ["--help"]
        elif not ctx.resilient_parsing:
            ctx.args = list(args)
            return ctx.args
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options in the groups of the settings page."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (row := parameter.get_help_record(ctx)) is not None:
                group = getattr(parameter, "rich_help_panel", None) or "Options"
                groups.setdefault(group, []).append(row)
        for group, rows in groups.items():
            with formatter.section(group):
                formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> int:
        """Run the command and return its exit status."""
        return _run(ctx.args)


def _run(args: Sequence[str]) -> int:
    words = list(args)
    speed = _take_speed(words)
    print_config = "--print-config" in words
    if speed is not None and not print_config:
        remedy = "Give both, or neither"
        raise UserError(
            "config.conflict",
            "--samples-per-second",
            "is only for the estimate of --print-config",
            remedy,
        )
    line = [word for word in words if word not in _MODES]
    place = RankPlace.identify(environment())
    place.warn_once()
    # Before torch is imported, which takes seconds: most mistakes show here.
    alone = resolve_run(split_arguments(line)) if place.world_size == 1 else None
    if "--print-settings" in words:
        resolved = alone or resolve_run(split_arguments(line))
        if place.rank == 0:
            typer.echo(json.dumps(resolved.as_configuration(), indent=2))
        return 0
    if print_config and alone is not None:
        return _print_plan(alone, place, speed)
    from mlbert.distributed.world import World
    from mlbert.host.console import console_progress
    from mlbert.training.experiment import evaluate_only

    world = World.identify(environment())

    def resolve_settings() -> Resolved:
        resolved = resolve_run(split_arguments(line))
        # The ranks that join this first rendezvous may take that long, too.
        world.rendezvous.set_join_timeout(resolved.config[DistributedConfig].join_timeout)
        return resolved

    resolved = alone or world.rendezvous.run_all("settings", resolve_settings)
    console = Console(quiet=world.rank != 0)
    if print_config:
        return _print_plan(resolved, world, speed)
    if "--evaluate-only" in words:
        _print_config(console, resolved)
        task = functools.partial(console_progress(console).task, "evaluating", unit="samples")
        evaluate_only(resolved.config, resolved.recipe, world, console, task)
        return 0
    settings = resolved.config[RunConfig]
    if world.world_size > 1 or settings.save_checkpoint_steps == 0:
        return _train(resolved, world, console)
    return _train_until_interrupted(resolved, world, console)


def _train_until_interrupted(resolved: Resolved, world: World, console: Console) -> int:
    """Train in one process. Ctrl-C saves a checkpoint and ends the run."""
    from mlbert.programs.save_on_signal import has_caught, interrupted_status, signals_save

    try:
        with signals_save([signal.SIGINT]):
            return _train(resolved, world, console)
    except Terminated as end:
        if not has_caught():
            raise
        settings = resolved.config[RunConfig]
        steps = RunFolder.of(settings).checkpoint_steps
        words = "nothing was trained yet"
        if steps:
            how = "the same command" if settings.resume else "RESUME=1"
            words = f"step {steps[-1]:,} is saved, and {how} continues from it"
        _print_lines(console, [f"interrupted: {words}"])
        return interrupted_status(end)


def _print_plan(resolved: Resolved, place: RankPlace, speed: float | None) -> int:
    """Print settings, plan and checks, and return the exit status."""
    console = Console(quiet=place.rank != 0)
    _print_config(console, resolved)
    # Outside a launcher, plan the job that the sourced config describes.
    ranks = place.world_size if place.world_size > 1 else planned_world_size(environment()) or 1
    config = resolved.config
    plan = make_plan(config, ranks, environment(), speed)
    _print_lines(
        console, ["plan:", *plan.lines, *(f"warning: {warning}" for warning in plan.warnings)]
    )
    check_run(
        config, resolved.recipe, place.local_world_size, lambda text: _print_lines(console, [text])
    )
    return 0


def run_resolved(
    resolved: Resolved, world: World, notes: Sequence[str], options: RunOptions
) -> int:
    """Print a summary of the settings and notes, train, and return the exit status;
    for programs with their own YAML.

    Args:
        resolved: the run's configuration.
        world: not started yet.
        notes: lines to print after the summary.
        options: its ``on_inspected`` is replaced.
    """
    world.rendezvous.set_join_timeout(resolved.config[DistributedConfig].join_timeout)
    return _train(resolved, world, Console(quiet=world.rank != 0), notes, options)


def _train(
    resolved: Resolved,
    world: World,
    console: Console,
    notes: Sequence[str] = (),
    options: RunOptions | None = None,
) -> int:
    from mlbert.training.experiment import run_experiment
    from mlbert.training.run_options import RunOptions

    lines = RunFolder.of(resolved.config[RunConfig]).settings_summary(resolved, notes)
    how = replace(options or RunOptions(), on_inspected=lambda: _print_lines(console, lines))
    outcome = run_experiment(resolved, world, console, how)
    state = outcome.state
    end = f"accuracy {state.accuracy:.4f} after {state.samples} samples, {outcome.seconds:.1f} s"
    _print_lines(console, [f"{outcome.ending}: {outcome.reason}; {end}"])
    return exit_status(outcome.status, world.rank)


def resolve_run(line: CommandLine) -> Resolved:
    """Resolve in two steps: first the recipe's name,
    then everything on top of that recipe's defaults.
    """

    def look(key: str) -> str | None:
        return peek(key, None, line)

    name = look("recipe")
    if name is None:
        needed = [
            setting
            for setting in settings_by_key().values()
            if all(recipe.requires(setting) for recipe in RECIPES.values())
        ]
        absent = [setting for setting in needed if not look(setting.key)]
        raise missing([settings_by_key()["recipe"], *absent], environment().get("CONFIG_FILE", ""))
    config_file = environment().get("CONFIG_FILE")
    if config_file:
        check_exports(Path(config_file))
    readers = list(RECIPES.values())
    return resolve(find(name, look), None, line, readers=readers)


def _print_config(console: Console, resolved: Resolved) -> None:
    warnings = (f"warning: {warning}" for warning in resolved.warnings)
    _print_lines(console, ["configuration:", *resolved.as_lines(), *warnings])


def _print_lines(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _take_speed(words: list[str]) -> float | None:
    """Remove ``--samples-per-second N`` from the words and return N."""
    name = "--samples-per-second"
    for index, word in enumerate(words):
        flag, has_value, value = word.partition("=")
        if flag.replace("_", "-") != name:
            continue
        del words[index]
        if not has_value:
            value = words.pop(index) if index < len(words) else ""
        try:
            speed = parse_number(value, float)
        except ValueError:
            speed = 0.0
        if speed <= 0:
            reason = f"{value!r} is not a number above 0"
            raise UserError("config.value", name, reason, "Give a speed reported by a run")
        return speed
    return None


def _described() -> Callable[..., None]:
    """Return a function with one parameter per setting, from which Typer builds the help."""

    def train(**_: object) -> None:
        """Train once.

        Settings come from recipe defaults, --config YAML files, the exports of a
        config_<system>.sh, and flags or key=value words; later ones win.

        \b
        Examples:
          mlbert train --config my-run.yaml --seed 1
          source config_X.sh && mlbert train --print-config
        """

    keyword = inspect.Parameter.KEYWORD_ONLY
    options: list[tuple[str, object, object]] = [
        (
            "config",
            list[Path] | None,
            typer.Option("--config", help="YAML file; extends: names its parent."),
        ),
        ("evaluate_only", bool, typer.Option("--evaluate-only", help=EVALUATE_ONLY_HELP)),
        (
            "print_config",
            bool,
            typer.Option(
                "--print-config",
                help="Print settings and plan, check data, weights and folders, and exit.",
            ),
        ),
        (
            "print_settings",
            bool,
            typer.Option(
                "--print-settings",
                help="Print each setting with its value and origin as JSON, and exit.",
            ),
        ),
        (
            "samples_per_second",
            str | None,
            typer.Option(
                "--samples-per-second", help="Measured speed, for --print-config.", metavar="VALUE"
            ),
        ),
    ]
    for name, row in settings_by_key().items():
        if not any(recipe.reads(row) for recipe in RECIPES.values()):
            continue  # TensorFlow's
        unit = f" [{row.unit}]" if row.unit else ""
        default = default_words(row, RECIPES.values())
        note = default if default.startswith(REQUIRED) else f"default: {default}"
        text = f"{row.meaning}{unit} ({row.type_name}; export {row.env}; {note})"
        options.append(
            (
                name,
                str | None,
                typer.Option(
                    row.flag,
                    help=text,
                    metavar="VALUE",
                    show_default=False,
                    rich_help_panel=row.group,
                ),
            )
        )
    parameters = [
        inspect.Parameter(
            name,
            keyword,
            default=False if kind is bool else None,
            annotation=Annotated[kind, option],
        )
        for name, kind, option in options
    ]
    train.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    train.__annotations__ = {p.name: p.annotation for p in parameters}
    return train


app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.command("train", cls=_Train, options_metavar="[OPTIONS] [NAME=VALUE]...")(_described())


def main() -> None:
    """Run ``mlbert train`` with this script's arguments;
    entry of a system folder's ``run_pretraining.py``.
    """
    command_line.main(["train", *sys.argv[1:]])

"""``main.py YAML [name=value ...]``: masked-LM pre-training on streamed text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from mlbert.cli.train import run_resolved
from mlbert.config.resolution import Resolved
from mlbert.data.loading.masked_text import count_sequences
from mlbert.distributed.world import World
from mlbert.host.environment import environment
from mlbert.host.errors import UserError, public_names
from mlbert.recipes.registry import RECIPES, find
from mlbert.recipes.sections import resolve
from mlbert.training.run_options import RunOptions
from mosaic_yaml import pretraining_yaml
from mosaic_yaml.common_yaml import PATIENCE, ignored_options, names_for_errors
from mosaic_yaml.nested_yaml import Layer, Leaves, read_nested
from mosaic_yaml.output_folder import find_output_folder

app = typer.Typer(add_completion=False, rich_markup_mode=None)

# For programs that read name=value words: unknown options become words,
# so that the program can report them.
WORDS = {"ignore_unknown_options": True}
YamlFile = Annotated[Path, typer.Argument(metavar="YAML", help="YAML file to start from.")]
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME=VALUE", help="Override values of the file.", show_default=False),
]


@app.command(context_settings=WORDS)
def pretrain(path: YamlFile, words: Words = None) -> int:
    """Pre-train a masked-LM model on streamed text, alone or under mlbert launch local,
    torchrun or srun.

    Start with a file from yamls/main. Some names:

    \b
    model.name=mosaic_bert     or hf_bert (Hugging Face's class, padded)
    data_local=DIR             local folder of the splits
    data_remote=ADDRESS        where to stream them from
    max_duration=70000ba       ba batches, sp sequences, ep passes over the
                               data, tok tokens
    device_train_microbatch_size=auto
                               split a rank's batch to fit its memory
    save_folder=DIR autoresume=true
                               save checkpoints; resume from the newest, with
                               any number of ranks
    load_path=WEIGHTS          a run folder, a Hugging Face folder, a Composer
                               or NVIDIA checkpoint

    \b
    Examples:
      mlbert mosaic yamls/test/main.yaml
      mlbert mosaic yamls/main/mosaic-bert-base-uncased.yaml data_local=my-c4
    """
    world = World.identify(environment())
    world.warn_once()

    def read() -> Leaves:
        check_yaml_file("main.py", path)
        return Leaves(path, read_nested(path, words or [], pretraining_yaml.KNOWN))

    def translate() -> tuple[Layer, Resolved]:
        layer = pretraining_yaml.to_settings(
            leaves, world.world_size, torch.cuda.is_available(), count_sequences
        )
        return layer, resolve_layer(path, layer)

    leaves = world.rendezvous.run_all("yaml", read)
    with public_names(names_for_errors(leaves, pretraining_yaml.NAMES)):
        layer, resolved = world.rendezvous.run_all("settings", translate)
        return run_yaml(leaves, layer, resolved, world)


def run_yaml(leaves: Leaves, layer: Layer, resolved: Resolved, world: World) -> int:
    """Train as a YAML says, and return the exit status."""
    step_tokens = int(str(layer["step_tokens"][0])) if "step_tokens" in layer else None
    output = find_output_folder(leaves, int(str(layer["max_steps"][0])), step_tokens)
    options = RunOptions(
        patience=_patience(leaves, world),
        extends=output.extends,
        replaces=output.replaces,
        saves_last_step=output.saves_last_step,
    )
    return run_resolved(resolved, world, notes(leaves), options)


def _patience(leaves: Leaves, world: World) -> int | None:
    """Return the patience of early stopping, if given. Raises UserError if it cannot be used."""
    if not leaves.is_given(PATIENCE):
        return None
    given = leaves.number(PATIENCE, None)
    if given.value < 1 or given.value != int(given.value):
        reason = f"{PATIENCE} {given.value:g} is not a number of evaluations"
        raise UserError("config.range", given.origin, reason, "Use 1 or more")
    if world.world_size > 1:
        reason = f"{PATIENCE} needs a run of one process"
        raise UserError("config.unsupported", given.origin, reason, "Remove it, or use one process")
    return int(given.value)


def check_yaml_file(program: str, path: Path) -> None:
    """Raise UserError if the first argument is a ``name=value`` word or an unknown option instead
    of a file.
    """
    word = str(path)
    if word.startswith("-"):
        raise UserError(
            "config.unknown-name", word, "is an unknown option", f"See {program} --help"
        )
    if "=" in word and path.suffix not in (".yaml", ".yml"):
        remedy = f"Write {program} yamls/... [name=value ...]"
        raise UserError("config.missing", program, f"got {word} instead of a YAML file", remedy)


def resolve_layer(path: Path, layer: Layer) -> Resolved:
    """Resolve and check a layer of settings; exports are ignored, as in the published programs."""
    recipe = find(str(layer["recipe"][0]), lambda key: str(layer[key][0]) if key in layer else None)
    return resolve(recipe, {}, given=layer, given_files=[path], readers=list(RECIPES.values()))


def notes(leaves: Leaves) -> list[str]:
    """Return a note on YAML names that were not read: they tune what is missing here,
    or always on.
    """
    names = leaves.unread()
    names += [f"model.model_config.{name}" for name in ignored_options(leaves)]
    return [f"not needed here, and not read: {', '.join(names)}"] if names else []

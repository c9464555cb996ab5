"""``main.py YAML [name=value ...]``: masked-LM pre-training on streamed text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from mlbert import recipes
from mlbert.cli.mosaic_bert import pretraining_yaml
from mlbert.cli.mosaic_bert.leaves import Layer, Leaves
from mlbert.cli.train import run_resolved
from mlbert.core.config import Resolved, environment, resolve
from mlbert.core.errors import UserError
from mlbert.core.nested_yaml import read_nested
from mlbert.dist.lifecycle import SUCCEEDED
from mlbert.dist.world import World
from mlbert.feed import text_run

HELP = """Usage: main.py YAML [name=value ...]      (or: mlbert pretrain YAML [name=value ...])

Masked-LM pre-training on streamed text, by itself or under mlbert launch local, torchrun or srun. Begin with a file of
yamls/main; a name=value word replaces a value of it. Some names:

model.name=mosaic_bert                 or hf_bert, Hugging Face's class, padded
data_local=DIR data_remote=ADDRESS     folder of the splits; where they are streamed from to it
max_duration=70000ba                   ba batches, sp sequences, ep passes over the data, tok tokens
device_train_microbatch_size=auto      parts of a rank's batch that fit its memory
save_folder=DIR autoresume=true        checkpoints, and going on with the newest, on other numbers of ranks too
load_path=WEIGHTS                      a run folder, a Hugging Face folder, a Composer or NVIDIA checkpoint
"""


def app(args: Sequence[str], **_: object) -> int:
    """Runs the program; returns its exit status."""
    if "--help" in args or "-h" in args:
        print(HELP)
        return SUCCEEDED
    path, words = split_words("main.py", args)
    world = World.identify(environment())
    leaves = Leaves(path, read_nested(path, words, pretraining_yaml.KNOWN))
    layer = pretraining_yaml.to_settings(leaves, world.world_size, torch.cuda.is_available(), text_run.count)
    return run_resolved(resolve_layer(path, layer), world, notes(leaves))


def split_words(program: str, args: Sequence[str]) -> tuple[Path, list[str]]:
    """The YAML file and the ``name=value`` words. Raises UserError: no file."""
    is_word = bool(args) and "=" in args[0] and not args[0].endswith((".yaml", ".yml"))
    if not args or is_word or args[0].startswith("-"):
        raise UserError(program, "is given no YAML file", f"Write {program} yamls/... [name=value ...]")
    return Path(args[0]), list(args[1:])


def resolve_layer(path: Path, layer: Layer) -> Resolved:
    """The checked configuration of a layer of settings; exports do not count, as in the published programs."""
    defaults = recipes.load(str(layer["recipe"][0])).DEFAULTS
    return resolve(defaults, {}, {}, [], [], layer, [path])


def notes(leaves: Leaves) -> list[str]:
    """What to tell of a YAML whose settings are made: names that tune what is not here, or is always on."""
    names = leaves.unread()
    return [f"not needed here, and not read: {', '.join(names)}"] if names else []


def main() -> None:
    """Entry of benchmarks/mosaic_bert/main.py."""
    from mlbert.cli.main import main as run

    run(["pretrain", *sys.argv[1:]])

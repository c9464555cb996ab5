"""``sequence_classification.py YAML [name=value ...]``: fine-tune on a task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from mlbert.config.resolution import Resolved
from mlbert.distributed.world import World
from mlbert.host.console import new_table
from mlbert.host.environment import environment
from mlbert.host.errors import public_names
from mlbert.host.exit_statuses import SUCCEEDED
from mlbert.models import task_model
from mlbert.programs.task_metrics import last_evaluation
from mlbert.runs.config import RunConfig
from mlbert.runs.run_folder import RunFolder
from mosaic_yaml import finetuning_yaml
from mosaic_yaml.commands.main_yaml import check_yaml_file, resolve_layer, run_yaml
from mosaic_yaml.common_yaml import names_for_errors
from mosaic_yaml.nested_yaml import Layer, Leaves, read_nested

PROGRAM = "sequence_classification.py"


def finetune(path: Path, words: Sequence[str]) -> int:
    """Fine-tune as a YAML and ``name=value`` words say; return the exit status.

    Raises:
        UserError: a value is missing or illegal.
    """
    world = World.identify(environment())
    world.warn_once()

    def read() -> Leaves:
        check_yaml_file(PROGRAM, path)
        return Leaves(path, read_nested(path, words, finetuning_yaml.KNOWN))

    def translate() -> tuple[Layer, Resolved]:
        layer = finetuning_yaml.to_settings(leaves, world.world_size, torch.cuda.is_available())
        return layer, resolve_layer(path, layer)

    leaves = world.rendezvous.run_all("yaml", read)
    with public_names(names_for_errors(leaves, finetuning_yaml.NAMES)):
        layer, resolved = world.rendezvous.run_all("settings", translate)
        status = run_yaml(leaves, layer, resolved, world)
    if status == SUCCEEDED and world.rank == 0:
        _report(RunFolder.of(resolved.config[RunConfig]).folder)
    return status


def _report(folder: Path) -> None:
    console = Console()
    table = new_table("evaluation", ["metric"], ["value"])
    for name, value in last_evaluation(folder).items():
        table.add_row(name.replace("_", " "), f"{value:.4f}")
    console.print(table)
    for name in (task_model.PREDICTIONS, task_model.CONFUSION, "weights"):
        console.print(f"{folder / name}", markup=False, highlight=False, soft_wrap=True)

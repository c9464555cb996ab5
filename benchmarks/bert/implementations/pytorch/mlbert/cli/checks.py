"""What ``mlbert train --print-config`` looks at besides settings: what may end a run before its first step."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mlbert.config.recipe import Recipe
from mlbert.config.sections import Configuration
from mlbert.data.loading.config import DataConfig
from mlbert.host.errors import UserError
from mlbert.host.machine import threads_per_rank
from mlbert.models.config import ModelConfig
from mlbert.ops.config import ComputeConfig
from mlbert.runs.run_folder import RunFolder
from mlbert.runs.starting_weights import weights_file
from mlbert.training.config import RunConfig

if TYPE_CHECKING:
    from mlbert.training.protocols import Inputs


def check_run(config: Configuration, recipe: Recipe, local_world_size: int, say: Callable[[str], None]) -> None:
    """Opens the data, reads the shape and the starting weights, looks at the folders and threads; says what was found.

    Nothing is written. What only the machine that trains can tell (its GPUs, its memory) is not asked.

    Raises:
        UserError: the first problem; the others have been said.
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
    check("threads", lambda: str(threads_per_rank(config[ComputeConfig].cpu_threads, local_world_size)))
    if problems:
        raise problems[0]


def _data(config: DataConfig, inputs: Inputs) -> str:
    if inputs.train_data == inputs.eval_data and not config.synthetic_data:
        return f"{inputs.train_data}; warning: EVALDIR is the training set"
    return f"{inputs.train_data}, evaluation {inputs.eval_data}"


def _weights(start: Path, inspect: Callable[[], Inputs]) -> str:
    from mlbert.models.weights.load import read_file
    from mlbert.models.weights.renaming import own_state, parameters_in

    file = weights_file(start)
    weights, shape = read_file(file), inspect().shape
    report = own_state(weights.tensors, shape, str(file), parameters_in(weights.tensors, shape))[1]
    return " ".join([str(file), *report.warnings(file)])


def _folder(config: RunConfig) -> str:
    paths = RunFolder.of(config)
    paths.refuse_finished()
    there = next(path for path in (paths.folder.absolute(), *paths.folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UserError("file.unwritable", there, "cannot be written", "Set LOGDIR to a writable folder")
    return f"{paths.folder}, not made yet" if there != paths.folder.absolute() else str(paths.folder)

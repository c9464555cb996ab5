"""The accuracy of the starting weights: the check that a checkpoint was converted and loaded rightly.

    source config_<system>.sh && mlbert train --evaluate-only

The benchmark's phase-1 checkpoint (``model.ckpt-28252``) on its 10,000 evaluation samples must give a masked-LM
accuracy of 0.34085. Another number means other weights, other data, another ``bert_config.json`` or a wrong
conversion. Needs INIT_CHECKPOINT, BERT_CONFIG and EVALDIR; the training set is not touched, no MLPerf log is written.
"""

from __future__ import annotations

import torch
from rich.console import Console

from mlbert.config.recipe import Recipe
from mlbert.config.sections import Configuration
from mlbert.distributed.world import World
from mlbert.host.errors import UserError
from mlbert.host.machine import threads_per_rank
from mlbert.mlperf import rules
from mlbert.models.config import ModelConfig
from mlbert.ops.config import ComputeConfig
from mlbert.training.config import RunConfig
from mlbert.training.evaluate import evaluate
from mlbert.training.protocols import EvaluationSet, Model, Objective, RecipeBuild


def evaluate_only(config: Configuration, recipe: Recipe, world: World, console: Console) -> float:
    """Evaluates the starting weights once, as training would; prints and returns the recipe's metric.

    Raises:
        UserError: there are no weights, or data and model do not fit each other.
    """
    world.start()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def build() -> tuple[Model, Objective, EvaluationSet]:
        if config[ModelConfig].init_checkpoint is None:
            reason = "is none, there is nothing to evaluate"
            raise UserError("config.missing", "INIT_CHECKPOINT", reason, "Set it to the starting weights")
        torch.set_num_threads(threads_per_rank(config[ComputeConfig].cpu_threads, world.local_world_size))
        recipe_build: RecipeBuild = recipe.load()
        model, objective, samples = recipe_build.build_evaluation(config, world, config[RunConfig].seed or 0, say)
        samples.open()
        return model, objective, samples

    model, objective, samples = world.meeting.agree("evaluation", build)
    metrics = evaluate(model, objective, samples, world)
    told = ", ".join(f"{name} {value:.5f}" for name, value in metrics.items())
    say(
        f"initial {told}, {samples.num_examples} samples "
        f"(the benchmark's checkpoint on its evaluation samples: {rules.INITIAL_MLM_ACCURACY})"
    )
    world.stop()
    return metrics[objective.metric]

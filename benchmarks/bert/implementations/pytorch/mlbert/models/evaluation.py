"""What evaluating the starting weights of a pre-training run needs, whichever its method."""

from __future__ import annotations

from collections.abc import Callable

from mlbert.core.bert_config import BertConfig
from mlbert.core.settings import TrainConfig
from mlbert.dist.world import World
from mlbert.feed.evaluation import EvalSet
from mlbert.feed.pretraining import make_evaluation_set
from mlbert.feed.synthetic import SyntheticEvalSet
from mlbert.models.bert import AnyBert, BertForPreTraining
from mlbert.models.objectives import MaskedLM, PreTraining
from mlbert.models.start import Compute, choose_compute, start_weights
from mlbert.store.open import check_shape

MakeModel = Callable[[TrainConfig, BertConfig, Compute], AnyBert]


def make_pre_training(config: TrainConfig, shape: BertConfig, compute: Compute) -> BertForPreTraining:
    """Our model with both heads, without weights."""
    return BertForPreTraining(shape, compute.dtype, fp8_products=compute.products)


def build_evaluation(
    config: TrainConfig,
    world: World,
    seed: int,
    warn: Callable[[str], None],
    make_model: MakeModel = make_pre_training,
    objective: type[MaskedLM] = PreTraining,
) -> tuple[AnyBert, MaskedLM, EvalSet | SyntheticEvalSet]:
    """Model, objective and samples; the training set is not looked at. What a loss is divided by does not matter here.

    Raises:
        UserError: model, checkpoint and samples are missing, damaged, or do not fit each other.
    """
    shape = BertConfig.from_json(config.bert_config_file).with_options(config.model_options)
    samples = make_evaluation_set(config, shape, seed=seed, rank=world.rank, world_size=world.world_size)
    if isinstance(samples, EvalSet):
        check_shape(samples.info, shape, config.bert_config_file)
    model = make_model(config, shape, choose_compute(config, world.device, warn))
    return start_weights(model, config, seed, world.device, warn), objective(scope="step"), samples

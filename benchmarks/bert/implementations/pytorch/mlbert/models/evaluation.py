"""What evaluating the starting weights of a pre-training run needs, whichever its method."""

from __future__ import annotations

from collections.abc import Callable

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.open import check_shape
from mlbert.data.loading.config import DataConfig
from mlbert.data.loading.evaluation import EvalSet
from mlbert.data.loading.pretraining import make_evaluation_set
from mlbert.data.loading.synthetic import SyntheticEvalSet
from mlbert.distributed.world import World
from mlbert.models.bert import AnyBert, BertForPreTraining
from mlbert.models.config import ModelConfig
from mlbert.models.objectives import MaskedLM, PreTraining
from mlbert.models.start import Compute, choose_compute, start_weights
from mlbert.ops.config import ComputeConfig
from mlbert.training.config import EvaluationConfig

MakeModel = Callable[[BertConfig, Compute], AnyBert]


def make_pre_training(shape: BertConfig, compute: Compute) -> BertForPreTraining:
    """Return our model with both heads, without weights."""
    return BertForPreTraining(shape, compute.dtype, fp8_products=compute.products)


def build_evaluation(
    model_config: ModelConfig,
    data: DataConfig,
    evaluation: EvaluationConfig,
    compute_config: ComputeConfig,
    world: World,
    seed: int,
    warn: Callable[[str], None],
    make_model: MakeModel = make_pre_training,
    objective: type[MaskedLM] = PreTraining,
) -> tuple[AnyBert, MaskedLM, EvalSet | SyntheticEvalSet]:
    """Return model, objective and samples; the training set is not read. The divisor of a loss does not matter here.

    Raises:
        UserError: model, checkpoint and samples are missing, damaged, or do not fit each other.
    """
    shape = BertConfig.from_json(model_config.bert_config_file).with_options(model_config.model_options)
    samples = make_evaluation_set(data, evaluation, shape, seed=seed, rank=world.rank, world_size=world.world_size)
    if isinstance(samples, EvalSet):
        check_shape(samples.info, shape, model_config.bert_config_file)
    model = make_model(shape, choose_compute(compute_config, model_config, world.device, warn))
    return start_weights(model, model_config, seed, world.device, warn), objective(scope="step"), samples

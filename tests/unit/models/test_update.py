"""The update that masked_lm and classification share, with each recipe's own defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlbert.core.bert_config import BertConfig
from mlbert.core.config import resolve
from mlbert.core.errors import UserError
from mlbert.core.settings import TrainConfig
from mlbert.dist.world import World
from mlbert.models.bert import BertForSequenceClassification
from mlbert.models.update import whole_update
from mlbert.recipes import classification, masked_lm

SHAPE = BertConfig(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=16,
)
GIVEN = {"bert_config_file": "b.json", "input_dir": "in", "eval_dir": "eval", "output_dir": "out"}
NUMBERS = {"train_batch_size": 4, "learning_rate": 1e-3, "max_steps": 9, "max_samples_termination": 99}
MORE = {"opt_lamb_beta_1": 0.9, "opt_lamb_beta_2": 0.98, "weight_decay_rate": 1e-5}
MORE |= {"eval_iter_start_samples": 9, "eval_iter_samples": 9, "schedule": "constant"}


def config_of(recipe: object, **changes: object) -> TrainConfig:
    values = {**GIVEN, **NUMBERS, **MORE, **changes}
    defaults = recipe.DEFAULTS
    return resolve(defaults, {}, {}, [], [], {name: (value, "test") for name, value in values.items()}, [Path()]).config


@pytest.mark.parametrize("recipe", [classification, masked_lm])
@pytest.mark.parametrize("decay_all", [None, False])
def test_every_tensor_decays_unless_the_settings_say_otherwise(recipe: object, decay_all: bool | None) -> None:
    changes = {} if decay_all is None else {"decay_all": decay_all}
    flat, _, _ = whole_update(config_of(recipe, **changes), BertForSequenceClassification(SHAPE, 2), World(), None)
    spared = [segment.name for segment in flat.segments if not segment.decay]
    assert bool(spared) == (decay_all is False)
    assert all(name.endswith("bias") or "LayerNorm" in name for name in spared)


@pytest.mark.parametrize("recipe", [classification, masked_lm])
@pytest.mark.parametrize(
    "changes", [{"sharded_optimizer": "all"}, {"weights_allgather": "bf16"}, {"gradient_clipping": "buckets"}]
)
def test_other_ways_are_refused(recipe: object, changes: dict[str, str]) -> None:
    with pytest.raises(UserError):
        whole_update(config_of(recipe, **changes), BertForSequenceClassification(SHAPE, 2), World(), None)

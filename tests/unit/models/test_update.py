"""The update that masked_lm and classification share, with each recipe's own defaults."""

from __future__ import annotations

import pytest

from mlbert.config.bert_config import BertConfig
from mlbert.config.recipe import Recipe
from mlbert.distributed.world import World
from mlbert.models.bert import BertForSequenceClassification
from mlbert.recipes import classification, masked_lm_stored, masked_lm_text
from mlbert.recipes.assembly import Update, build_replicated_update
from training_settings import configuration
from user_errors import user_error

SHAPE = BertConfig(40, 16, 1, 2, 32, max_position_embeddings=16)
NEEDED: dict[str, dict[str, object]] = {
    "masked_lm_stored": {},
    "masked_lm_text": {"tokenizer": "vocab.txt", "max_seq_length": 16, "masking_rate": 0.15},
    "classification": {"tokenizer": "vocab.txt"},
}
each_recipe = pytest.mark.parametrize(
    "recipe", [classification.RECIPE, masked_lm_stored.RECIPE, masked_lm_text.RECIPE], ids=lambda recipe: recipe.name
)


def update(recipe: Recipe, **changes: object) -> Update:
    config = configuration(recipe, schedule="constant", **NEEDED[recipe.name], **changes)
    return build_replicated_update(config, BertForSequenceClassification(SHAPE, 2), World(), recipe.name)


@each_recipe
@pytest.mark.parametrize("decay_all", [None, False])
def test_every_tensor_decays_unless_the_settings_say_otherwise(recipe: Recipe, decay_all: bool | None) -> None:
    flat = update(recipe, **({} if decay_all is None else {"decay_all": decay_all})).flat
    spared = [segment.name for segment in flat.segments if not segment.decay]
    assert bool(spared) == (decay_all is False)
    assert all(name.endswith("bias") or "LayerNorm" in name for name in spared)


@each_recipe
@pytest.mark.parametrize(
    "changes", [{"sharded_optimizer": "all"}, {"weights_allgather": "bf16"}, {"gradient_clipping": "buckets"}], ids=str
)
def test_other_ways_are_refused(recipe: Recipe, changes: dict[str, str]) -> None:
    ((name, value),) = changes.items()
    with user_error("config.conflict", f"{name.upper()}={value}"):
        update(recipe, **changes)

"""Settings that a recipe refuses, in one line."""

from pathlib import Path

import pytest

from mlbert.config.bert_config import BertConfig
from mlbert.config.recipe import Recipe
from mlbert.distributed.world import World
from mlbert.models.bert import BertForSequenceClassification
from mlbert.recipes import classification, masked_lm_stored, masked_lm_text
from mlbert.recipes.assembly import Update, build_replicated_update
from programs import RunMlbert
from training_settings import configuration, train_arguments
from user_errors import user_error

APEX = {"optimizer_implementation": "apex"}
UNPACKED = {"average_packing_rate": 1}
STEPS = {"lr_milestones": "4,5", "lr_gamma": 0.5, "warmup_steps": 2, "max_steps": 8}
METHODS = {
    "packed_lamb": {},
    "ddp_adam": UNPACKED,
    "masked_lm": {**UNPACKED, "gradient_accumulation_steps": 1, **STEPS},
}
EVERY = "every rank of"


@pytest.mark.parametrize(
    ("recipe", "changes", "words"),
    [
        ("packed_lamb", {"weights_allgather": "bf16"}, "WEIGHTS_ALLGATHER=bf16"),
        ("packed_lamb", {**APEX, "sharded_optimizer": "all"}, "apex optimizer: it does not shard"),
        ("packed_lamb", {"gradient_clipping": "buckets", **UNPACKED}, "is the way of RECIPE=ddp_adam"),
        ("ddp_adam", {"sharded_optimizer": "all"}, f"SHARDED_OPTIMIZER=all: {EVERY} ddp_adam updates everything"),
        ("ddp_adam", {"weights_allgather": "bf16"}, f"WEIGHTS_ALLGATHER=bf16: {EVERY} ddp_adam updates everything"),
        ("ddp_adam", {"bucket_mib": "1000000"}, "must be less than or equal to 4096"),
        ("masked_lm", {"lr_milestones": "none"}, "LR_MILESTONES: is not set, and SCHEDULE=multistep needs it"),
        ("masked_lm", {"model_options": "dropout=0"}, "MODEL_OPTIONS: 'dropout' is unknown"),
        ("masked_lm", {"max_seq_length": 65}, "MAX_SEQ_LENGTH=65: is more than the model's 64 positions"),
    ],
)
def test_contradictory_settings_are_refused_in_one_line(
    tmp_path: Path, run_mlbert: RunMlbert, recipe: str, changes: dict[str, str], words: str
) -> None:
    status, _, err = run_mlbert(*train_arguments(tmp_path, recipe=recipe, **{**METHODS[recipe], **changes}))
    assert (status, err.count("\n"), words in err) == (2, 1, True), err


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

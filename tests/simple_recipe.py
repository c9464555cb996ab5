"""A recipe with small values for all required settings, and its configurations."""

from mlbert.config.configuration import Configuration
from mlbert.config.recipe import Recipe
from mlbert.recipes.sections import COMMON, resolve, settings_by_key
from programs import words_as_dict

NUMBERS = words_as_dict("""
    recipe=packed_lamb bert_config_file=bert_config.json train_batch_size=8
    gradient_accumulation_steps=2 average_packing_rate=2.0 max_sequences_per_pack=3
    learning_rate=1e-3 max_steps=100 max_samples_termination=100000 warmup_steps=10
    opt_lamb_beta_1=0.9 opt_lamb_beta_2=0.999 weight_decay_rate=0.01 num_eval_examples=100
    eval_batch_size=4 eval_iter_start_samples=1000 eval_iter_samples=1000 max_skipped_steps=3
    submission_org=SomeOrg submission_division=open
""") | {"submission_platform": "some machine"}
FOLDERS = {"DATADIR_PHASE2": "/data/train", "EVALDIR": "/data/eval", "LOGDIR": "/runs/x"}


def simple_recipe(sections: tuple = COMMON, **values: object) -> Recipe:
    """Return a recipe of these sections; ``values`` override `NUMBERS` and the defaults by key."""
    known = settings_by_key()
    parsed = {
        known[key].env: known[key].parse(value) for key, value in {**NUMBERS, **values}.items()
    }
    return Recipe("packed_lamb", sections, inspect=lambda config: None, build="", overrides=parsed)


def simple_configuration(**values: object) -> Configuration:
    """Return the configuration of `simple_recipe` in `FOLDERS`."""
    return resolve(simple_recipe(**values), FOLDERS).config

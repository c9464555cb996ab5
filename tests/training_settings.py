"""Settings of a run that takes seconds, on generated tokens, as the base of the training tests."""

import json
from pathlib import Path

import pytest

from mlbert.cli.main import main
from mlbert.config.configuration import Configuration
from mlbert.config.recipe import Recipe
from mlbert.recipes.sections import resolve, settings_by_key
from programs import words_as_dict

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
# Random tokens cannot be learned: every run ends at max_steps, after one evaluation, with exit code
# 1. Only fp32 gives equal results on all processors: auto is bfloat16 on CPUs with a matrix unit.
SETTINGS = words_as_dict("""
    recipe=packed_lamb input_dir=unused eval_dir=unused synthetic_data=1
    train_batch_size=4 gradient_accumulation_steps=2 average_packing_rate=1.5
    learning_rate=0.01 opt_lamb_beta_1=0.9 opt_lamb_beta_2=0.98 weight_decay_rate=0.01
    max_steps=12 max_samples_termination=1000000 target_mlm_accuracy=0.999
    eval_iter_start_samples=1000000 eval_iter_samples=1000000
    seed=5 cpu_threads=1 precision=fp32 log_freq=1
    submission_org=test submission_platform=test submission_division=open
""")


def exports(folder: Path) -> dict[str, str]:
    """Return `SETTINGS` as exports; the model's shape is a file in the folder."""
    (folder / "bert_config.json").write_text(json.dumps(SHAPE))
    table = settings_by_key()
    found = {table[key].env: value for key, value in SETTINGS.items()}
    return found | {"BERT_CONFIG": str(folder / "bert_config.json")}


def train_arguments(folder: Path, name: str = "out", **changes: object) -> list[str]:
    """Return ``mlbert`` arguments for a run into ``folder/name`` with changes;
    ``shape`` changes the model.
    """
    shape = folder / "bert_config.json"
    shape.write_text(json.dumps({**SHAPE, **changes.pop("shape", {})}))
    values = {**SETTINGS, "bert_config_file": shape, "output_dir": folder / name, **changes}
    return ["train", *(word for key, value in values.items() for word in (f"--{key}", str(value)))]


def run(folder: Path, name: str = "out", *flags: str, **changes: object) -> int:
    """Run ``mlbert train`` with `train_arguments` and flags, and return its exit code."""
    with pytest.raises(SystemExit) as end:
        main([*train_arguments(folder, name, **changes), *flags])
    return end.value.code


def train(folder: Path, name: str = "out", **changes: object) -> list[dict]:
    """Train into ``folder/name`` to the last step, and return the metrics of the steps."""
    assert run(folder, name, **changes) == 1
    return read_metrics(folder / name)


def configuration(recipe: Recipe, **values: object) -> Configuration:
    """Return a recipe's configuration with `SETTINGS`, one sequence per pack, and values by key."""
    paths = {"bert_config_file": "unused", "output_dir": "unused"}
    chosen = {**SETTINGS, **paths, "recipe": recipe.name, "average_packing_rate": 1, **values}
    return resolve(recipe, {}, given={key: (value, "test") for key, value in chosen.items()}).config


def read_summary(folder: Path) -> dict:
    """Return a run's summary.json."""
    return json.loads((folder / "run_0" / "summary.json").read_text())


def read_metrics(folder: Path, kind: str = "step") -> list[dict]:
    """Return a run's metrics lines of one kind."""
    lines = [
        json.loads(line) for line in (folder / "run_0" / "metrics.jsonl").read_text().splitlines()
    ]
    return [line for line in lines if line["kind"] == kind]

"""Every setting is declared once, with limits and a meaning, by the room that owns it."""

import ast
import sys
from pathlib import Path

import pytest

import mlbert
from mlbert.config.resolution import split_arguments
from mlbert.config.section import settings_of
from mlbert.config.sections import settings_by_env, settings_by_key
from mlbert.config.shell import LaunchConfig
from mlbert.config.words import _OTHERS, hint_at
from mlbert.host.errors import name_shape
from simple_recipe import simple_configuration
from user_errors import user_error

PACKAGE = Path(mlbert.__file__).parent


def test_every_setting_has_an_export_a_meaning_and_bounds():
    # Names are unique over the program and the launchers.
    assert len(settings_by_env()) == len(settings_by_key()) + len(settings_of(LaunchConfig))
    for setting in settings_by_env().values():
        assert setting.env.isupper()
        assert setting.meaning.endswith(".")
        if setting.kind in (int, float):
            limits = setting.section.model_fields[setting.field].metadata
            for names in (("ge", "gt"), ("le", "lt")):
                assert any(hasattr(limit, name) for limit in limits for name in names), setting.env


def test_a_config_module_imports_only_sections_and_the_standard_library():
    files = [path for path in PACKAGE.glob("**/config.py") if path.parent != PACKAGE]
    assert len(files) >= 7
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            foreign = {
                name for name in names if name.partition(".")[0] not in sys.stdlib_module_names
            }
            assert foreign <= {"mlbert.config.section"}, path


def test_a_resumed_run_keeps_the_fixed_settings():
    kept = simple_configuration(seed=3).fixed_on_resume()
    assert not {"SEED", "MAX_STEPS", "LOGDIR"} & set(kept)
    assert None not in kept.values()
    assert "GRADIENT_STEPS" not in simple_configuration(auto_micro_batch=True).fixed_on_resume()


def test_no_word_of_others_is_one_of_ours_and_each_hint_leads_to_a_flag():
    ours = {name_shape(word) for row in settings_by_key().values() for word in (row.flag, row.key)}
    assert not ours & set(_OTHERS)
    for shape in _OTHERS:
        assert name_shape(shape) == shape
        assert any(row.flag in str(hint_at(shape)) for row in settings_by_key().values())


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--lr=1e-4", "called --learning_rate here (export LR)"),
        ("--num-train-epochs=3", "--max_steps here (export MAX_STEPS); run length is in steps"),
        ("--bf16=1", "Write --precision bf16 here (export PRECISION=bf16)"),
        ("--report_to=wandb", "--wandb_project"),
        ("--per_device_train_batch_size=8", "--train_batch_size"),
        ("--seeed=1", "The nearest known one is --seed"),
    ],
)
def test_a_word_of_another_tool_gets_our_name_for_it(word, said):
    with user_error("config.unknown-name") as caught:
        split_arguments([word])
    assert said in str(caught.value)

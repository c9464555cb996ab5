"""Every setting is declared once, with limits and a meaning, by the package that owns it."""

import ast
import sys
from pathlib import Path

import pytest

import mlbert
from mlbert.config.section import Setting, settings_of
from mlbert.config.shell import LaunchConfig
from mlbert.config.words import _OTHERS, hint_at
from mlbert.host.errors import name_shape
from mlbert.recipes.registry import RECIPES
from mlbert.recipes.sections import (
    CATALOG,
    resolve,
    settings_by_env,
    settings_by_key,
    split_arguments,
)
from mlbert.runs.step_folders import StepFolders
from simple_recipe import NUMBERS, simple_configuration
from user_errors import user_error

PACKAGE = Path(mlbert.__file__).parent
# Settings that a resumed run may change, by reason. All others are fixed on resume.
MAY_CHANGE = """
compared by content: RECIPE DATADIR_PHASE2 EVALDIR BATCHSIZE BERT_CONFIG MODEL_OPTIONS SYNTH_DATA
compared by content: TOKENIZER
compared by content: DATA_STREAMS EVAL_STREAMS INPUT_FILES EVAL_FILES SEED
not read again: INIT_CHECKPOINT INIT_OPTIMIZER EXTEND_CONTEXT LOSS_SCALE RESUME
limits, and the length: MAX_STEPS MAX_SAMPLES_TERMINATION MAX_SECONDS MAX_SKIPPED_STEPS
limits, and the length: TARGET_MLM_ACCURACY
evaluations: NUM_EVAL_EXAMPLES EVAL_BATCH_SIZE EVAL_ITER_START_SAMPLES EVAL_ITER_SAMPLES
evaluations: EVAL_MASKING_RATE
evaluations: EVAL_ITER_STEPS
evaluations: METRIC DO_EVAL EVAL_SCHEDULE EVAL_MASKING
paths and names: LOGDIR RUN_NAME EXPERIMENT TENSORBOARD_DIR WANDB_PROJECT WANDB_OPTIONS
paths and names: MLFLOW_EXPERIMENT
paths and names: DATA_REMOTE EVAL_REMOTE
paths and names: MLPERF_SUBMISSION_ORG MLPERF_SUBMISSION_PLATFORM MLPERF_DIVISION
logs and checkpoints: SAVE_CHECKPOINT_STEPS KEEP_CHECKPOINTS LOG_FREQ CACHES_CLEARED PACKING_FACTOR
a check of the data: MAX_PREDICTIONS_PER_SEQ
speed: DATA_READER CPU_THREADS OPS CUDA_GRAPH_MODE AUTO_MICRO_BATCH OPTIMIZER_IMPLEMENTATION
speed: SHARDED_OPTIMIZER JOIN_TIMEOUT READ_TIMEOUT DETERMINISTIC DISTRIBUTION_STRATEGY TPU
speed: ALL_REDUCE_ALG CACHE_LIMIT LOADER_THREADS
speed: ALLREDUCE_BYTES_PER_PACK DEVICE_WARMUP STEPS_PER_LOOP RUN_EAGERLY ENABLE_XLA
"""


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
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            foreign = {
                name for name in names if name.partition(".")[0] not in sys.stdlib_module_names
            }
            assert foreign <= {"mlbert.config.section"}, path


def test_a_resumed_run_keeps_the_fixed_settings():
    kept = simple_configuration(seed=3).fixed_on_resume()
    assert not {"SEED", "MAX_STEPS", "LOGDIR", "BUCKET_MIB"} & set(kept)
    assert "BUCKET_MIB" in simple_configuration(gradient_clipping="buckets").fixed_on_resume()
    assert "GRADIENT_STEPS" not in simple_configuration(auto_micro_batch=True).fixed_on_resume()


def test_every_setting_of_the_method_is_fixed_on_resume():
    lines = MAY_CHANGE.strip().splitlines()
    may_change = {env for line in lines for env in line.partition(":")[2].split()}
    others = {one.env for one in settings_by_key().values() if not one.fixed_on_resume}
    assert others == may_change


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_another_value_of_any_fixed_setting_is_refused_by_name(tmp_path, recipe):
    """With real checkpoints: one of each value, loaded by a run that has another."""
    values = {**NUMBERS, "output_dir": "out", "input_dir": "data", "eval_dir": "data"}
    values |= {"lr_milestones": "50", "lr_gamma": 0.5}
    values |= {"masking_rate": 0.15, "tokenizer": "vocab.txt", "max_seq_length": 64}
    values |= {
        "model_implementation": "mlbert",
        "gradient_clipping": "buckets",
        "recipe": recipe.name,
    }
    known = settings_by_key()
    read = {key: value for key, value in values.items() if recipe.reads(known[key])}
    given = {key: (value, "test") for key, value in read.items()}
    config = resolve(recipe, {}, given=given).config
    fixed = config.fixed_on_resume()
    StepFolders(tmp_path, 2, fixed).save(1, {}, lambda folder: None)
    for env in fixed:
        one = settings_by_env()[env]
        if not recipe.reads(one):
            continue
        changed = config.replace(
            config[one.section].model_copy(update={one.field: another(one, config.get(one))})
        ).fixed_on_resume()
        with user_error("run.other-settings", "step_00000001", wording=False) as caught:
            StepFolders(tmp_path, 2, changed).load_newest(lambda folder, state: state)
        names = {env, "BUCKET_MIB"} if env == "GRADIENT_CLIPPING" else {env}
        assert any(f": {name} is " in caught.value.problem for name in names)
    StepFolders(tmp_path, 2, fixed).load_newest(lambda folder, state: state)
    old = {env: value for env, value in fixed.items() if env != "WARMUP_STEPS"}
    StepFolders(tmp_path, 2, old).save(2, {"step": 2}, lambda folder: None)
    found, _ = StepFolders(tmp_path, 2, fixed).load_newest(lambda folder, state: state)
    assert found == {"step": 2}, "a setting that was not fixed when it was written"


def another(one: Setting, value: object) -> object:
    """Return a value of a setting that differs from ``value``."""
    if one.choices:
        return next(choice for choice in one.choices if choice != value)
    if one.kind is bool:
        return not value
    if one.kind is str:
        return f"{value or ''}x"
    return one.kind(value or 0) + 1


def test_no_word_of_others_is_one_of_ours_and_each_hint_leads_to_a_flag():
    ours = {name_shape(word) for row in settings_by_key().values() for word in (row.flag, row.key)}
    assert not ours & set(_OTHERS)
    for shape in _OTHERS:
        assert name_shape(shape) == shape
        assert any(row.flag in str(hint_at(CATALOG, shape)) for row in settings_by_key().values())


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--lr=1e-4", "called --learning-rate here (export LR)"),
        ("--num-train-epochs=3", "--max-steps here (export MAX_STEPS); run length is in steps"),
        ("--bf16=1", "Write --precision bf16 here (export PRECISION=bf16)"),
        ("--report_to=wandb", "--wandb-project"),
        ("--per_device_train_batch_size=8", "--train-batch-size"),
        ("--seeed=1", "Did you mean --seed?"),
    ],
)
def test_a_word_of_another_tool_gets_our_name_for_it(word, said):
    with user_error("config.unknown-name") as caught:
        split_arguments([word])
    assert said in str(caught.value)

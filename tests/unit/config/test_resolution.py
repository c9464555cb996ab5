"""Loading a configuration: precedence, strictness, and what each error says."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from mlbert.config.arguments import CommandLine
from mlbert.config.recipe import Recipe
from mlbert.config.section import Setting, settings_of
from mlbert.data.loading.config import DataConfig
from mlbert.host.errors import UserError
from mlbert.optim.config import ScheduleConfig
from mlbert.recipes import ddp_adam, masked_lm_stored, masked_lm_text, packed_lamb
from mlbert.recipes.registry import RECIPES, find
from mlbert.recipes.sections import SECTIONS, peek, resolve, settings_by_key, split_arguments
from mlbert.runs.config import RunConfig
from simple_recipe import FOLDERS, NUMBERS, simple_recipe
from user_errors import user_error

UNPACKED = {"MAX_SEQUENCES_PER_PACK": "1", "PACKING_FACTOR": "1"}
BINS = ("8 0", "9 -1", "4.0 4", "four", "0_4 4", ",")
# What is given: exports, --flags, the text of a YAML file, key=value words;
# then code and subject of the error.
BAD = {
    "unknown flag": ({"--learning_rat": "1"}, "config.unknown-name", "--learning_rat"),
    "unknown yaml key": ({"yaml": "train_batchsize: 3"}, "config.unknown-name", "x.yaml"),
    "unknown key=value": ({"words": ["max_step=3"]}, "config.unknown-name", "max_step"),
    "missing required": ({"LOGDIR": None}, "config.missing", "LOGDIR"),
    "text for an integer": ({"BATCHSIZE": "many"}, "config.value", "BATCHSIZE"),
    "yes/no for a number": ({"yaml": "max_steps: true"}, "config.value", "MAX_STEPS"),
    "not a number": ({"LR": "nan"}, "config.value", "LR"),
    "negative rate": ({"LR": "-1e-3"}, "config.range", "LR"),
    "unknown choice": ({"PRECISION": "fp64"}, "config.choice", "PRECISION"),
    "bad yes/no": ({"RESUME": "maybe"}, "config.value", "RESUME"),
    "indivisible batch": ({"GRADIENT_STEPS": "3"}, "config.conflict", "GRADIENT_STEPS"),
    "two warm-ups": ({"WARMUP_PROPORTION": "0.1"}, "config.conflict", "WARMUP_PROPORTION"),
    "packed": (
        {"MAX_SEQUENCES_PER_PACK": "1", "--average_packing_rate": "2"},
        "config.conflict",
        "PACKING_FACTOR",
    ),
    "none kept": (
        {"SAVE_CHECKPOINT_STEPS": "5", "KEEP_CHECKPOINTS": "0"},
        "config.conflict",
        "KEEP_CHECKPOINTS",
    ),
    "given twice": (
        {"--max_steps": "3", "words": ["max_steps=4"]},
        "config.duplicate",
        "max_steps=4",
    ),
    "broken yaml": ({"yaml": "max_steps: [1"}, "config.file", "x.yaml"),
    "yaml list": ({"yaml": "- 1\n- 2"}, "config.file", "x.yaml"),
    "nested yaml": ({"yaml": "max_steps:\n  value: 3"}, "config.file", "x.yaml"),
    "extends itself": ({"yaml": "extends: x.yaml"}, "config.file", "x.yaml"),
    "extends nothing": ({"yaml": "extends: absent.yaml"}, "file.unreadable", "absent.yaml"),
    **{
        f"bins {text}": (UNPACKED | {"BIN_COUNTS": text}, "config.value", "BIN_COUNTS")
        for text in BINS
    },
    "bins of fewer rows": (UNPACKED | {"BIN_COUNTS": "3 2 1"}, "config.conflict", "BIN_COUNTS"),
    "bins of packs": (
        {"BIN_COUNTS": "4 4", "PACKING_FACTOR": "1"},
        "config.conflict",
        "BIN_COUNTS",
    ),
    "bins of no data": (
        UNPACKED | {"BIN_COUNTS": "4 4", "SYNTH_DATA": "1"},
        "config.conflict",
        "BIN_COUNTS",
    ),
    "unresolvable reference": ({"yaml": "max_steps: ${nothing}"}, "config.file", "x.yaml"),
}
ALL = Recipe("all", SECTIONS, lambda config: None, "")


def _resolve(recipe, environ, flags=None, yaml_files=(), overrides=()):
    return resolve(recipe, environ, CommandLine(flags or {}, yaml_files, overrides))


def test_recipe_yaml_environment_argument_win_in_this_order(recipe, environ, tmp_path):
    """Of two parents of a YAML file, the later one wins."""
    first, second, child = (tmp_path / f"{name}.yaml" for name in ("first", "second", "child"))
    first.write_text(
        "{max_steps: 1, cpu_threads: 1, log_freq: 1, experiment: 1, eval_batch_size: 1}"
    )
    second.write_text("cpu_threads: 2")
    child.write_text(
        "extends: [first.yaml, second.yaml]\nlog_freq: 2\nexperiment: 2\neval_batch_size: 2\n"
    )
    environ |= {"EXPERIMENT": "3", "EVAL_BATCH_SIZE": "3", "LR": "1"}
    resolved = _resolve(recipe, environ, {"eval_batch_size": "4"}, [child], ["learning_rate=2e-3"])
    expected = {
        "max_steps": (1, f"{first}:1"),
        "cpu_threads": (2, f"{second}:1"),
        "log_freq": (2, f"{child}:2"),
        "experiment": (3, "environment EXPERIMENT"),
        "eval_batch_size": (4, "flag --eval-batch-size"),
        "learning_rate": (2e-3, "argument learning_rate="),
        "train_batch_size": (8, "recipe packed_lamb"),
        "seed": (None, "recipe packed_lamb"),
    }
    known = settings_by_key()
    assert {
        key: (resolved.config.get(known[key]), resolved.origin[key]) for key in expected
    } == expected
    assert resolved.files == [child, first, second]


def test_an_export_and_a_bad_one_are_traced_to_their_lines(recipe, environ, tmp_path):
    """A site file may hold logic and names that are not settings."""
    (tmp_path / "env.sh").write_text(
        'if true; then\n    export LOGDIR="${tree_dir}/r#1" # site\nfi\nexport OTHER=1\n'
    )
    (tmp_path / "config_common.sh").write_text("export LR=2e-3\nexport MAX_STEPS=5\n")
    config = tmp_path / "config_x_1x1x8x2.sh"
    config.write_text(
        '# a comment\nsource "$(dirname "${BASH_SOURCE[0]}")/env.sh"\n. '
        "config_common.sh\nexport MAX_STEPS=6\n"
        'export BERT_CONFIG="${pytorch_dir}/configs/demo.json"\nexport BATCHSIZE="8"\n'
    )
    environ |= {
        "LOGDIR": "/a/r#1",
        "LR": "2e-3",
        "MAX_STEPS": "6",
        "BERT_CONFIG": "/b/large.json",
        "BATCHSIZE": "4",
    }
    resolved = _resolve(recipe, environ | {"CONFIG_FILE": str(config)})
    wanted = {
        "output_dir": f"{tmp_path}/env.sh:2",
        "learning_rate": f"{tmp_path}/config_common.sh:1",
        "max_steps": f"{config}:4",
        "bert_config_file": "environment BERT_CONFIG",  # set anew after the config was sourced
        "train_batch_size": "environment BATCHSIZE",
        "input_dir": "environment DATADIR_PHASE2",
        "seed": "recipe packed_lamb",
    }
    assert {name: resolved.origin[name] for name in wanted} == wanted
    assert resolved.files == [config, tmp_path / "env.sh", tmp_path / "config_common.sh"]
    config.write_text("\nexport LR=fast\n")
    with user_error("config.value"):
        _resolve(recipe, environ | {"LR": "fast", "CONFIG_FILE": str(config)})


def test_values_of_exports_and_of_yaml(recipe, environ, tmp_path):
    for text, seed in (("", None), ("none", None), ("7", 7)):
        resolved = _resolve(simple_recipe(seed=5), environ | {"SEED": text})
        assert resolved.config[RunConfig].seed == seed
    path = tmp_path / "x.yaml"
    path.write_text("learning_rate: 1e-3\nwarmup_steps: 0\nresume: true\nmax_seconds: null\n")
    config = _resolve(recipe, environ, yaml_files=[path]).config
    schedule = config[ScheduleConfig]
    run = config[RunConfig]
    assert (schedule.learning_rate, schedule.warmup_steps, run.resume, run.max_seconds) == (
        1e-3,
        0,
        True,
        None,
    )
    config = _resolve(recipe, environ | {"WARMUP_STEPS": "0", "WARMUP_PROPORTION": "0.25"}).config
    assert config[ScheduleConfig].num_warmup_steps == 25
    for text, counts in (("3 2 1 2", (3, 2, 1, 2)), ("8", (8,)), (" 4,4 ", (4, 4)), ("none", None)):
        resolved = _resolve(recipe, environ | UNPACKED | {"BIN_COUNTS": text})
        assert resolved.config[DataConfig].counts_of_bins == counts


def test_doubtful_exports_are_warnings(recipe, environ):
    near = {
        "BATCH_SIZE": "BATCHSIZE",
        "EVAL_DIR": "EVALDIR",
        "LEARNING_RATE": "LR",
        "MAX_STEP": "MAX_STEPS",
    }
    assert sorted(
        _resolve(recipe, environ | dict.fromkeys(near, "1") | {"HOME": "/"}).warnings
    ) == [
        f"{name} is exported but is not a setting; did you mean {known}?"
        for name, known in near.items()
    ]
    for name, warning in (
        (
            "EXCHANGE_BY",
            "EXCHANGE_BY is no longer a setting: both of its values gave the same batches",
        ),
        ("MAX_STEPS", "the warm-up ends at step 10, after MAX_STEPS 5: LR is never reached"),
    ):
        assert _resolve(recipe, environ | {name: "5"}).warnings == [warning]


@pytest.mark.parametrize(("values", "code", "subject"), BAD.values(), ids=BAD)
def test_a_bad_configuration_is_reported_in_one_line(
    values, code, subject, recipe, environ, tmp_path
):
    exports = {
        name: value
        for name, value in (environ | values).items()
        if name.isupper() and value is not None
    }
    flags = {
        name.removeprefix("--"): value for name, value in values.items() if name.startswith("--")
    }
    yaml_files = []
    if "yaml" in values:
        yaml_files = [tmp_path / "x.yaml"]
        yaml_files[0].write_text(values["yaml"])
    with user_error(code) as caught:
        _resolve(recipe, exports, flags, yaml_files, values.get("words", ()))
    origin = " (" if yaml_files and code == "config.value" else ""
    assert caught.value.subject.endswith(subject) or caught.value.subject.startswith(
        f"{subject}{origin}"
    )


def test_all_missing_values_come_in_one_error_that_names_the_file_to_edit(recipe, environ):
    del environ["EVALDIR"]
    with user_error("config.missing", "EVALDIR"):
        _resolve(recipe, environ | {"CONFIG_FILE": "config_a.sh"})
    del environ["LOGDIR"]
    with user_error("config.missing", "LOGDIR (--output-dir), EVALDIR (--eval-dir)"):
        _resolve(recipe, environ)


def test_command_line_words_are_sorted():
    words = (
        "--learning-rate 1e-3 --resume --max_steps=5 log_freq=2 --config a.yaml "
        "--start_warmup_step -5 --ops plain"
    )
    line = split_arguments([*words.split(), "--synthetic_data", "0"])
    numbers = {"learning_rate": "1e-3", "max_steps": "5", "start_warmup_step": "-5"}
    assert line.flags == {**numbers, "resume": "1", "ops": "plain", "synthetic_data": "0"}
    assert line.overrides == ["log_freq=2"]
    assert line.yaml_files == [Path("a.yaml")]
    for bad, code, subject in (
        (["--max_steps", "--resume"], "config.syntax", "--max_steps"),
        (["stray"], "config.syntax", "stray"),
        (["--max_steps=1", "--max-steps=2"], "config.duplicate", "--max-steps"),
    ):
        with user_error(code, subject):
            split_arguments(bad)


def test_the_recipe_can_be_read_before_its_defaults(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("recipe: from_yaml\n")
    assert peek("recipe", {}) is None
    assert peek("recipe", {}, CommandLine(yaml_files=[path])) == "from_yaml"
    assert (
        peek("recipe", {"RECIPE": "from_export"}, CommandLine(yaml_files=[path])) == "from_export"
    )
    assert (
        peek("recipe", {"RECIPE": "from_export"}, CommandLine({"recipe": "from_flag"}))
        == "from_flag"
    )


def _legal_values(setting: Setting) -> st.SearchStrategy[object]:
    limits = {}
    for limit in setting.section.model_fields[setting.field].metadata:  # as pydantic keeps them
        limits |= {
            name: getattr(limit, name) for name in ("ge", "gt", "le", "lt") if hasattr(limit, name)
        }
    least = limits.get("ge", limits.get("gt"))
    most = limits.get("le", limits.get("lt"))
    if setting.choices:
        values: st.SearchStrategy[object] = st.sampled_from(setting.choices)
    elif setting.kind is bool:
        values = st.booleans()
    elif setting.kind is int:
        values = st.integers(least, most)
    elif setting.kind is float:
        finite = {"allow_nan": False, "allow_infinity": False}
        values = st.floats(
            least, most, exclude_min="gt" in limits, exclude_max="lt" in limits, **finite
        )
    else:
        letters = st.characters(codec="utf-8", categories=["L", "N", "P"])
        values = st.text(letters, min_size=1).filter(
            lambda text: text.lower() not in ("none", "null")
        )
        values = values.map(setting.kind)
    return st.one_of(st.none(), values) if setting.optional else values


@hypothesis_settings(max_examples=40)
@given(
    st.fixed_dictionaries(
        {key: _legal_values(setting) for key, setting in settings_by_key().items()}
    )
)
def test_any_legal_configuration_survives_a_round_trip_as_text(values):
    values |= {"gradient_accumulation_steps": 1, "warmup_proportion": None, "keep_checkpoints": 1}
    values |= {"init_checkpoint": None, "average_packing_rate": 1.0, "bin_counts": None}
    values |= {
        "warmup_steps": 0,
        "lr_decay_end": None,
        "lr_decay_steps": 1,
        "lr_decay_proportion": None,
        "lr_milestones": "3,9",
        "lr_gamma": 0.5,
        "batchsize_warmup_start": None,
        "batchsize_warmup_steps": None,
        "batchsize_warmup_tokens": None,
    }
    resolved = resolve(ALL, {}, given={key: (value, "test") for key, value in values.items()})
    assert {
        key: resolved.config.get(setting) for key, setting in settings_by_key().items()
    } == values
    rows = resolved.as_table()
    by_words = resolve(
        ALL, {}, CommandLine(overrides=[f"{key}={text}" for key, text, _, _ in rows])
    )
    by_exports = resolve(ALL, {env: text for _, text, env, _ in rows})
    assert (
        list(by_words.config.sections)
        == list(by_exports.config.sections)
        == list(resolved.config.sections)
    )


@example("average_packing_rate", "0\n")
@given(
    st.sampled_from(sorted(settings_by_key())),
    st.text() | st.floats() | st.integers() | st.booleans(),
)
def test_any_value_is_accepted_or_refused_in_one_line(key, value):
    setting = settings_by_key()[key]
    recipe = simple_recipe(sections=SECTIONS, tokenizer="t", masking_rate=0.1)
    try:
        found = resolve(recipe, FOLDERS, given={key: (value, "test")}).config.get(setting)
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert (found is None and setting.optional) or isinstance(found, setting.kind)


def test_a_setting_the_recipe_does_not_read_is_an_error_in_a_flag_yaml_or_sourced_config(tmp_path):
    readers = list(RECIPES.values())
    config = tmp_path / "config_x_1x1x8x2.sh"
    yaml_file = tmp_path / "x.yaml"
    config.write_text("export TASK=qnli\n")
    yaml_file.write_text("task: qnli\n")
    given = (
        ({}, {"task": "qnli"}, []),
        ({}, {}, [yaml_file]),
        ({"TASK": "qnli", "CONFIG_FILE": str(config)}, {}, []),
    )
    for exports, flags, yaml_files in given:
        with user_error("config.not-read") as caught:
            resolve(
                simple_recipe(), FOLDERS | exports, CommandLine(flags, yaml_files), readers=readers
            )
        assert caught.value.subject.startswith("TASK (")
        assert "only by classification" in caught.value.problem


def test_a_setting_the_recipe_does_not_read_is_a_warning_in_the_environment(recipe):
    resolved = resolve(recipe, FOLDERS | {"TASK": "qnli"}, readers=list(RECIPES.values()))
    assert resolved.warnings == ["TASK is not read by RECIPE=packed_lamb, only by classification"]
    assert resolved.as_configuration()["TASK"] == {"value": None, "origin": "not set"}


def test_none_and_defaults_pass_so_that_old_logs_can_be_repeated(recipe):
    words = [
        "task=none",
        "drop_last=",
        "deterministic=1",
        "masking_rate=none",
        "steps_per_loop=200",
    ]
    assert resolve(recipe, FOLDERS, CommandLine(overrides=words)).warnings == []


def test_a_recipe_may_require_what_its_section_allows_to_be_none():
    values = NUMBERS | {
        "tokenizer": "t",
        "masking_rate": 0.1,
        "max_seq_length": None,
        "max_sequences_per_pack": 2,
    }
    with user_error("config.missing", "MAX_SEQ_LENGTH"):
        resolve(
            masked_lm_text.RECIPE,
            FOLDERS,
            given={key: (value, "test") for key, value in values.items()},
        )


def test_masked_lm_is_one_of_two_recipes():
    assert find("masked_lm", lambda key: None) is masked_lm_stored.RECIPE
    assert find("masked_lm", lambda key: "none") is masked_lm_stored.RECIPE
    assert find("masked_lm", lambda key: "vocab.txt") is masked_lm_text.RECIPE
    with user_error("config.choice", "RECIPE=maskedlm"):
        find("maskedlm", lambda key: None)
    with user_error("config.unsupported", "RECIPE=tensorflow2"):
        find("tensorflow2", lambda key: None)


def test_no_default_is_declared_in_two_files():
    for recipe in RECIPES.values():
        for setting in (one for section in recipe.sections for one in settings_of(section)):
            if setting.env in recipe.overrides and not setting.required:
                assert recipe.overrides[setting.env] != setting.default, (
                    f"{recipe.name}: {setting.env}"
                )


def test_benchmark_recipes_require_the_settings_of_a_submission():
    needed = {
        "OPT_LAMB_BETA_1",
        "OPT_LAMB_BETA_2",
        "WEIGHT_DECAY_RATE",
        "PACKING_FACTOR",
        "MLPERF_SUBMISSION_ORG",
    }
    for recipe in (packed_lamb.RECIPE, ddp_adam.RECIPE):
        required = {one.env for one in settings_by_key().values() if recipe.requires(one)}
        assert (
            needed | {"MLPERF_SUBMISSION_PLATFORM", "MLPERF_DIVISION", "LR", "BATCHSIZE"}
            <= required
        )

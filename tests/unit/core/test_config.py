"""Loading a configuration: precedence, strictness, and what each mistake is told."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlbert.core.config import Resolved, convert, peek, resolve, split_arguments
from mlbert.core.errors import UserError
from mlbert.core.settings import TrainConfig, train_settings


def _resolve(defaults, environ, flags=None, yaml_files=(), overrides=()):
    return resolve(defaults, environ, flags or {}, yaml_files, overrides)


def test_recipe_yaml_environment_flag_win_in_this_order(defaults, environ, tmp_path: Path) -> None:
    parent, child = tmp_path / "parent.yaml", tmp_path / "child.yaml"
    parent.write_text("max_steps: 1\nlog_freq: 1\nexperiment: 1\neval_batch_size: 1\n")
    child.write_text("extends: parent.yaml\nlog_freq: 2\nexperiment: 2\neval_batch_size: 2\n")
    environ |= {"EXPERIMENT": "3", "EVAL_BATCH_SIZE": "3"}
    resolved = _resolve(defaults, environ, {"eval_batch_size": "4"}, [child])
    config = resolved.config
    assert (config.max_steps, config.log_freq, config.experiment, config.eval_batch_size) == (1, 2, 3, 4)
    assert config.train_batch_size == 8
    assert resolved.origin["max_steps"] == f"{parent}:1"
    assert resolved.origin["log_freq"] == f"{child}:2"
    assert resolved.origin["experiment"] == "environment EXPERIMENT"
    assert resolved.origin["eval_batch_size"] == "flag --eval_batch_size"
    assert resolved.origin["train_batch_size"] == "recipe packed_lamb"
    assert resolved.origin["seed"] == "recipe packed_lamb"
    assert resolved.files == [child, parent]


def test_an_export_is_traced_to_its_line(defaults, environ, tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text('if true; then\n    export LOGDIR="${tree_dir}/runs" # site\nfi\n')
    (tmp_path / "config_common.sh").write_text("export LR=2e-3\nexport MAX_STEPS=5\n")
    config = tmp_path / "config_x_1x1x8x2.sh"
    config.write_text(
        'source "$(dirname "${BASH_SOURCE[0]}")/env.sh"\nsource config_common.sh\n\nexport MAX_STEPS=6\n'
        'export BERT_CONFIG="${pytorch_dir}/configs/demo.json"\nexport BATCHSIZE="8"\n'
    )
    environ |= {"LOGDIR": "/a/runs", "LR": "2e-3", "MAX_STEPS": "6", "BERT_CONFIG": "/b/large.json", "BATCHSIZE": "4"}
    resolved = _resolve(defaults, environ | {"CONFIG_FILE": str(config)})
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


def test_a_bad_export_is_told_with_its_line(defaults, environ, tmp_path: Path) -> None:
    config = tmp_path / "config_x_1x1x8x2.sh"
    config.write_text("\nexport LR=fast\n")
    with pytest.raises(UserError, match=r"LR \(.*config_x_1x1x8x2\.sh:2\): 'fast' is not a number"):
        _resolve(defaults, environ | {"LR": "fast", "CONFIG_FILE": str(config)})


def test_key_value_words_win_over_the_environment(defaults, environ) -> None:
    resolved = _resolve(defaults, environ | {"LR": "1"}, overrides=["learning_rate=2e-3"])
    assert resolved.config.learning_rate == 2e-3
    assert resolved.origin["learning_rate"] == "argument learning_rate="


def test_an_empty_or_none_export_of_an_optional_setting_is_none(defaults, environ) -> None:
    defaults["seed"] = 5
    assert _resolve(defaults, environ | {"SEED": ""}).config.seed is None
    assert _resolve(defaults, environ | {"SEED": "none"}).config.seed is None
    assert _resolve(defaults, environ | {"SEED": "7"}).config.seed == 7


def test_scientific_numbers_in_yaml(defaults, environ, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("learning_rate: 1e-3\nwarmup_steps: 0\nresume: true\nmax_seconds: null\n")
    config = _resolve(defaults, environ, yaml_files=[path]).config
    assert (config.learning_rate, config.warmup_steps, config.resume, config.max_seconds) == (1e-3, 0, True, None)


def test_warmup_from_a_proportion(defaults, environ) -> None:
    config = _resolve(defaults, environ | {"WARMUP_STEPS": "0", "WARMUP_PROPORTION": "0.25"}).config
    assert config.num_warmup_steps == 25


def test_a_near_miss_in_the_environment_is_reported(defaults, environ) -> None:
    resolved = _resolve(defaults, environ | {"BATCH_SIZE": "3", "MAX_STEP": "4", "HOME": "/", "PATH": "/bin"})
    assert len(resolved.warnings) == 2
    assert "BATCH_SIZE is exported but is no setting; did you mean BATCHSIZE?" in resolved.warnings
    assert "MAX_STEP is exported but is no setting; did you mean MAX_STEPS?" in resolved.warnings


@pytest.mark.parametrize(
    ("word", "ours"), [("LEARNING_RATE", "LR"), ("TRAIN_BATCH_SIZE", "BATCHSIZE"), ("EVAL_DIR", "EVALDIR")]
)
def test_another_systems_word_for_a_setting_is_reported(defaults, environ, word, ours) -> None:
    resolved = _resolve(defaults, environ | {word: "1"})
    assert f"{word} is exported but is no setting; did you mean {ours}?" in resolved.warnings


def test_a_warm_up_longer_than_training_is_reported(defaults, environ) -> None:
    resolved = _resolve(defaults, environ | {"MAX_STEPS": "5"})
    assert resolved.warnings == ["the warm-up ends at step 10, after MAX_STEPS 5: LR is never reached"]


# (exports, flags, YAML text, key=value words) and what the one line must contain
BAD = {
    "unknown flag": ({}, {"learning_rat": "1"}, None, (), ["--learning_rat", "unknown flag", "--learning_rate"]),
    "unknown yaml key": ({}, {}, "train_batchsize: 3", (), ["x.yaml", "train_batchsize", "train_batch_size"]),
    "unknown key=value": ({}, {}, None, ["max_step=3"], ["max_step", "unknown key", "max_steps"]),
    "not key=value": ({}, {}, None, ["max_steps"], ["max_steps", "key=value"]),
    "missing required": ({"LOGDIR": None}, {}, None, (), ["LOGDIR", "not set", "--output_dir"]),
    "empty required": ({"LOGDIR": " "}, {}, None, (), ["LOGDIR", "not set"]),
    "text for an integer": ({"BATCHSIZE": "many"}, {}, None, (), ["BATCHSIZE", "'many'", "integer"]),
    "fraction for an integer": ({"BATCHSIZE": "8.5"}, {}, None, (), ["BATCHSIZE", "'8.5'", "integer"]),
    "fraction in yaml": ({}, {}, "max_steps: 1.5", (), ["MAX_STEPS", "x.yaml", "1.5"]),
    "yes/no for a number": ({}, {}, "max_steps: true", (), ["MAX_STEPS", "True"]),
    "not a number": ({"LR": "nan"}, {}, None, (), ["LR", "'nan'"]),
    "infinite": ({"LR": "inf"}, {}, None, (), ["LR", "'inf'"]),
    "negative rate": ({"LR": "-1e-3"}, {}, None, (), ["LR", "above 0"]),
    "beta of one": ({"OPT_LAMB_BETA_2": "1"}, {}, None, (), ["OPT_LAMB_BETA_2", "below 1"]),
    "accuracy in percent": ({"TARGET_MLM_ACCURACY": "72"}, {}, None, (), ["TARGET_MLM_ACCURACY", "below 1"]),
    "unknown choice": ({"PRECISION": "fp64"}, {}, None, (), ["PRECISION", "auto, fp32, bf16"]),
    "bad yes/no": ({"RESUME": "maybe"}, {}, None, (), ["RESUME", "'maybe'", "yes/no"]),
    "positive ramp start": ({"START_WARMUP_STEP": "25"}, {}, None, (), ["START_WARMUP_STEP", "at most 0"]),
    "indivisible batch": ({"GRADIENT_STEPS": "3"}, {}, None, (), ["GRADIENT_STEPS", "3", "BATCHSIZE 8"]),
    "two warm-ups": ({"WARMUP_PROPORTION": "0.1"}, {}, None, (), ["WARMUP_PROPORTION", "WARMUP_STEPS"]),
    "packed and not": (
        {"MAX_SEQUENCES_PER_PACK": "1"},
        {"average_packing_rate": "2"},
        None,
        (),
        ["PACKING_FACTOR", "MAX_SEQUENCES_PER_PACK is 1"],
    ),
    "checkpoints not kept": (
        {"SAVE_CHECKPOINT_STEPS": "5", "KEEP_CHECKPOINTS": "0"},
        {},
        None,
        (),
        ["KEEP_CHECKPOINTS", "SAVE_CHECKPOINT_STEPS"],
    ),
    "given twice": ({}, {"max_steps": "3"}, None, ["max_steps=4"], ["max_steps", "--max_steps", "once"]),
    "broken yaml": ({}, {}, "max_steps: [1", (), ["x.yaml", "not valid YAML"]),
    "yaml list": ({}, {}, "- 1\n- 2", (), ["x.yaml", "names with values"]),
    "nested yaml": ({}, {}, "max_steps:\n  value: 3", (), ["x.yaml", "max_steps", "single value"]),
    "extends itself": ({}, {}, "extends: x.yaml", (), ["x.yaml", "extends itself"]),
    "extends nothing": ({}, {}, "extends: absent.yaml", (), ["absent.yaml", "No such file"]),
    "unresolvable reference": ({}, {}, "max_steps: ${nothing}", (), ["x.yaml", "nothing"]),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
def test_a_bad_configuration_is_told_in_one_line(case, defaults, environ, tmp_path: Path) -> None:
    exports, flags, yaml_text, overrides, wanted = case
    environ = {name: value for name, value in (environ | exports).items() if value is not None}
    yaml_files = []
    if yaml_text is not None:
        yaml_files = [tmp_path / "x.yaml"]
        yaml_files[0].write_text(yaml_text)
    with pytest.raises(UserError) as caught:
        _resolve(defaults, environ, flags, yaml_files, overrides)
    message = str(caught.value)
    assert "\n" not in message
    for text in wanted:
        assert text in message


def test_a_missing_value_names_the_file_to_edit(defaults, environ) -> None:
    del environ["EVALDIR"]
    with pytest.raises(UserError, match=r"EVALDIR: is not set .* Add 'export EVALDIR=\.\.\.' to config_a\.sh\."):
        _resolve(defaults, environ | {"CONFIG_FILE": "config_a.sh"})


def test_all_missing_values_come_in_one_error(defaults, environ) -> None:
    gone = ["EVALDIR", "LOGDIR"]
    with pytest.raises(UserError, match="are not set, all 2 are required") as caught:
        _resolve(defaults, {name: value for name, value in environ.items() if name not in gone})
    assert all(name in str(caught.value) for name in gone)


def test_a_wrong_recipe_default_is_an_error_of_ours(defaults, environ) -> None:
    with pytest.raises(AssertionError, match="no_such_setting"):
        _resolve(defaults | {"no_such_setting": 1}, environ)


def test_command_line_words_are_sorted() -> None:
    words = [
        "--learning-rate",
        "1e-3",
        "--resume",
        "--max_steps=5",
        "log_freq=2",
        "--config",
        "a.yaml",
        "--ops",
        "plain",
    ]
    line = split_arguments([*words, "--start_warmup_step", "-5", "--synthetic_data", "0"])
    assert line.flags == {
        "learning_rate": "1e-3",
        "resume": "1",
        "max_steps": "5",
        "ops": "plain",
        "start_warmup_step": "-5",
        "synthetic_data": "0",
    }
    assert line.overrides == ["log_freq=2"]
    assert line.yaml_files == [Path("a.yaml")]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--max_step", "3"], "--max_steps"),
        (["--max_steps"], "has no value"),
        (["--max_steps", "--resume"], "has no value"),
        (["stray"], "key=value"),
        (["--max_steps=1", "--max-steps=2"], "twice"),
    ],
)
def test_bad_command_lines(words: list[str], wanted: str) -> None:
    with pytest.raises(UserError, match=wanted):
        split_arguments(words)


def test_the_recipe_can_be_read_before_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("recipe: from_yaml\n")
    assert peek("recipe", {}) is None
    assert peek("recipe", {}, yaml_files=[path]) == "from_yaml"
    assert peek("recipe", {"RECIPE": "from_export"}, yaml_files=[path]) == "from_export"
    assert peek("recipe", {"RECIPE": "from_export"}, {"recipe": "from_flag"}) == "from_flag"


def test_printing_and_saving(defaults, environ) -> None:
    resolved = _resolve(defaults, environ)
    rows = resolved.as_table()
    assert len(rows) == len(train_settings())
    assert ("seed", "none", "SEED", "recipe packed_lamb") in rows
    saved = json.loads(resolved.as_json())
    assert saved["config"]["input_dir"] == "/data/train"
    assert saved["origin"]["input_dir"] == "environment DATADIR_PHASE2"
    told = resolved.as_configuration()
    assert list(told) == [row.env for row in train_settings().values()]
    assert told["DATADIR_PHASE2"] == {"value": "/data/train", "origin": "environment DATADIR_PHASE2"}
    assert told["LR"] == {"value": 1e-3, "origin": "recipe packed_lamb"}


def test_the_process_environment_is_the_default(defaults, environ) -> None:
    code = (
        "import pickle, sys\n"
        "from mlbert.core.config import resolve\n"
        "print(resolve(pickle.load(sys.stdin.buffer), None, {}, [], []).config.train_batch_size)"
    )
    import pickle

    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(defaults),
        capture_output=True,
        env=os.environ | environ | {"BATCHSIZE": "6"},
        check=True,
    )
    assert done.stdout.strip() == b"6"


def _legal_values(name: str) -> st.SearchStrategy[object]:
    """Values that one row allows, by its own limits."""
    row = train_settings()[name]
    limits = row.limits
    if limits.choices:
        values: st.SearchStrategy[object] = st.sampled_from(limits.choices)
    elif row.kind is bool:
        values = st.booleans()
    elif row.kind is int:
        values = st.integers(
            int(limits.at_least) if limits.at_least is not None else -(10**9),
            int(limits.at_most) if limits.at_most is not None else 10**9,
        )
    elif row.kind is float:
        values = st.floats(
            min_value=limits.at_least if limits.at_least is not None else limits.above,
            max_value=limits.at_most if limits.at_most is not None else limits.below,
            exclude_min=limits.above is not None,
            exclude_max=limits.below is not None,
            allow_nan=False,
            allow_infinity=False,
        )
    else:
        letters = st.characters(codec="utf-8", categories=["L", "N", "P"])
        values = st.text(letters, min_size=1).filter(lambda text: text.lower() not in ("none", "null"))
        values = values.map(row.kind)
    return st.one_of(st.none(), values) if row.optional else values


@settings(max_examples=40)
@given(st.fixed_dictionaries({name: _legal_values(name) for name in train_settings()}))
def test_any_legal_configuration_survives_a_round_trip_as_text(values: dict[str, Any]) -> None:
    values |= {"gradient_accumulation_steps": 1, "warmup_proportion": None, "keep_checkpoints": 1}
    values |= {"init_checkpoint": None, "average_packing_rate": 1.0, "bin_counts": None}
    values |= {"warmup_steps": 0, "lr_decay_end": None, "lr_decay_steps": 1, "lr_milestones": "3,9", "lr_gamma": 0.5}
    config = TrainConfig(**values)
    rows = Resolved(config, dict.fromkeys(values, "")).as_table()
    assert resolve({}, {}, {}, [], [f"{name}={text}" for name, text, _, _ in rows]).config == config
    assert resolve({}, {env: text for _, text, env, _ in rows}, {}, [], []).config == config


UNPACKED = {"MAX_SEQUENCES_PER_PACK": "1", "PACKING_FACTOR": "1"}


@pytest.mark.parametrize(
    ("text", "counts"), [("3 2 1 2", (3, 2, 1, 2)), ("8", (8,)), (" 4,4 ", (4, 4)), ("none", None)]
)
def test_numbers_of_the_bins(
    defaults: dict[str, object], environ: dict[str, str], text: str, counts: tuple[int, ...] | None
) -> None:
    config = resolve(defaults, {**environ, **UNPACKED, "BIN_COUNTS": text}, {}, [], []).config
    assert config.counts_of_bins == counts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"BIN_COUNTS": "3 2 1"}, "BIN_COUNTS: '3 2 1' sums to 6, BATCHSIZE is 8"),
        ({"BIN_COUNTS": "8 0"}, "BIN_COUNTS: '8 0' are not whole numbers above 0"),
        ({"BIN_COUNTS": "9 -1"}, "BIN_COUNTS: '9 -1' are not"),
        ({"BIN_COUNTS": "4.0 4"}, "BIN_COUNTS: '4.0 4' are not"),
        ({"BIN_COUNTS": "four"}, "BIN_COUNTS: 'four' are not"),
        ({"BIN_COUNTS": "0_4 4"}, "BIN_COUNTS: '0_4 4' are not"),
        ({"BIN_COUNTS": ","}, "BIN_COUNTS: ',' are not"),
        ({"BIN_COUNTS": "4 4", "MAX_SEQUENCES_PER_PACK": "3"}, "BIN_COUNTS: is set while MAX_SEQUENCES_PER_PACK is 3"),
        ({"BIN_COUNTS": "4 4", "SYNTH_DATA": "1"}, "BIN_COUNTS: is set while SYNTH_DATA is"),
        ({"EXCHANGE_PADDING": "node"}, "off, group, all"),
    ],
)
def test_numbers_of_the_bins_that_do_not_fit(
    defaults: dict[str, object], environ: dict[str, str], changes: dict[str, str], words: str
) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        resolve(defaults, {**environ, **UNPACKED, **changes}, {}, [], [])


def test_gathering_without_exchange_is_odd(defaults: dict[str, object], environ: dict[str, str]) -> None:
    found = {
        over: resolve(defaults, {**environ, "EXCHANGE_BY": "gather", "EXCHANGE_PADDING": over}, {}, [], []).warnings
        for over in ("off", "group")
    }
    assert any("EXCHANGE_PADDING is off" in sentence for sentence in found["off"])
    assert not any("EXCHANGE" in sentence for sentence in found["group"])


@example("average_packing_rate", "0\n")
@given(st.sampled_from(sorted(train_settings())), st.text() | st.floats() | st.integers() | st.booleans())
def test_any_value_is_converted_or_refused_in_one_line(name: str, value: object) -> None:
    row = train_settings()[name]
    try:
        converted = convert(row, value, "test")
    except UserError as error:
        message = str(error)
    else:
        message = ""
        assert (converted is None and row.optional) or isinstance(converted, row.kind)
        assert row.limits.reason_against(converted) is None
    assert "\n" not in message


@settings(max_examples=40)
@given(st.dictionaries(st.text(st.characters(codec="ascii", categories=["L"]), min_size=1), st.integers(), min_size=1))
def test_an_unknown_flag_is_always_named(flags: dict[str, int]) -> None:
    unknown = [name for name in flags if name not in train_settings()]
    if not unknown:
        return
    with pytest.raises(UserError, match="unknown flag"):
        resolve({}, {}, {unknown[0]: "1"}, [], [])

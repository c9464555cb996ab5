"""Nested YAML with words on top: what is read, from where, and what is refused;
durations in every unit to steps.
"""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbert.host.errors import UserError
from mosaic_yaml.common_yaml import COMMON, add_schedule
from mosaic_yaml.durations import Durations
from mosaic_yaml.nested_yaml import Layer, Leaves, read_nested
from user_errors import user_error

KNOWN = [
    "run_name",
    "data",
    "model.name",
    "model.config.**",
    "loader.dataset.local",
    "callbacks.*",
    "tasks.*.seeds",
]
TEXT = """\
run_name: first
data: ./copy
model:
  name: hf_bert
  config: {heads: 2}
loader:
  dataset:
    local: ${data}/x
callbacks:
  lr_monitor: {}
tasks:
  rte:
    seeds: [1, 2]
"""
PLAIN = Durations(sequences_per_step=4096, max_seq_length=128, steps_per_epoch=lambda: 50)
LONG = Durations(
    sequences_per_step=4096, max_seq_length=128, steps_per_epoch=lambda: 50, max_steps=70_000
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (path := tmp_path / "main.yaml").write_text(TEXT, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "dataset",
    [
        "{local: '${data}'}",
        "{local: '${data}/x'}",
        "{local: '${run_name}'}",
        "{local: '${...data}'}",
        "'${model.config}'",
    ],
    ids=["whole", "part", "through another name", "relative", "of a mapping"],
)
def test_a_name_that_is_used_through_another_one_is_read(tmp_path: Path, dataset: str) -> None:
    (path := tmp_path / "main.yaml").write_text(
        "run_name: ${data}\ndata: ./copy\nmodel:\n  name: unused\n  config: {local: '${data}'}\n"
        f"loader:\n  dataset: {dataset}\n",
        encoding="utf-8",
    )
    known = [*(name for name in KNOWN if not name.startswith("model.config")), "model.config.local"]
    leaves = Leaves(path, read_nested(path, [], known))
    assert str(leaves.text("loader.dataset.local", None).value).startswith("./copy")
    unread = leaves.unread()
    assert "data" not in unread
    assert "model.name" in unread


def test_leaves_carry_their_place(path: Path) -> None:
    found = read_nested(path, [], KNOWN)
    assert {name: leaf.value for name, leaf in found.items()} == {
        "run_name": "first",
        "data": "./copy",
        "model.name": "hf_bert",
        "model.config": {"heads": 2},
        "loader.dataset.local": "./copy/x",
        "callbacks.lr_monitor": {},
        "tasks.rte.seeds": [1, 2],
    }
    assert found["loader.dataset.local"].origin.endswith("main.yaml:8")


def test_command_line_words_win_and_reach_interpolations(path: Path) -> None:
    found = read_nested(
        path, ["data=/elsewhere", "model.name=mosaic_bert", "model.config.heads=4"], KNOWN
    )
    assert found["loader.dataset.local"].value == "/elsewhere/x"
    assert (found["model.name"].value, found["model.name"].origin) == (
        "mosaic_bert",
        "argument model.name=",
    )
    assert found["model.config"].value == {"heads": 4}


def test_a_value_has_the_place_where_it_was_given(path: Path) -> None:
    path.write_text("data: a\nrun_name: ${data}\nmodel:\n  name: ${run_name}\n")
    assert read_nested(path, [], KNOWN)["model.name"].origin.endswith("main.yaml:1")
    for word in ("data=[1]", "run_name=[1]"):
        leaves = Leaves(path, read_nested(path, [word], KNOWN))
        with user_error("config.value", f"argument {word.removesuffix('[1]')}"):
            leaves.text("model.name", None)


def test_mistakes_are_named(path: Path) -> None:
    for word, said in {
        "model.nmae=x": "model.nmae is an unknown name. Did you mean model.name?",
        "run_nam=x": "Did you mean run_name?",
        "tasks.rte.seed=x": "tasks.rte.seed is an unknown name",
        "model.name": "is not of the form name=value",
        "data=${nothing}": "cannot be resolved",
        "data=[1": "is not a value for data",
        "data=" + "[" * 99_999 + "]" * 99_999: "nested more than 64 deep",
        f"model.config{'.a' * 5000}=1": "nested more than 64 deep",
        "loader.dataset=[1]": "is not a value for loader.dataset",
        "loader.dataset=5": "loader.dataset is 5, not names with values",
        "model.config=5": "model.config is 5, not names with values",
    }.items():
        with pytest.raises(UserError, match=re.escape(said)) as caught:
            read_nested(path, [word], KNOWN)
        assert "\n" not in str(caught.value)


def test_an_unknown_name_of_the_file_is_named_with_its_line(path: Path) -> None:
    path.write_text(TEXT.replace("  dataset:", "  datasat:"), encoding="utf-8")
    with user_error("config.unknown-name", f"{path}:8") as caught:
        read_nested(path, [], KNOWN)
    assert "loader.dataset.local" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["- a\n- b\n", "a: [1\n", "\x00", "text", "data: " + "[" * 99_999 + "]" * 99_999]
)
def test_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    with user_error("config.file", path):
        read_nested(path, [], KNOWN)


def test_units_and_shares_of_the_training() -> None:
    for text, steps in {"286_720_000sp": 70_000, "3ep": 150, "0.5ep": 25, "1e6tok": 2}.items():
        assert PLAIN.steps("max_duration", text) == steps
    assert [LONG.steps("t_warmup", f"{share}dur", least=0) for share in (0.06, 0)] == [4200, 0]
    with user_error("config.value", "max_duration=0.5dur"):
        PLAIN.steps("max_duration", "0.5dur")


@pytest.mark.parametrize(
    "text", ["", "10", "ba", "-1ba", "1.5", "10 parsecs", "nanba", "0ba", "1e999tok", None]
)
def test_invalid_durations_are_refused(text: object) -> None:
    with pytest.raises(UserError, match="max_duration"):
        PLAIN.steps("max_duration", text)


@given(st.integers(1, 10**9), st.sampled_from(["ba", "sp", "tok"]))
def test_no_duration_is_cut_short(number: int, unit: str) -> None:
    """The steps hold as much as was asked for, and one fewer would not."""
    steps = PLAIN.steps("max_duration", f"{number}{unit}")
    size = {"ba": 1, "sp": 4096, "tok": 4096 * 128}[unit]
    assert (steps - 1) * size < number <= steps * size


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["name=warmup_stable_decay", "t_decay=0tok"],
            {"schedule": "constant", "warmup_steps": 3},
        ),
        (
            ["name=warmup_stable_decay", "t_decay=20ba", "alpha_f=0.5"],
            {"schedule": "wsd", "lr_decay_steps": 20, "end_lr": 0.2, "lr_decay_end": None},
        ),
        (
            ["name=one_minus_sqrt", "t_warmup=0ba", "alpha_f=0.001"],
            {"schedule": "wsd_sqrt", "lr_decay_proportion": 1.0, "end_lr": 4e-4},
        ),
    ],
)
def test_schedules_with_a_plateau(path: Path, words: list[str], expected: dict) -> None:
    given = ["max_duration=100ba", "optimizer.lr=0.4", "scheduler.t_warmup=1_500_000tok"]
    given += [f"scheduler.{word}" for word in words]
    path.write_text("seed: 1\n")
    layer = Layer()
    add_schedule(Leaves(path, read_nested(path, given, COMMON)), layer, PLAIN)
    found = {name: value for name, (value, _) in layer.items() if name in expected}
    assert found == expected
    if expected["schedule"] == "constant":
        assert "end_lr" not in layer

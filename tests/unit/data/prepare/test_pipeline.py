"""The whole preparation: complete, repeatable, honest about options, nothing half-made."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import stored_sets
from mlbert.data.formats.manifest import read_manifest
from mlbert.data.formats.open import check_vocabulary, describe
from mlbert.data.formats.prepared import ShardSet
from mlbert.data.prepare import pipeline
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.instances import InstanceOptions
from mlbert.data.prepare.pipeline import TextOptions, prepare_text
from user_errors import user_error

INSTANCES = InstanceOptions(max_seq_length=32, max_predictions_per_seq=5, dupe_factor=3)
OPTIONS = TextOptions(INSTANCES, vocab_size=300, eval_share=0.2, eval_sequences=60, num_parts=2)
SOURCE = {"kind": "test"}
STEPS = ("train_vocabulary", "make_instances", "_make_evaluation", "_write_baselines")
OTHER = replace(OPTIONS, num_parts=3, split_seed=5)


def documents(count: int = 60) -> list[list[str]]:
    words = ["the", "boat", "river", "stone", "lamp", "runs", "near", "old", "new", "road"]
    rng = np.random.default_rng(0)
    return [[" ".join(rng.choice(words, 9)) + "." for _ in range(6)] for _ in range(count)]


def tree(folder: Path) -> dict[str, str]:
    return {
        name: digest for name, digest in stored_sets.tree(folder).items() if name != "prepared.json"
    }


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("data") / "out"
    prepare_text(documents(), out, OPTIONS, SOURCE)
    return out


@pytest.mark.parametrize("name", ["text/train-00000-of-00009.txt", "vocab.txt", "train/mine"])
def test_files_of_others_are_not_replaced(tmp_path: Path, name: str) -> None:
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    with user_error("file.in-the-way", tmp_path / name.partition("/")[0]):
        prepare_text(documents(), tmp_path, OPTIONS, SOURCE)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]
    assert mine.read_text() == "mine"


def test_everything_is_there(prepared):
    assert sorted(stored_sets.tree(prepared)) == [
        "baselines.json",
        "eval/checksums.xxh3",
        "eval/manifest.json",
        "eval/shard-00000-of-00001.h5",
        "prepared.json",
        "text/eval.txt",
        *(f"text/train-0000{part}-of-00002.txt" for part in range(2)),
        "tokenizer_config.json",
        "train/checksums.xxh3",
        "train/manifest.json",
        *(f"train/shard-0000{part}-of-00002.h5" for part in range(2)),
        "vocab.txt",
    ]
    for side in ("train", "eval"):
        check_vocabulary(describe(prepared / side), prepared / "vocab.txt")
        assert (
            len(ShardSet.open(prepared / side, verify=True))
            == read_manifest(prepared / side).num_sequences
        )
    assert read_manifest(prepared / "eval").num_sequences == 60
    train, held = (
        {
            line
            for path in prepared.glob(f"text/{name}*.txt")
            for line in path.read_text().splitlines()
            if line
        }
        for name in ("train", "eval")
    )
    assert held
    assert not held & train
    assert set(json.loads((prepared / "baselines.json").read_text())) >= {
        "most_frequent_accuracy",
        "bigram_accuracy",
    }


def test_again_and_with_more_workers_the_same(prepared, tmp_path):
    prepare_text(documents(), tmp_path / "again", OPTIONS, SOURCE, executor=Executor(workers=2))
    assert tree(tmp_path / "again") == tree(prepared)


def test_a_finished_folder_is_left_alone_by_other_and_wrong_options_too(prepared, said):
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}
    unread = mock.MagicMock()
    prepare_text(unread, prepared, OPTIONS, SOURCE, executor=Executor(progress=said))
    assert (unread.mock_calls, "nothing to do" in said.lines[0]) == ([], True)
    with user_error("prepare.other-options", prepared):
        prepare_text(documents(), prepared, replace(OPTIONS, vocab_size=400), SOURCE)
    for change, subject in (
        ({"eval_share": 0.0}, "--eval-share"),
        ({"eval_sequences": 0}, "eval_sequences"),
        ({"num_parts": 0}, "num_parts"),
    ):
        with user_error("config.range", subject):
            replace(OPTIONS, **change)
    assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*")} == before


@pytest.mark.parametrize(
    "name", ["baselines.json", "tokenizer_config.json", "vocab.txt", "eval/shard-00000-of-00001.h5"]
)
def test_a_finished_folder_that_is_damaged_is_made_again(prepared, tmp_path, said, name):
    out = Path(shutil.copytree(prepared, tmp_path / "out"))
    stored_sets.flip(out / name, (out / name).stat().st_size - 9)
    prepare_text(documents(), out, OPTIONS, SOURCE, executor=Executor(progress=said))
    assert all(words in said.lines[0] for words in (name, "rebuilding it")), said.lines
    assert tree(out) == tree(prepared)


@pytest.mark.parametrize(
    ("step", "options"), [*((step, OPTIONS) for step in STEPS), (STEPS[-1], OTHER)]
)
def test_an_interrupted_run_ends_up_the_same(prepared, tmp_path, step, options):
    with (
        mock.patch.object(pipeline, step, side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        prepare_text(documents(), tmp_path / "out", options, SOURCE)
    assert not (tmp_path / "out" / "prepared.json").exists()
    prepare_text(documents(), tmp_path / "out", OPTIONS, SOURCE)
    assert tree(tmp_path / "out") == tree(prepared)

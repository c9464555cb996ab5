"""What main.py does with a run that its save_folder already holds:
continue, extend, replace or keep it.
"""

import json
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mosaic_texts import BASE, make_texts
from mosaic_yaml.commands.main_yaml import app
from training_settings import read_metrics, read_summary
from user_errors import user_error

WORDS = (
    *BASE,
    "save_folder=out",
    "save_interval=4ba",
    "eval_interval=100ba",
    "model.name=mosaic_bert",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tree_root: Path) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    make_texts(folder, tree_root)
    return folder


@pytest.fixture
def out(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder next to links to the data, in which main.py runs; returns its save_folder."""
    for path in data.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "out"


def pretrain(*words: str) -> None:
    """Run main.py in this process."""
    assert app(["main.yaml", *WORDS, *words], standalone_mode=False) == 0


def steps_saved(out: Path) -> list[int]:
    return sorted(int(path.name[-8:]) for path in (out / "run_0/checkpoints").iterdir())


def content(out: Path) -> dict[str, bytes]:
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name != "settings.txt"
    }


def interrupt(out: Path) -> None:
    """Make a finished run look as if it had been killed after its last checkpoint."""
    (out / "run_0/summary.json").unlink()


def test_a_finished_run_is_extended_by_a_longer_duration(out: Path, capsys) -> None:
    """Also with shares of the training in the schedule; the result is that of one run."""
    schedule = ["scheduler.t_warmup=0.5dur", "seed=3", "autoresume=true"]
    pretrain("max_duration=6ba", *schedule)
    assert steps_saved(out) == [4, 6], "the last step has a checkpoint, as in Composer"
    before = content(out)
    with user_error("run.exists", "run_0"):
        pretrain("max_duration=6ba", *schedule)
    with user_error("run.other-settings", "step_00000006"):
        pretrain("max_duration=8ba", *schedule, "optimizer.lr=0.5")
    assert content(out) == before, "nothing of a run that is kept has changed"
    capsys.readouterr()
    pretrain("max_duration=10ba", *schedule, "device_train_microbatch_size=4")
    assert "resumed at step 6" in capsys.readouterr().out
    assert read_summary(out)["steps"] == 10
    assert [line["step"] for line in read_metrics(out)] == [*range(1, 11)]
    assert steps_saved(out) == [4, 6, 8, 10]
    assert (out / "result_0.part1.txt").read_bytes() == before["result_0.txt"]


def test_wsd_is_extended_with_its_shares(out: Path) -> None:
    for duration in ("max_duration=4ba", "max_duration=8ba"):
        pretrain(duration, "scheduler.name=warmup_stable_decay", "scheduler.t_warmup=0.1dur")
    assert read_summary(out)["steps"] == 8


def test_without_autoresume_a_run_is_kept_or_replaced(out: Path, capsys) -> None:
    pretrain("max_duration=6ba", "seed=1")
    before = content(out)
    weights = out / "run_0/weights/model.safetensors"
    old = load_file(weights)
    for is_finished in (True, False):
        with user_error("run.exists", "run_0"):
            pretrain("max_duration=20ba", "autoresume=false")
        with user_error("config.conflict", "argument save_overwrite="):
            pretrain("max_duration=20ba", "autoresume=true", "save_overwrite=true")
        assert content(out) == before
        if is_finished:
            interrupt(out)
            del before["run_0/summary.json"]
    mine = out / "run_0/notes.txt"
    mine.write_text("mine")
    other = out / "result_0.part9.txt"
    other.write_text("not a log")
    part = out / "result_0.part2.txt"
    part.write_text(":::MLLOG {}")
    capsys.readouterr()
    pretrain("max_duration=3ba", "seed=2", "autoresume=false", "save_overwrite=true")
    assert "resumed" not in capsys.readouterr().out
    assert steps_saved(out) == [3], "no later checkpoint of the old run"
    assert read_summary(out)["steps"] == 3
    assert [line["step"] for line in read_metrics(out)] == [1, 2, 3]
    assert any((old[name] != tensor).any() for name, tensor in load_file(weights).items())
    assert (mine.read_text(), other.read_text()) == ("mine", "not a log")
    assert not part.exists()
    pretrain("max_duration=2ba", "save_overwrite=true")  # also a finished one
    assert steps_saved(out) == [2]


@pytest.mark.parametrize("mark", ["none", "other", "link"])
def test_what_is_not_ours_is_never_replaced(out: Path, mark: str) -> None:
    pretrain("max_duration=2ba")
    foreign = out / "run_0/checkpoints/step_00000001"
    if mark == "link":
        foreign.symlink_to(out / "run_0/checkpoints/step_00000002")
    else:
        foreign.mkdir()
        (foreign / "thesis.txt").write_text("mine")
        if mark == "other":
            (foreign / "state.json").write_text(json.dumps({"format": "theirs"}))
    before = content(out)
    with user_error("file.in-the-way", "step_00000001"):
        pretrain("max_duration=2ba", "save_overwrite=true")
    after = content(out)
    assert {name: after[name] for name in before if "run_0" in name} == {
        name: text for name, text in before.items() if "run_0" in name
    }
    assert os.path.lexists(foreign)


def test_an_interrupted_run_continues_but_not_beyond_max_duration(out: Path, capsys) -> None:
    pretrain("max_duration=6ba")
    interrupt(out)
    before = content(out)
    with user_error("run.other-settings", "run_0"):
        pretrain("max_duration=5ba")
    assert content(out) == before
    capsys.readouterr()
    pretrain("max_duration=6ba")
    assert "resumed at step 6" in capsys.readouterr().out
    assert read_summary(out)["steps"] == 6


def test_no_checkpoint_is_kept_if_none_is_asked_for(out: Path) -> None:
    pretrain("max_duration=2ba", "save_num_checkpoints_to_keep=0")
    assert not (out / "run_0/checkpoints").exists()
    with user_error("run.exists", "run_0"):
        pretrain("max_duration=4ba")
    pretrain("max_duration=1ba", "save_overwrite=true")
    assert steps_saved(out) == [1]

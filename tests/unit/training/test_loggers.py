"""TensorBoard and W&B get the numbers of a run, read back by their own readers."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mlbert.runs.config import RunConfig
from mlbert.runs.progress import RunOutcome, TrainState
from mlbert.training.loggers import make_loggers
from training_settings import run
from user_errors import user_error

STATE = TrainState(step=3, samples=30, tokens=900, flops=10**9, train_seconds=2.0)


@pytest.fixture(autouse=True)
def _no_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TensorBoard do without TensorFlow, which takes seconds to import."""
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", ModuleType("notf"))


def found(tmp_path: Path, **settings: object) -> None:
    names = ("tensorboard_dir", "wandb_project", "mlflow_experiment")
    defaults = {**dict.fromkeys(names), "run_name": "mine"}
    config = SimpleNamespace(**defaults | settings)
    loggers = make_loggers(
        config, {"config": {"lr": 1}}, tmp_path, "decoupled_adamw", 2, lambda: 1e9
    )
    for logger in loggers:
        logger.step(STATE, 1.5, 1e-3, 0.25)
        logger.evaluation(STATE, {"mlm_accuracy": 0.5, "loss": 2.0}, 1.0)
        logger.stop(RunOutcome("success", "", 1.0, STATE))
    assert len(loggers) == sum(value is not None for value in settings.values())


def read_events(folder: Path) -> Any:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return accumulator.EventAccumulator(str(folder)).Reload()


def test_tensorboard_holds_speed_and_metrics(tmp_path):
    found(tmp_path, tensorboard_dir=tmp_path / "events")
    events = read_events(tmp_path / "events/mine")
    numbers = {name: events.Scalars(name)[0] for name in events.Tags()["scalars"]}
    assert numbers["loss/train/total"].value == 1.5
    assert numbers["throughput/samples_per_sec"].value == 15.0
    # 1e9 in 2 s on 2 ranks of 1e9 a second.
    assert numbers["throughput/device/mfu"].value == pytest.approx(0.25)
    assert numbers["metrics/eval/MaskedAccuracy"].value == 0.5
    assert {number.step for number in numbers.values()} == {3}


def test_both_loggers_get_the_numbers(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    words = {"max_steps": 3, "tensorboard_dir": tmp_path / "events", "wandb_project": "bert"}
    words["wandb_options"] = '{"group": "chosen group"}'
    run(tmp_path, **words)
    events = read_events(tmp_path / "events/run_0")
    assert [point.step for point in events.Scalars("loss/train/total")] == [1, 2, 3]
    assert [point.step for point in events.Scalars("metrics/eval/MaskedAccuracy")] == [3]
    (file,) = tmp_path.glob("out/run_0/wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    assert b"metrics/eval/MaskedAccuracy" in content
    assert b"throughput/device/mfu" in content
    assert b"chosen group" in content
    for options in ("{", '{"no_such_argument": 1}'):
        with user_error("config.value", "WANDB_OPTIONS", wording=False):  # of json and of wandb
            found(tmp_path, wandb_project="bert", wandb_options=options)


def test_nothing_is_written_unasked_and_an_unusable_folder_is_one_line(tmp_path):
    found(tmp_path)
    assert not any(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with user_error("file.unwritable", "TENSORBOARD_DIR"):
        found(tmp_path, tensorboard_dir=tmp_path / "file")


@pytest.mark.parametrize(
    "options",
    [
        '{"api_key": "s3cr3t"}',
        '{"settings": {"api_key": "s3cr3t"}}',
        '{"config": {"HF_TOKEN": "s3cr3t"}}',
        '{"notes": "x", "password" : "s3cr3t"}',
        "{access-token: s3cr3t",
    ],
)
def test_secrets_in_options_are_refused_and_not_shown(tmp_path, options, capsys):
    assert run(tmp_path, wandb_options=options) == 2
    printed = "".join(capsys.readouterr())
    assert "WANDB_OPTIONS" in printed
    assert "s3cr3t" not in printed
    assert not (tmp_path / "out").exists()
    resembling = '{"config": {"max_tokens": 5, "tokenizer": "bert"}, "notes": "token"}'
    needed = {"recipe": "packed_lamb", "output_dir": Path("x"), "max_samples_termination": 1}
    assert not [*RunConfig(**needed, wandb_options=resembling).contradictions()]


@pytest.mark.slow
def test_mlflow_has_the_numbers_and_the_configuration(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    before = mlflow.get_tracking_uri()
    try:
        found(tmp_path, mlflow_experiment="bert")
        client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
        (run_of_mlflow,) = client.search_runs([client.get_experiment_by_name("bert").experiment_id])
        assert run_of_mlflow.info.run_name == "mine"
        assert run_of_mlflow.info.status == "FINISHED"
        number = run_of_mlflow.info.run_id
        (point,) = client.get_metric_history(number, "loss/train/total")
        assert (point.step, point.value) == (3, 1.5)
        assert run_of_mlflow.data.metrics["metrics/eval/MaskedAccuracy"] == 0.5
        assert run_of_mlflow.data.params == {"lr": "1"}
    finally:
        mlflow.set_tracking_uri(before)

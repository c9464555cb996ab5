"""Whole runs on generated tokens: the log, the run folder, determinism, resume, aborts,
bad input, graphs.
"""

import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import interrupted_runs
from audit import errors
from capturable import SHAPE, TensorLamb, select_capturable
from file_limits import largest_file
from mlbert.data.batches import StaticShape
from mlbert.data.formats.manifest import read_manifest
from mlbert.data.formats.tokenizer import lower_cases
from mlbert.data.loading.synthetic import SyntheticSource
from mlbert.distributed.capture import NoCapture
from mlbert.host import machine
from mlbert.host.errors import UserError
from mlbert.models.bert import BertForPreTraining
from mlbert.models.weights.load import open_saved
from mlbert.ops import api as ops
from mlbert.recipes import assembly
from mlbert.recipes.sections import settings_by_key
from mlbert.training import experiment, loop
from mlbert.training.checkpoint import CheckpointFolder
from mlbert.training.protocols import Method
from mlbert.training.step import GraphMode, Graphs, choose_graphs
from programs import wait_for
from recorded_graph import RecordedGraph
from training_settings import read_metrics, read_summary, run, train
from user_errors import assert_error_line, user_error

STEPS = 100  # so that a signal comes before the last one
CHANGES = {
    "no train": lambda state: state.pop("train"),
    "a text": lambda state: state["train"].update(step="2"),
    "no source": lambda state: state.pop("source"),
    "a list for the source": lambda state: state.update(source=[]),
    "no numbers of the optimizer": lambda state: state.update(optimizer={}),
    "another seed": lambda state: state.update(seed=6),
    "no seed": lambda state: state.pop("seed"),
}
IN_THE_WAY = {
    "result_0.txt": [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/full")],
    "run_0/metrics.jsonl": [os.mkfifo, os.mkdir],
    "run_0/config.json": [os.mkfifo],
    "run_0/curve.png": [os.mkdir],
    "run_0/weights": [os.mkfifo],
    "run_0/huggingface": [lambda path: path.write_text("x")],
    "run_0/checkpoints": [os.mkfifo],
}
CUDA = torch.device("cuda")
BUDGET = StaticShape(128, 3, 16, 64, has_labels=False)


def events(log: Path):
    lines = [line for line in log.read_text().splitlines() if line.startswith(":::MLLOG")]
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


def config_of(folder: Path):
    return json.loads((folder / "run_0/config.json").read_text())


def weights(folder: Path):
    return (folder / "run_0" / "weights" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the LOGDIR of a run with one checkpoint."""
    folder = tmp_path_factory.mktemp("finished")
    assert run(folder, save_checkpoint_steps=6) == 1
    return folder / "out"


def test_a_run_leaves_everything_behind(finished):
    folder = finished / "run_0"
    files = {"settings.txt", "config.json", "metrics.jsonl", "curve.png", "summary.json"}
    assert {path.name for path in folder.iterdir()} == files | {
        "checkpoints",
        "weights",
        "huggingface",
    }
    assert [line["step"] for line in read_metrics(finished)] == list(range(1, 13))
    assert (
        json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["kind"] == "evaluation"
    )
    summary = read_summary(finished)
    assert (summary["status"], summary["steps"]) == ("aborted", 12)
    assert 0 < summary["share_of_gemm_peak"] < 1
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (config_of(finished)["config"]["learning_rate"], config_of(finished)["seed"]) == (
        0.01,
        5,
    )
    modes = {path.stat().st_mode & 0o777 for path in finished.rglob("*") if path.is_file()}
    assert modes == {(folder / "config.json").stat().st_mode & 0o777}, (
        "weights are readable like any file"
    )


def test_the_log_has_the_events_in_order(finished):
    log = events(finished / "result_0.txt")
    keys = [event["key"] for event in log]
    order = [
        "cache_clear",
        "init_start",
        "seed",
        "global_batch_size",
        "init_stop",
        "run_start",
        "epoch_start",
    ]
    order += ["block_start", "eval_start", "eval_stop", "eval_accuracy", "block_stop", "epoch_stop"]
    order += ["train_samples", "eval_samples", "run_stop"]
    assert [key for key in keys if key in order] == order
    values = {event["key"]: event["value"] for event in log}
    assert values["global_batch_size"] == 6
    assert values["opt_epsilon"] == values["opt_lamb_epsilon"] == 1e-6
    assert (values["steps"], values["skipped_steps"], values["max_steps"]) == (12, 0, 12)
    assert (values["max_sequence_length"], values["threads_per_rank"], values["gpus"]) == (
        64,
        1,
        {},
    )
    assert values["starting_weights"] == values["starting_weights_sha256"] == "none"
    assert (values["nodes"], len(values["hosts"])) == (1, 1)
    assert set(values["native_libraries"]) >= {"ops"}
    assert all(len(digest) == 64 for digest in values["native_libraries"].values())
    summary = read_summary(finished)
    assert {
        key: values[key] for key in ("steps", "skipped_steps", "tokens")
    }.items() <= summary.items()
    assert summary["sequences_per_pack"] == pytest.approx(
        values["train_samples"] / (12 * 4), abs=1e-4
    )
    record = config_of(finished)
    logged = {name: values["configuration"][row.env] for name, row in settings_by_key().items()}
    assert record["config"] == {name: setting["value"] for name, setting in logged.items()}
    assert record["origin"] == {name: setting["origin"] for name, setting in logged.items()}
    assert record["provenance"].items() <= values.items()
    accuracy = next(event for event in log if event["key"] == "eval_accuracy")
    assert accuracy["metadata"]["epoch_num"] == values["train_samples"]
    times = [event["time_ms"] for event in log]
    assert times == sorted(times)
    assert (log[-1]["key"], log[-1]["metadata"]["status"]) == ("run_stop", "aborted")
    assert errors(finished / "result_0.txt") == {"status"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run(folder, max_steps=STEPS) == 1
    return folder / "out"


def test_killed_and_resumed_ends_with_the_same_weights(tmp_path, undisturbed):
    at = random.randrange(3, 20)
    interrupted_runs.train(
        tmp_path, "out", signal.SIGKILL, at, max_steps=STEPS, save_checkpoint_steps=1, log_freq=1
    )
    assert not (tmp_path / "out/run_0/summary.json").exists()
    assert run(tmp_path, max_steps=STEPS) == 2, "an unfinished run is not overwritten"
    assert run(tmp_path, max_steps=STEPS, resume=1) == 1
    assert weights(tmp_path / "out") == weights(undisturbed)
    assert [m["step"] for m in read_metrics(tmp_path / "out")] == list(range(1, STEPS + 1))
    log = events(tmp_path / "out/result_0.txt")
    assert at - 1 <= next(e["value"] for e in log if e["key"] == "resumed_from_step") <= at
    assert (tmp_path / "out/result_0.part1.txt").exists()


def test_a_warned_run_leaves_a_checkpoint_and_continues_exactly(tmp_path, undisturbed, capsys):
    """SIGUSR1: the step is finished and a checkpoint written, although none is configured."""
    options = {"max_steps": STEPS, "save_checkpoint_steps": 0}
    assert (
        interrupted_runs.train(tmp_path, "out", signal.SIGUSR1, 3, **options)
        == 128 + signal.SIGUSR1
    )
    assert '"reason": "SIGUSR1", "status": "aborted"' in (tmp_path / "out/result_0.txt").read_text()
    (checkpoint,) = (tmp_path / "out/run_0/checkpoints").glob("step_*")
    assert not (tmp_path / "out/run_0/summary.json").exists()
    assert run(tmp_path, max_steps=STEPS, resume=1) == 1
    assert (
        f"resumed at step {int(checkpoint.name.removeprefix('step_'))}" in capsys.readouterr().out
    )
    assert weights(tmp_path / "out") == weights(undisturbed)


def test_the_clock_stops_before_the_last_checkpoint_is_written(tmp_path, monkeypatch):
    save = CheckpointFolder.save
    log = tmp_path / "out/result_0.txt"

    def save_late(*arguments):
        wait_for(lambda: '"run_stop"' in log.read_text())
        return save(*arguments)

    monkeypatch.setattr(CheckpointFolder, "save", save_late)
    assert run(tmp_path, save_checkpoint_steps=8) == 1
    assert (tmp_path / "out/run_0/checkpoints/step_00000008/state.json").exists()


def test_a_log_that_fills_the_disk_fails_the_run(tmp_path, capsys):
    settings = {
        "max_steps": 400,
        "eval_iter_start_samples": 1,
        "eval_iter_samples": 1,
        "num_eval_examples": 4,
    }
    with largest_file(60_000):  # of all files only the log grows beyond it
        assert run(tmp_path, **settings, log_freq=0, shape={"vocab_size": 8, "hidden_size": 8}) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "out/result_0.txt: cannot be written (File too large)" in error
    assert not (tmp_path / "out/run_0/summary.json").exists()


def test_a_run_fails_if_the_checksums_turn_out_wrong_after_its_last_step(
    tmp_path, monkeypatch, capsys
):
    wrong = UserError("data.checksum", "shard", "its checksum differs")
    monkeypatch.setattr(SyntheticSource, "finish", Mock(side_effect=wrong))
    assert run(tmp_path, max_steps=2, target_mlm_accuracy="none") == 2
    assert "shard: its checksum differs" in capsys.readouterr().err
    assert events(tmp_path / "out/result_0.txt")[-1]["metadata"]["status"] == "aborted"
    assert not (tmp_path / "out/run_0/summary.json").exists()


def settings_of(data, **shape):
    shape = {"vocab_size": read_manifest(data / "train").vocab_size, **shape}
    folders = {"input_dir": data / "train", "eval_dir": data / "eval"}
    return {"synthetic_data": 0, **folders, "num_eval_examples": 8, "shape": shape}


def test_an_evaluation_on_the_training_set_is_reported(tmp_path, capsys, prepared_data):
    settings = settings_of(prepared_data) | {"max_steps": 1, "eval_dir": prepared_data / "train"}
    assert run(tmp_path, **settings) == 1
    assert "train is the training set" in capsys.readouterr().out


def make_infinite(parameter):
    parameter.grad.fill_(float("inf"))


def with_bad_gradients(monkeypatch, late, steps):
    """Make the gradients of some steps infinite, and return the list of steps that ran.

    ``late``: finish each step after the next one is queued, as on a GPU.
    """
    taken = []
    train = loop.train
    one_step = loop.train_one_step

    def poisoned(run, clock):
        pooler = run.method.model.bert.pooler.dense.bias
        step = run.state.step
        hook = None
        if step in steps:
            hook = pooler.register_post_accumulate_grad_hook(make_infinite)
        before = run.method.flat.data.clone()
        leaving = one_step(run, clock)
        if hook:
            hook.remove()
            assert torch.equal(run.method.flat.data, before)
        taken.append(step)
        return leaving

    monkeypatch.setattr(loop, "train_one_step", poisoned)
    monkeypatch.setattr(
        experiment, "train", lambda run: train(dataclasses.replace(run, finalize_late=late))
    )
    return taken


@pytest.mark.parametrize("late", [False, True])
def test_non_finite_gradients_are_skipped_counted_and_end_the_run(tmp_path, monkeypatch, late):
    taken = with_bad_gradients(monkeypatch, late, {1, 2, 3})
    assert run(tmp_path, max_skipped_steps=2, log_freq=0) == 1
    summary = read_summary(tmp_path / "out")
    assert summary["skipped_steps"] == 3
    assert "non-finite" in summary["reason"]
    assert summary["steps"] == len(taken) == (5 if late else 4)
    assert [line["step"] for line in read_metrics(tmp_path / "out", "skipped")] == [2, 3, 4]


def test_asking_late_for_results_changes_no_number(tmp_path, monkeypatch):
    """The second and the last step are skipped; samples decide when evaluation
    and the end are due.
    """
    summaries = []
    for late in (False, True):
        folder = tmp_path / f"late{late}"
        with monkeypatch.context() as patch:
            with_bad_gradients(patch, late, {1, 7})
            every = {"eval_iter_start_samples": 12, "eval_iter_samples": 12}
            assert run(tmp_path, folder.name, max_steps=8, log_freq=0, **every) == 1
        evaluations = [
            (line["samples"], line["eval_loss"]) for line in read_metrics(folder, "evaluation")
        ]
        summary = read_summary(folder)
        summaries.append(
            [summary[key] for key in ("samples", "steps", "skipped_steps", "accuracy")]
            + evaluations
        )
        assert "evaluations" not in errors(folder / "result_0.txt"), "they are due every 12 samples"
    assert summaries[0] == summaries[1]
    assert summaries[0][2] == 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"bert_config_file": "/nowhere/bert_config.json"}, "/nowhere/bert_config.json"),
        ({"output_dir": "/proc/out"}, "/proc/out"),
        *[({"cuda_graph_mode": "segmented"}, "PyTorch finds none")]
        * (not torch.cuda.is_available()),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(tmp_path, capsys, changes, named):
    assert run(tmp_path, **changes) == 2
    printed, error = capsys.readouterr()
    assert error.startswith("mlbert: error: ")
    assert error.count("\n") == 1
    assert named in error
    assert "settings:" not in printed


def test_the_screen_shows_what_differs_and_a_file_shows_all(tmp_path, capsys):
    assert run(tmp_path, max_steps=1) == 1
    printed = capsys.readouterr().out.splitlines()
    table = tmp_path / "out/run_0/settings.txt"
    (line,) = [line for line in printed if line.startswith("settings: ")]
    text = table.read_text().splitlines()
    changed = [one.removeprefix("#   ") for one in text if one.startswith("#   ")]
    assert line == f"settings: {len(changed)} differ from the defaults of packed_lamb, see {table}"
    assert "MAX_STEPS=1" in changed
    assert not [change for change in changed if change.startswith(("END_LR=", "OPTIMIZER="))]
    lines = [one for one in text if not one.startswith("#")]
    assert [line.partition("=")[0] for line in lines] == [
        one.env for one in settings_by_key().values()
    ]
    assert "MAX_STEPS=1  (max_steps, flag --max-steps)" in lines
    assert not {line.partition("=")[0] for line in printed if "  (" in line} & {
        "END_LR",
        "MAX_STEPS",
    }


def test_a_run_is_continued_with_its_seed_and_by_its_method_only(tmp_path, capsys):
    started = {"max_steps": 2, "save_checkpoint_steps": 1, "seed": "none"}
    assert run(tmp_path, **started) == 1
    (
        tmp_path / "out/run_0/summary.json"
    ).unlink()  # as if it had been killed after its last checkpoint
    before = (tmp_path / "out/result_0.txt").read_bytes()
    drawn = config_of(tmp_path / "out")["seed"]
    for changed, words in (
        ({"learning_rate": 0.5}, "LR is 0.01 there and 0.5 here"),
        ({"weight_decay_rate": 0.5}, "WEIGHT_DECAY_RATE is 0.01 there and 0.5 here"),
        ({"warmup_steps": 1}, "WARMUP_STEPS is 0 there and 1 here"),
        ({"warmup_proportion": 0.5}, "WARMUP_PROPORTION is None there and 0.5 here"),
        ({"lr_decay_end": 1}, "LR_DECAY_END is None there and 1 here"),
        ({"gradient_reduction": "bf16"}, "GRADIENT_REDUCTION is 'fp32' there and 'bf16' here"),
        ({"precision": "bf16"}, "PRECISION is 'fp32' there and 'bf16' here"),
        ({"shape": {"hidden_size": 16}}, "belongs to a different run: model"),
    ):
        assert run(tmp_path, **started | changed, resume=1) == 2
        assert words in capsys.readouterr().err
    assert (tmp_path / "out/result_0.txt").read_bytes() == before
    assert run(tmp_path, **started, resume=1) == 1
    assert (tmp_path / "out/result_0.part1.txt").read_bytes() == before
    assert [
        event["value"] for event in events(tmp_path / "out/result_0.txt") if event["key"] == "seed"
    ] == [drawn]


def test_weights_keep_the_case_of_the_training_set_and_its_vocabulary(
    tmp_path, prepared_data, capsys
):
    data = shutil.copytree(prepared_data, tmp_path / "data")
    manifest = json.loads((data / "train/manifest.json").read_text())
    manifest["provenance"]["options"]["lower_case"] = False
    (data / "train/manifest.json").write_text(json.dumps(manifest))
    (data / "tokenizer_config.json").unlink()
    assert run(tmp_path, max_steps=2, save_checkpoint_steps=1, **settings_of(data)) == 1
    assert "is the training set" not in capsys.readouterr().out
    for name in ("weights", "huggingface"):
        assert not lower_cases(tmp_path / "out/run_0" / name / "vocab.txt")
    (checkpoint,) = (tmp_path / "out/run_0/checkpoints").glob("step_*")
    assert open_saved(checkpoint)[2:] == (data / "vocab.txt", False)
    with (data / "vocab.txt").open("a") as vocabulary:
        vocabulary.write("another\n")
    assert run(tmp_path, "other", **settings_of(data)) == 2
    assert "vocab.txt" in capsys.readouterr().err


def test_memory_stays_flat(tmp_path):
    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    assert run(tmp_path, "warm", max_steps=50) == 1
    before = resident_bytes()
    assert run(tmp_path, "long", max_steps=250, log_freq=0) == 1
    assert resident_bytes() - before < 10e6


def test_resuming_from_nothing_is_reported_and_a_foreign_record_is_refused(tmp_path, capfd):
    """Only a run that made steps needs RESUME; the log of an attempt without any is just set
    aside.
    """
    assert run(tmp_path, max_steps=3, save_checkpoint_steps=2, resume=1) == 1
    assert "warning: RESUME=1, but " in capfd.readouterr().out
    assert run(tmp_path, max_steps=3) == 2
    assert "contains a finished run" in capfd.readouterr().err
    folder = tmp_path / "out" / "run_0"
    (folder / "summary.json").unlink()
    assert run(tmp_path, max_steps=3) == 2
    assert "is the log of an unfinished run" in capfd.readouterr().err
    (state,) = (folder / "checkpoints").glob("*/state.json")
    whole = state.read_text()
    for name, change in CHANGES.items():
        record = json.loads(whole)
        change(record["state"])
        del record["record_sha256"]
        digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
        state.write_text(json.dumps({**record, "record_sha256": digest}))
        assert run(tmp_path, max_steps=3, resume=1) == 2, name
        error = capfd.readouterr().err
        assert error.count("\n") == 1, error
        assert "step_00000002: " in error
    shutil.rmtree(folder)
    assert run(tmp_path, max_steps=1) == 1
    assert len(list((tmp_path / "out").glob("result_0.part*.txt"))) == len(CHANGES)


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ({"max_steps": 4}, "MAX_STEPS 4 reached"),
        ({"max_samples_termination": 3}, "MAX_SAMPLES_TERMINATION 3 reached"),
        ({"max_seconds": 1e-6}, "MAX_SECONDS 1e-06 reached"),
    ],
    ids=["steps", "samples", "seconds"],
)
def test_a_run_resumed_at_its_limit_trains_no_step(tmp_path, capsys, limit, reason):
    """It evaluates the checkpoint's weights, writes the results,
    and ends as if it had just reached the limit.
    """
    settings = {
        "target_mlm_accuracy": "none",
        "save_checkpoint_steps": 4,
        "num_eval_examples": 8,
        "schedule": "constant",
    }
    assert run(tmp_path, max_steps=6, **settings) == 0
    folder = tmp_path / "out/run_0"
    checkpoint = (folder / "checkpoints/step_00000004").stat().st_mtime_ns
    (folder / "summary.json").unlink()  # as if it had been killed after its checkpoint
    capsys.readouterr()
    assert run(tmp_path, **{"max_steps": 6} | settings | limit, resume=1) == 0
    assert f"success: {reason}" in capsys.readouterr().out
    assert read_summary(tmp_path / "out")["steps"] == 4
    assert [line["step"] for line in read_metrics(tmp_path / "out")] == [1, 2, 3, 4]
    assert [line["step"] for line in read_metrics(tmp_path / "out", "evaluation")] == [4]
    assert (folder / "checkpoints/step_00000004").stat().st_mtime_ns == checkpoint
    keys = [event["key"] for event in events(tmp_path / "out/result_0.txt")]
    assert keys.count("eval_accuracy") == 1
    assert keys[-1] == "run_stop"
    assert run(tmp_path, "whole", max_steps=4, **settings) == 0
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")


def test_a_schedule_that_ends_before_the_checkpoint_is_refused(tmp_path, capsys):
    settings = {"save_checkpoint_steps": 4, "eval_iter_start_samples": 1000000}
    assert run(tmp_path, max_steps=6, **settings) == 1
    folder = tmp_path / "out/run_0"
    (folder / "summary.json").unlink()
    capsys.readouterr()
    assert run(tmp_path, max_steps=3, **settings, resume=1) == 2
    assert_error_line(capsys.readouterr().err, "run.other-settings", "MAX_STEPS 3")
    assert (folder / "checkpoints/step_00000004").is_dir()
    assert run(tmp_path, max_steps=6, **settings, resume=1) == 1


@pytest.mark.parametrize("resume", [0, 1])
@pytest.mark.parametrize("name", IN_THE_WAY)
def test_existing_files_are_reported_before_training(tmp_path, capfd, name, resume):
    for number, make in enumerate(IN_THE_WAY[name]):
        path = tmp_path / str(number) / name
        path.parent.mkdir(parents=True)
        if "run_0" not in name:
            (path.parent / "run_0").mkdir()
        make(path)
        assert run(tmp_path, str(number), max_steps=1, resume=resume) == 2
        error = capfd.readouterr().err
        assert error.count("\n") == 1, error
        assert error.startswith(f"mlbert: error: {path}: is in the way")


pytestmark = pytest.mark.usefixtures("restore_selection")


@pytest.fixture
def graphed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A run on the CPU with ops and an optimizer that can be recorded; returns its folder."""

    def start(name: str, mode: str, capture: type = RecordedGraph) -> Path:
        def choose(mode: str, method: Method, micro_batches: int, *_: object) -> Graphs | None:
            select_capturable()
            return (
                Graphs(GraphMode(mode), method.static_shape, micro_batches, capture)
                if mode != "none"
                else None
            )

        monkeypatch.setattr(experiment, "check_device", lambda *_: None)
        monkeypatch.setattr(experiment, "choose_graphs", choose)
        monkeypatch.setattr(
            assembly, "make_optimizer", lambda config, flat, *others: TensorLamb(flat)
        )
        train(tmp_path, name, ops="plain", cuda_graph_mode=mode, max_steps=4)
        return tmp_path / name

    return start


def numbers(folder: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_metrics(folder)]


@pytest.mark.parametrize("mode", ["segmented", "full_iteration"])
def test_a_graphed_run_equals_one_without_graphs(graphed, mode, capsys):
    """Bit for bit; batches are filled up in both."""
    replayed = graphed("replayed", mode)
    printed = capsys.readouterr().out
    assert f"CUDA graphs: {mode}" in printed
    assert "without a graph" not in printed
    called = graphed("called", mode, NoCapture)
    assert numbers(replayed) == numbers(called)
    assert weights(replayed) == weights(called)


def test_a_batch_over_the_budget_runs_without_a_graph(graphed, monkeypatch, capsys):
    monkeypatch.setattr(assembly, "budget_of", lambda *_: BUDGET)
    replayed = graphed("replayed", "segmented")
    assert (
        capsys.readouterr().out.count("step 1 runs without a graph: a batch exceeds StaticShape(")
        == 1
    )
    assert numbers(replayed) == numbers(graphed("plain", "none"))


def method(obstacle=None, static_shape=BUDGET, can_capture=True) -> SimpleNamespace:
    model = SimpleNamespace(capture_obstacle=lambda device, max_seqlen: obstacle)
    optimizer = SimpleNamespace(can_capture=can_capture, implementation="plain")
    return SimpleNamespace(model=model, static_shape=static_shape, optimizer=optimizer)


def test_graphs_need_supported_ops():
    assert choose_graphs("none", method("anything", None, False), 1, CUDA, 2) is None
    assert choose_graphs("segmented", method(can_capture=False), 2, CUDA, 2).micro_batches == 2
    assert choose_graphs("segmented", method(), 1, CUDA, 2).smaller == (), "packs"
    lone = StaticShape.of_packs(8, 64, 1, 64, 10)
    assert (
        choose_graphs("segmented", method(static_shape=lone), 1, CUDA, 2).smaller
        == lone.smaller_ones()
        != ()
    )
    assert (
        choose_graphs("full_iteration", method(static_shape=lone), 1, CUDA, 1).smaller
        == lone.smaller_ones()
    )
    for mode, wanting in (
        ("segmented", method("attention reads on the host")),
        ("segmented", method(static_shape=None)),
        ("full_iteration", method(can_capture=False)),
        ("full_iteration", method(static_shape=lone)),
    ):
        with user_error("config.conflict", f"CUDA_GRAPH_MODE={mode}"):
            choose_graphs(mode, wanting, 1, CUDA, 2)
    ops.select("plain")
    assert "on the host" in BertForPreTraining(SHAPE).capture_obstacle(torch.device("cpu"), 8)


def test_a_busy_machine_trains_on_the_free_cores_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(machine, "free_cores", lambda: 1)
    run(tmp_path, max_steps=1, cpu_threads="none")
    words = "Other programs use some of the 3 cores: using 1 thread. CPU_THREADS sets a different"
    assert words in " ".join(capsys.readouterr().out.split())

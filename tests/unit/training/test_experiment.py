"""Whole runs on generated tokens: the log, the run folder, determinism, exact resume, aborted runs, bad input."""

import dataclasses
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import interrupted_runs
from audit import errors
from file_limits import largest_file
from mlbert.config.sections import settings_by_key
from mlbert.data.formats.manifest import read_manifest
from mlbert.data.formats.tokenizer import lower_cases
from mlbert.data.loading.synthetic import SyntheticSource
from mlbert.data.prepare.tfrecords import hdf5_to_tfrecords
from mlbert.host.errors import UserError
from mlbert.models.weights.load import open_saved
from mlbert.training import experiment, loop
from mlbert.training.checkpoint import CheckpointFolder
from training_settings import read_metrics, read_summary, run

STEPS = 100  # so that a signal comes before the last one


def events(log: Path):
    lines = [line for line in log.read_text().splitlines() if line.startswith(":::MLLOG")]
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


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
    assert {path.name for path in folder.iterdir()} == files | {"checkpoints", "weights", "huggingface"}
    assert [line["step"] for line in read_metrics(finished)] == list(range(1, 13))
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["kind"] == "evaluation"
    summary = read_summary(finished)
    assert (summary["status"], summary["steps"]) == ("aborted", 12)
    assert 0 < summary["share_of_gemm_peak"] < 1
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    config = json.loads((folder / "config.json").read_text())
    assert (config["config"]["learning_rate"], config["seed"]) == (0.01, 5)
    modes = {path.stat().st_mode & 0o777 for path in finished.rglob("*") if path.is_file()}
    assert modes == {(folder / "config.json").stat().st_mode & 0o777}, "weights are readable like any file"


def test_the_log_has_the_events_in_order(finished):
    log = events(finished / "result_0.txt")
    keys = [event["key"] for event in log]
    order = ["cache_clear", "init_start", "seed", "global_batch_size", "init_stop", "run_start", "epoch_start"]
    order += ["block_start", "eval_start", "eval_stop", "eval_accuracy", "block_stop", "epoch_stop"]
    order += ["train_samples", "eval_samples", "run_stop"]
    assert [key for key in keys if key in order] == order
    values = {event["key"]: event["value"] for event in log}
    assert values["global_batch_size"] == 6
    assert values["opt_epsilon"] == values["opt_lamb_epsilon"] == 1e-6
    assert (values["steps"], values["skipped_steps"], values["max_steps"]) == (12, 0, 12)
    assert (values["max_sequence_length"], values["threads_per_rank"], values["gpus"]) == (64, 1, {})
    assert values["starting_weights"] == values["starting_weights_sha256"] == "none"
    assert (values["nodes"], len(values["hosts"])) == (1, 1)
    assert set(values["native_libraries"]) >= {"ops"}
    assert all(len(digest) == 64 for digest in values["native_libraries"].values())
    summary = read_summary(finished)
    assert {key: values[key] for key in ("steps", "skipped_steps", "tokens")}.items() <= summary.items()
    assert summary["sequences_per_pack"] == pytest.approx(values["train_samples"] / (12 * 4), abs=1e-4)
    record = json.loads((finished / "run_0/config.json").read_text())
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


def test_time_and_sample_limits(tmp_path):
    assert run(tmp_path, "seconds", max_seconds=1e-6) == 1
    assert read_summary(tmp_path / "seconds")["steps"] == 1
    assert run(tmp_path, "samples", max_samples_termination=12) == 1
    assert 12 <= read_summary(tmp_path / "samples")["samples"] < 24
    assert [errors(tmp_path / name / "result_0.txt") for name in ("seconds", "samples")] == [{"status"}] * 2


def test_evaluations_follow_the_grid(tmp_path):
    assert run(tmp_path, eval_iter_start_samples=10, eval_iter_samples=20) == 1
    points = [e["metadata"]["epoch_num"] for e in events(tmp_path / "out/result_0.txt") if e["key"] == "eval_accuracy"]
    assert 10 <= points[0] < 30
    assert points == sorted(set(points))
    grid = [(point - 10) // 20 for point in points[:-1]]
    assert len(set(grid)) == len(grid)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run(folder, max_steps=STEPS) == 1
    return folder / "out"


def test_killed_and_resumed_ends_with_the_same_weights(tmp_path, undisturbed):
    at = random.randrange(3, 20)
    interrupted_runs.train(tmp_path, "out", signal.SIGKILL, at, max_steps=STEPS, save_checkpoint_steps=1, log_freq=1)
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
    assert interrupted_runs.train(tmp_path, "out", signal.SIGUSR1, 3, **options) == 128 + signal.SIGUSR1
    assert '"reason": "SIGUSR1", "status": "aborted"' in (tmp_path / "out/result_0.txt").read_text()
    (checkpoint,) = (tmp_path / "out/run_0/checkpoints").glob("step_*")
    assert not (tmp_path / "out/run_0/summary.json").exists()
    assert run(tmp_path, max_steps=STEPS, resume=1) == 1
    assert f"resumed at step {int(checkpoint.name.removeprefix('step_'))}" in capsys.readouterr().out
    assert weights(tmp_path / "out") == weights(undisturbed)


def test_the_clock_stops_before_the_last_checkpoint_is_written(tmp_path, monkeypatch):
    save, log, closed = CheckpointFolder.save, tmp_path / "out/result_0.txt", []

    def save_late(*arguments):
        deadline = time.monotonic() + 20
        while '"run_stop"' not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        closed.append('"run_stop"' in log.read_text())
        return save(*arguments)

    monkeypatch.setattr(CheckpointFolder, "save", save_late)
    assert run(tmp_path, save_checkpoint_steps=8) == 1
    assert closed == [True]
    assert (tmp_path / "out/run_0/checkpoints/step_00000008/state.json").exists()


def test_resume_keeps_the_seed_that_the_system_drew(tmp_path):
    settings = {"max_steps": 2, "seed": "none", "save_checkpoint_steps": 1}
    assert run(tmp_path, **settings) == 1
    drawn = json.loads((tmp_path / "out/run_0/config.json").read_text())["seed"]
    (tmp_path / "out/run_0/summary.json").unlink()  # as if it had been killed after its last checkpoint
    assert run(tmp_path, **settings, resume=1) == 1
    seeds = [event["value"] for event in events(tmp_path / "out" / "result_0.txt") if event["key"] == "seed"]
    assert seeds == [drawn]


def test_a_log_that_fills_the_disk_fails_the_run(tmp_path, capsys):
    settings = {"max_steps": 400, "eval_iter_start_samples": 1, "eval_iter_samples": 1, "num_eval_examples": 4}
    with largest_file(60_000):  # of all files only the log grows beyond it
        assert run(tmp_path, **settings, log_freq=0, shape={"vocab_size": 8, "hidden_size": 8}) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "out/result_0.txt: cannot be written (File too large)" in error
    assert not (tmp_path / "out/run_0/summary.json").exists()


def test_a_run_fails_if_the_checksums_turn_out_wrong_after_its_last_step(tmp_path, monkeypatch, capsys):
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
    settings = settings_of(prepared_data) | {"max_steps": 1}
    assert run(tmp_path, "same", **settings | {"eval_dir": prepared_data / "train"}) == 1
    assert "train is the training set" in capsys.readouterr().out
    assert run(tmp_path, "other", **settings) == 1
    assert "is the training set" not in capsys.readouterr().out


def test_a_run_that_never_started_may_be_repeated(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert run(tmp_path, init_checkpoint=tmp_path / "model.safetensors") == 2
    assert (tmp_path / "out" / "result_0.txt").exists()
    assert run(tmp_path, max_steps=2) == 1


def with_bad_gradients(monkeypatch, late, steps):
    """Make the gradients of some steps infinite, and return the list of steps that ran.

    ``late``: finish each step after the next one is queued, as on a GPU.
    """
    taken, train, one_step = [], loop.train, loop.train_one_step

    def poisoned(run, clock):
        pooler, step = run.method.model.bert.pooler.dense.bias, run.state.step
        hook = pooler.register_hook(lambda grad: grad + float("inf")) if step in steps else None
        before = run.method.flat.data.clone()
        leaving = one_step(run, clock)
        if hook:
            hook.remove()
            assert torch.equal(run.method.flat.data, before)
        taken.append(step)
        return leaving

    monkeypatch.setattr(loop, "train_one_step", poisoned)
    monkeypatch.setattr(experiment, "train", lambda run: train(dataclasses.replace(run, finalize_late=late)))
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
    """The second and the last step are skipped; samples decide when evaluation and the end are due."""
    summaries = []
    for late in (False, True):
        folder = tmp_path / f"late{late}"
        with monkeypatch.context() as patch:
            with_bad_gradients(patch, late, {1, 7})
            every = {"eval_iter_start_samples": 12, "eval_iter_samples": 12}
            assert run(tmp_path, folder.name, max_steps=8, log_freq=0, **every) == 1
        evaluations = [(line["samples"], line["eval_loss"]) for line in read_metrics(folder, "evaluation")]
        summary = read_summary(folder)
        summaries.append([summary[key] for key in ("samples", "steps", "skipped_steps", "accuracy")] + evaluations)
    assert summaries[0] == summaries[1]
    assert summaries[0][2] == 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"bert_config_file": "/nowhere/bert_config.json"}, "/nowhere/bert_config.json"),
        ({"synthetic_data": "0", "input_dir": "/nowhere"}, "/nowhere"),
        ({"init_checkpoint": "/nowhere/model.safetensors"}, "/nowhere/model.safetensors"),
        ({"init_checkpoint": "weights.pt"}, "weights.pt"),
        ({"output_dir": "/proc/out"}, "/proc/out"),
        ({"recipe": "packed_lam"}, "packed_lamb"),
        ({"cpu_threads": 4000}, "CPU_THREADS=4000: this machine has"),
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
    printed, table = capsys.readouterr().out.splitlines(), tmp_path / "out/run_0/settings.txt"
    start = printed.index(f"settings: all are in {table}")
    words = printed[start + 1].split()
    assert printed[start + 1].startswith("not the defaults of packed_lamb: ")
    assert "MAX_STEPS=1" in words
    assert not [word for word in words if word.startswith(("END_LR=", "OPTIMIZER="))]
    lines = table.read_text().splitlines()
    assert [line.partition("=")[0] for line in lines] == [one.env for one in settings_by_key().values()]
    assert "MAX_STEPS=1  (max_steps, flag --max_steps)" in lines
    assert not {line.partition("=")[0] for line in printed if "  (" in line} & {"END_LR", "MAX_STEPS"}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"learning_rate": 0.5}, "LR is 0.01, this run has 0.5"),
        ({"weight_decay_rate": 0.5}, "WEIGHT_DECAY_RATE is 0.01, this run has 0.5"),
        ({"precision": "bf16"}, "PRECISION is 'fp32', this run has 'bf16'"),
        ({"gradient_accumulation_steps": 1}, "GRADIENT_STEPS is 2, this run has 1"),
        ({"shape": {"hidden_size": 16}}, "belongs to another run: model"),
    ],
)
def test_a_run_is_not_continued_by_another_method(tmp_path, capsys, changed, words):
    started = {"max_steps": 2, "save_checkpoint_steps": 1}
    assert run(tmp_path, **started) == 1
    (tmp_path / "out/run_0/summary.json").unlink()
    before = (tmp_path / "out/result_0.txt").read_bytes()
    assert run(tmp_path, **{**started, **changed}, resume=1) == 2
    assert words in capsys.readouterr().err
    assert (tmp_path / "out/result_0.part1.txt").read_bytes() == before


def test_vocabulary_that_does_not_match_the_shards_is_refused(tmp_path, capsys, prepared_data):
    data = shutil.copytree(prepared_data, tmp_path / "data")
    with (data / "vocab.txt").open("a") as vocabulary:
        vocabulary.write("another\n")
    assert run(tmp_path, **settings_of(data)) == 2
    assert "vocab.txt" in capsys.readouterr().err


def test_weights_keep_the_case_of_the_training_set(tmp_path, prepared_data):
    data = shutil.copytree(prepared_data, tmp_path / "data")
    manifest = json.loads((data / "train/manifest.json").read_text())
    manifest["provenance"]["options"]["lower_case"] = False
    (data / "train/manifest.json").write_text(json.dumps(manifest))
    (data / "tokenizer_config.json").unlink()
    assert run(tmp_path, max_steps=2, save_checkpoint_steps=1, **settings_of(data)) == 1
    for name in ("weights", "huggingface"):
        assert not lower_cases(tmp_path / "out/run_0" / name / "vocab.txt")
    (checkpoint,) = (tmp_path / "out/run_0/checkpoints").glob("step_*")
    assert open_saved(checkpoint)[2:] == (data / "vocab.txt", False)


def test_memory_stays_flat(tmp_path):
    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    assert run(tmp_path, "warm", max_steps=50) == 1
    before = resident_bytes()
    assert run(tmp_path, "long", max_steps=250, log_freq=0) == 1
    assert resident_bytes() - before < 10e6


def test_records_train_as_they_are(tmp_path, prepared_data, capsys):
    for name in ("train", "eval"):
        hdf5_to_tfrecords(prepared_data / name, tmp_path / name)
    settings = settings_of(prepared_data, max_position_embeddings=512)
    settings |= {"input_dir": tmp_path / "train", "max_steps": 3}
    assert run(tmp_path, **settings) == 1
    assert read_summary(tmp_path / "out")["steps"] == 3
    settings["shape"]["vocab_size"] = 50
    assert run(tmp_path, "small", **settings | {"eval_dir": tmp_path / "eval"}) == 2
    assert "has a vocabulary of" in capsys.readouterr().err

"""Complete runs of `run_pretraining.py` in processes forked from one with TensorFlow:
files, statuses, resuming.
"""

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from dist.harness import Rank, run_as_main
from mlbert.data.formats.open import describe
from mlbert.data.formats.tfrecord import write_examples
from programs import RunMlbert, free_ports, run_quietly
from random_set import VOCAB_SIZE, random_rows
from stored_sets import flip
from unit.tensorflow2.processes import PRELOADED

# Only the runs import it.
pytestmark = pytest.mark.skipif(
    find_spec("tensorflow") is None, reason="TensorFlow is not installed (the tf extra)"
)
PROGRAM = "benchmarks/bert/implementations/tensorflow2/run_pretraining.py"
SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
STEPS = (
    "--train_batch_size=8 --eval_batch_size=8 --num_steps_per_epoch=12 --num_train_epochs=1 "
    "--steps_per_loop=4"
)
NUMBERS = (
    f"{STEPS} --optimizer_type=lamb --learning_rate=0.01 --warmup_steps=2 --seed=3 --log_freq=1 "
    "--cpu_threads=1"
)
Start = Callable[..., Rank]
Run = Callable[..., str]
# The errors that TensorFlow 2.16 and later raise in a worker
# and in the chief after the other process has died.
WORKER = """Graph execution error:
Collective ops is aborted by: Error reported from /job:worker/task:1: \
The following tasks are unhealthy (stopped
sending heartbeats):
/job:worker/replica:0/task:1
The tasks have crashed."""
CHIEF = """Graph execution error:
Collective ops is aborted by: Failed to send RPC to coordination service.
Additional GRPC error information from remote target /job:worker/replica:0/task:0 \
while calling Heartbeat:"""


@pytest.fixture
def start(tmp_path: Path, tree_root: Path) -> Start:
    shape = tmp_path / "bert_config.json"
    environment = {
        name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ
    }

    def of(words: str) -> Rank:
        prepared = re.search(r"--input_dir=(\S+)", words)
        vocabulary = (
            describe(prepared[1]).vocab_size
            if prepared and Path(prepared[1]).exists()
            else VOCAB_SIZE
        )
        shape.write_text(json.dumps({**SHAPE, "vocab_size": vocabulary}))
        command = [str(tree_root / PROGRAM), f"--bert_config_file={shape}", *words.split()]
        output = Path(tempfile.mkstemp(dir=tmp_path)[1])
        return Rank(run_as_main, (command,), environment, output, PRELOADED)

    return of


@pytest.fixture
def prepared(prepared_data: Path) -> str:
    return f"--input_dir={prepared_data}/train --eval_dir={prepared_data}/eval"


@pytest.fixture
def run(start: Start) -> Run:
    """Return run(words, status), which asserts the exit status and returns the output."""

    def of(words: str, status: int = 0) -> str:
        process = start(words)
        output = process.communicate(240)
        assert process.returncode == status, output
        return output

    return of


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def events(log: Path) -> list[tuple[str, object, dict]]:
    """Return the key, value and metadata of each line."""
    lines = [json.loads(line.removeprefix(":::MLLOG ")) for line in log.read_text().splitlines()]
    return [(line["key"], line["value"], line["metadata"]) for line in lines]


def test_run_on_a_prepared_set(
    run: Run, run_mlbert: RunMlbert, prepared: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = (
        f"{NUMBERS} {prepared} --max_seq_length=32 --max_predictions_per_seq=5 --do_eval "
        "--num_eval_samples=50"
    )
    words += f" --steps_between_eval=4 --stop_threshold=0.01 --model_dir={out}"
    run(f"{words} --model_export_path={tmp_path}/export --enable_checkpoint_and_summary")
    logged = events(out / "result_0.txt")
    keys = [key for key, *_ in logged]
    values = {key: value for key, value, _ in logged}
    samples = values["train_samples"]
    evaluations = keys.count("eval_accuracy")
    assert [key for key in keys if key.startswith(("run_", "eval_st", "eval_acc"))] == [
        "run_start",
        *["eval_start", "eval_stop", "eval_accuracy"] * evaluations,
        "run_stop",
    ]
    assert samples == evaluations * 4 * 8
    assert (values["global_batch_size"], values["eval_samples"]) == (8, 50)
    assert (values["recipe"], values["opt_name"], values["ranks"]) == ("tensorflow2", "lamb", 1)
    assert (values["steps"], values["max_sequence_length"], values["sequences_per_pack"]) == (
        samples / 8,
        32,
        1.0,
    )
    assert (values["nodes"], values["threads_per_rank"], values["evaluation_size"]) == (1, 1, 50)
    assert logged[-1][2]["status"] == "success"
    assert {path.name for path in (out / "run_0").iterdir()} == {
        "settings.txt",
        "config.json",
        "metrics.jsonl",
        "curve.png",
        "weights",
        "tf2",
        "summary.json",
        "checkpoints",
    }
    assert (
        json.loads((out / "training_summary.txt").read_text())["total_training_steps"]
        == samples / 8
    )
    assert list((out / "summaries").iterdir())
    assert (tmp_path / "export/weights/model.safetensors").is_file()
    assert run_mlbert("submission", "check", out / "result_0.txt")[0] == 0
    assert "BROKEN" not in run_mlbert("submission", "trace", out / "result_0.txt")[1]


@pytest.mark.slow
def test_published_tfrecords_and_initial_weights(run: Run, tmp_path: Path) -> None:
    files = tmp_path / "parts"
    files.mkdir()
    for part in range(2):
        write_examples(
            files / f"part-0000{part}-of-00002", random_rows(40, part, max_length=32), 32, 5
        )
    words = (
        f"{NUMBERS} --input_files={files}/part-* --max_seq_length=32 --max_predictions_per_seq=5"
    )
    # Without evaluation, reaching the limit is a success.
    run(f"{words} --device_warmup --model_dir={tmp_path}/first")
    assert "[run.exists]" in run(f"{words} --model_dir={tmp_path}/first", 2)
    words += (
        f" --model_dir={tmp_path}/second --do_eval --num_eval_samples=30 --steps_between_eval=12"
    )
    words += f" --init_checkpoint={tmp_path}/first/run_0/tf2/model.ckpt --dtype=bf16 --num_gpus=2"
    assert "first samples of the training files" in run(words, 1)
    first, second = (
        json.loads((tmp_path / name / "training_summary.txt").read_text())
        for name in ("first", "second")
    )
    assert second["train_loss"] < first["train_loss"]
    (tmp_path / "moved").mkdir()
    files.rename(tmp_path / "moved/parts")
    command = [sys.executable, "-m", "mlbert", "submission", "repeat"]
    command += [tmp_path / "second/result_0.txt", "--data", tmp_path / "moved"]
    done = run_quietly(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 accuracies are equal to the last digit." in done.stdout
    assert "Settings that differ" not in done.stdout
    flip(tmp_path / "moved/parts/part-00001-of-00002")
    damaged = (
        f"{NUMBERS} --input_files={tmp_path}/moved/parts/part-* --max_seq_length=32 "
        "--max_predictions_per_seq=5"
    )
    assert "[data.damaged]" in run(f"{damaged} --num_gpus=2 --model_dir={tmp_path}/third", 2)


@pytest.mark.slow
def test_interrupted_run_resumes_bit_equal(
    run: Run, start: Start, prepared: str, tmp_path: Path
) -> None:
    # Checkpoints reach both replicas: otherwise, the resumed run would end with other weights.
    words = (
        f"{NUMBERS} {prepared} --num_gpus=2 --num_train_epochs=20 --save_checkpoint_steps=20 "
        "--keep_checkpoints=3"
    )
    run(f"{words} --stop_steps=240 --model_dir={tmp_path}/whole")
    process = start(f"{words} --model_dir={tmp_path}/parts")
    checkpoints = tmp_path / "parts/run_0/checkpoints"
    wait_until(lambda: list(checkpoints.glob("step_*")))
    process.send_signal(signal.SIGUSR1)
    output = process.communicate(60)
    assert process.returncode == 128 + signal.SIGUSR1, output
    about = events(tmp_path / "parts/result_0.txt")[-1][2]
    assert (about["status"], about["reason"]) == ("aborted", "SIGUSR1")
    resumed = f"{words} --stop_steps=240 --model_dir={tmp_path}/parts --resume=1"
    assert "resumed at step" in run(resumed)
    (
        tmp_path / "parts/run_0/summary.json"
    ).unlink()  # as if it had been killed after its last checkpoint
    assert "resumed at step 240" in run(resumed)
    summary = json.loads((tmp_path / "parts/training_summary.txt").read_text())
    assert (summary["total_training_steps"], summary["last_train_metrics"]) == (240, None)
    weights = [
        (tmp_path / name / "run_0/weights/model.safetensors").read_bytes()
        for name in ("whole", "parts")
    ]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_devices_and_workers_train_alike(
    run: Run, start: Start, prepared: str, tmp_path: Path
) -> None:
    """The workers do so too if they resume from the checkpoint that the chief has written."""
    words = (
        f"{NUMBERS} {prepared} --do_eval --num_eval_samples=50 --steps_between_eval=4 "
        "--stop_threshold=0.9"
    )
    words += " --scale_loss --save_checkpoint_steps=4"
    for count in (1, 2):
        run(f"{words} --num_gpus={count} --model_dir={tmp_path}/{count}", 1)
    hosts = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    words += (
        f" --distribution_strategy=multi_worker_mirrored --worker_hosts={hosts} "
        f"--model_dir={tmp_path}/workers"
    )
    checkpoints = tmp_path / "workers/run_0/checkpoints"
    for more, steps in (("--stop_steps=8", ["04", "08"]), ("--resume=1", ["08", "12"])):
        # As if the run had been killed.
        (tmp_path / "workers/run_0/summary.json").unlink(missing_ok=True)
        processes = [start(f"{words} {more} --task_index={task}") for task in range(2)]
        outputs = [process.communicate(200) for process in processes]
        # Only the chief reports the missed target:
        # a launcher would treat the first failure as a lost process.
        assert [process.returncode for process in processes] == [1, 0], outputs
        assert sorted(path.name for path in checkpoints.iterdir()) == [
            f"step_000000{step}" for step in steps
        ]
    found = []
    for folder in (tmp_path / name for name in ("1", "2", "workers")):
        loss = json.loads((folder / "training_summary.txt").read_text())["train_loss"]
        found.append(
            [
                loss,
                *(
                    value
                    for key, value, _ in events(folder / "result_0.txt")
                    if key == "eval_accuracy"
                ),
            ]
        )
    one, two, workers = found
    assert len(one) == 1 + 3
    assert two == pytest.approx(one, rel=1e-4)  # each replica clips its own gradient
    assert workers == pytest.approx([two[0], two[-1]], rel=1e-5), (
        "the loss, and the accuracy since the resumption"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "subject"),  # the first and the last part of the start
    [
        ("--no_such_flag=1", "config.syntax", "the command line"),
        ("--synthetic_data=1 --model_export_path=/dev/null/x", "file.unwritable", "/dev/null/x"),
    ],
)
def test_user_error_is_one_line_and_status_2(
    run: Run, tmp_path: Path, words: str, code: str, subject: str
) -> None:
    output = run(f"{STEPS} {words} --model_dir={tmp_path}/out", 2)
    (error,) = (line for line in output.splitlines() if line.startswith("mlbert: error:"))
    assert re.fullmatch(rf"mlbert: error: {subject}: .* \[{code}\]", error)
    log = tmp_path / "out/result_0.txt"
    assert not log.exists() or "run_start" not in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_worker_is_named_in_one_line_and_closes_the_log(
    start: Start, tmp_path: Path, victim: int
) -> None:
    hosts = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    log = tmp_path / "out/result_0.txt"
    words = (
        f"{NUMBERS} --synthetic_data=1 --num_train_epochs=100000 "
        "--distribution_strategy=multi_worker_mirrored"
    )
    words += f" --worker_hosts={hosts} --model_dir={tmp_path}/out"
    workers = [start(f"{words} --task_index={task}") for task in range(2)]
    wait_until(lambda: log.exists() and "block_start" in log.read_text())
    workers[victim].kill()
    output = workers[1 - victim].communicate(120)
    workers[victim].communicate(10)
    reason = f"rank {victim} on 127.0.0.1 died, hangs or is cut off"
    assert workers[1 - victim].returncode == 3, output
    assert f"mlbert: error: {reason}. The run is aborted on every rank." in output.splitlines()
    assert "Traceback" not in output
    key, _, about = events(log)[-1]
    assert (key, about["status"], about["reason"]) == ("run_stop", "aborted", reason)


class UnavailableError(Exception):
    """Has the name of TensorFlow's error."""


@pytest.mark.parametrize(
    ("error", "task", "expected"),
    [
        (UnavailableError(WORKER), 0, "rank 1 on b died, hangs or is cut off"),
        (UnavailableError(CHIEF), 1, "rank 0 on a died, hangs or is cut off"),
        (RuntimeError(CHIEF), 1, "rank 0 on a died, hangs or is cut off"),
        (UnavailableError("/job:worker/replica:0/task:0/device:GPU:0 is busy"), 0, None),
        (UnavailableError("/job:worker/task:7"), 0, None),
        (ValueError("/job:worker/replica:0/task:1"), 0, None),
        (KeyboardInterrupt(), 0, None),
    ],
    ids=[
        "worker lost",
        "chief lost",
        "chief lost, another type",
        "this rank",
        "unknown rank",
        "another error",
        "Ctrl-C",
    ],
)
def test_errors_of_tensorflow_name_the_lost_worker(
    error: BaseException, task: int, expected: str | None
) -> None:
    from tf2_bert.endings import lost_worker

    assert lost_worker(error, SimpleNamespace(task=task, count=2, hosts=["a", "b"])) == expected

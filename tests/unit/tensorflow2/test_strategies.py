"""The strategies that settings select, and errors if one is not available."""

import json
from pathlib import Path

import pytest

from user_errors import user_error

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed (the tf extra)")

from tf2_bert import strategies
from tf2_bert.strategies import make_strategy, prepare_devices
from unit.tensorflow2.processes import assert_success, start
from unit.tensorflow2.strategies_program import prepare, tensorflow

HAS_GPU = bool(tf.config.list_physical_devices("GPU"))
no_gpu = pytest.mark.skipif(HAS_GPU, reason="has a GPU")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TF_CONFIG", "SLURM_NTASKS", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)


def rejects(
    code: str, subject: str, num_gpus: int = 1, *, wording: bool = True, **changes: object
) -> str:
    """Assert that the settings are rejected; return the problem."""
    with user_error(code, subject, wording=wording) as caught:
        make_strategy(tensorflow(**changes), num_gpus)
    return caught.value.problem


def test_one_device_and_no_strategy() -> None:
    off, _ = make_strategy(tensorflow(distribution_strategy="off"), 1)
    assert off is tf.distribute.get_strategy()
    for count in (0, 1):
        one, notes = make_strategy(tensorflow(distribution_strategy="one_device"), count)
        assert isinstance(one, tf.distribute.OneDeviceStrategy)
        mirrored, _ = make_strategy(tensorflow(distribution_strategy="mirrored"), count)
        assert isinstance(mirrored, tf.distribute.MirroredStrategy)
        assert (mirrored.num_replicas_in_sync, notes) == (1, [])
    if not HAS_GPU:
        _, (note,) = make_strategy(
            tensorflow(distribution_strategy="mirrored", all_reduce_alg="nccl"), 1
        )
        assert note.startswith("ALL_REDUCE_ALG: nccl needs GPUs")


@no_gpu
def test_missing_devices_are_counted_and_virtual_ones_are_limited() -> None:
    available = len(tf.config.list_logical_devices("CPU"))
    problem = rejects(
        "device.unavailable", "num_gpus", 64, wording=False, distribution_strategy="mirrored"
    )
    assert f" {available} CPU devices" in problem
    for count in (-3, 100_000):
        with user_error("config.range", "num_gpus"):
            prepare_devices(tensorflow(distribution_strategy="mirrored"), None, count)


def test_settings_that_a_strategy_does_not_have() -> None:
    rejects("config.conflict", "num_gpus", 2, distribution_strategy="off")
    rejects("config.conflict", "num_gpus", 2, distribution_strategy="one_device")
    rejects("config.conflict", "DISTRIBUTION_STRATEGY", distribution_strategy="parameter_server")
    rejects(
        "distributed.identity",
        "DISTRIBUTION_STRATEGY",
        distribution_strategy="multi_worker_mirrored",
    )
    algorithms = {
        "mirrored": "ring",
        "multi_worker_mirrored": "hierarchical_copy",
        "one_device": "nccl",
    }
    for strategy, algorithm in algorithms.items():
        rejects(
            "config.choice",
            "ALL_REDUCE_ALG",
            distribution_strategy=strategy,
            all_reduce_alg=algorithm,
        )


def test_workers_from_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    with user_error("distributed.identity", "task_index"):
        make_strategy(
            tensorflow(distribution_strategy="multi_worker_mirrored"), 1, ["a:1", "b:1"], 2
        )
    cluster = {"worker": ["a:1", "b:1"]}
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}})
    )
    resolver = strategies._cluster((), -1, 1)
    assert (resolver.cluster_spec().as_dict(), resolver.task_type, resolver.task_id) == (
        cluster,
        "worker",
        1,
    )
    monkeypatch.setenv("TF_CONFIG", "{}")
    rejects("distributed.identity", "TF_CONFIG", distribution_strategy="multi_worker_mirrored")


def test_workers_from_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the third task on two nodes with two tasks each."""
    step = {"STEP_NUM_TASKS": "4", "STEP_NODELIST": "node[01-02]", "STEP_TASKS_PER_NODE": "2(x2)"}
    for name, value in {"NTASKS": "4", "PROCID": "2", **step}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    resolver = strategies._cluster((), -1, 0)
    hosts = ["node01:8888", "node01:8889", "node02:8888", "node02:8889"]
    assert resolver.cluster_spec().as_dict() == {"worker": hosts}
    assert (resolver.task_type, resolver.task_id, resolver.num_accelerators()["GPU"]) == (
        "worker",
        2,
        0,
    )
    monkeypatch.setenv("SLURMD_NODENAME", "node2")
    rejects(
        "distributed.identity", "SLURM_STEP_NODELIST", distribution_strategy="multi_worker_mirrored"
    )
    monkeypatch.delenv("SLURM_STEP_NODELIST")
    # The message includes TensorFlow's text.
    rejects(
        "distributed.identity",
        "SLURM_NTASKS",
        wording=False,
        distribution_strategy="multi_worker_mirrored",
    )


@pytest.mark.slow
@no_gpu
def test_devices_are_prepared_and_a_missing_tpu_is_a_one_line_error(tmp_path: Path) -> None:
    assert_success(start(prepare, tmp_path, tmp_path / "found.json"))
    replicas, threads, rejected = json.loads((tmp_path / "found.json").read_text())
    assert (replicas, threads) == (2, [3, 3])
    assert rejected[:2] == ["device.unavailable", "TPU"]
    assert "\n" not in rejected[2]

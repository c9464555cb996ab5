"""The TensorFlow 2 training step on several replicas: the result does not depend on how the batch is split."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed (the tf extra)")

from programs import free_ports
from unit.tensorflow2.processes import assert_success, start
from unit.tensorflow2.strategies_program import RATES, train_all

pytestmark = pytest.mark.slow
# Each of these groups has its own process; see strategies_program. Four replicas take a minute to trace.
FOUR = {"four": {"devices": 4}}
ONE = {
    "one": {"devices": 1},
    "one_device": {"devices": 1, "config": {"distribution_strategy": "one_device", "run_eagerly": 1}},
    "off": {"devices": 1, "config": {"distribution_strategy": "off", "run_eagerly": 1}},
}
TWO = {
    "two": {"devices": 2},
    "two, accumulated and compiled": {"devices": 2, "config": {"gradient_accumulation_steps": 2, "enable_xla": 1}},
    "two, summed first": {"devices": 2, "config": {"explicit_allreduce": 1, "allreduce_bytes_per_pack": 4096}},
}
ALIKE = {
    f"{count}, alike": {"devices": count, "alike": 0.1, "steps": [1], "config": {"run_eagerly": 1}} for count in (1, 2)
}


def assert_same_training(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key in ("losses", "norms", "weights"):
        np.testing.assert_allclose(found[key], expected[key], rtol=0, atol=1e-5, err_msg=key)
    np.testing.assert_allclose(found["sums"], expected["sums"], rtol=1e-5)


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder, groups = tmp_path_factory.mktemp("replicas"), {1: ONE, 2: TWO | ALIKE, 4: FOUR}
    assert_success(*(start(train_all, folder, *group, folder / f"{group[0]}.json") for group in groups.items()))
    return {name: case for path in folder.glob("*.json") for name, case in json.loads(path.read_text()).items()}


@pytest.mark.parametrize("name", [*ONE, *TWO, *FOUR][1:])
def test_training_is_independent_of_the_split(mirrored: dict[str, dict[str, Any]], name: str) -> None:
    """Replicas and micro-batches have different numbers of predictions and sequences."""
    assert mirrored[name]["replicas"] == (ONE | TWO | FOUR)[name]["devices"]
    assert_same_training(mirrored[name], mirrored["one"])
    assert len(set(mirrored[name]["losses"])) == len(RATES)


def test_replicas_have_different_dropout(mirrored: dict[str, dict[str, Any]]) -> None:
    """With the same rows, one replica's loss differs from the mean of two."""
    ((one,), (two,)) = (mirrored[name]["losses"] for name in ALIKE)
    assert abs(one - two) > 1e-4


def test_two_processes_match_one(mirrored: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    hosts = [f"127.0.0.1:{port}" for port in free_ports(2)]
    case = {"devices": 0, "hosts": hosts, "config": {"distribution_strategy": "multi_worker_mirrored"}}
    results = [tmp_path / f"{task}.json" for task in range(2)]
    workers = [start(train_all, tmp_path, 0, {"it": case | {"task": task}}, results[task]) for task in range(2)]
    assert_success(*workers)
    for path in results:
        found = json.loads(path.read_text())["it"]
        assert found["replicas"] == 2
        assert_same_training(found, mirrored["one"])

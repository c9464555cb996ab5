"""The TensorFlow 2 training step on several replicas: the result does not depend on how the batch is split."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed (the tf extra)")

from programs import free_ports
from unit.tensorflow2 import strategies_program
from unit.tensorflow2.strategies_program import RATES

pytestmark = pytest.mark.slow
# Each of these groups runs in a process of its own; see strategies_program. Four replicas take a minute to trace.
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
REPLICAS = {name: case["devices"] for name, case in {**ONE, **TWO, **FOUR}.items()}


def start(devices: int, cases: list[dict[str, Any]]) -> subprocess.Popen[str]:
    arguments = json.dumps({"devices": devices, "cases": cases})
    command = [sys.executable, strategies_program.__file__, arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def results_of(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    try:
        out, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


def assert_same_training(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key in ("losses", "norms", "weights"):
        np.testing.assert_allclose(found[key], expected[key], rtol=0, atol=1e-5, err_msg=key)
    np.testing.assert_allclose(found["sums"], expected["sums"], rtol=1e-5)


@pytest.fixture(scope="module")
def mirrored() -> dict[str, dict[str, Any]]:
    """Return the results of each case."""
    groups = [(1, ONE), (2, TWO | ALIKE), (4, FOUR)]
    processes = [(start(devices, list(cases.values())), cases) for devices, cases in groups]
    return {name: case for process, cases in processes for name, case in zip(cases, results_of(process), strict=True)}


@pytest.mark.parametrize("name", [*ONE, *TWO, *FOUR][1:])
def test_training_is_independent_of_the_split(mirrored: dict[str, dict[str, Any]], name: str) -> None:
    """Replicas and micro-batches have different numbers of predictions and sequences."""
    assert mirrored[name]["replicas"] == REPLICAS[name]
    assert_same_training(mirrored[name], mirrored["one"])
    assert len(set(mirrored[name]["losses"])) == len(RATES)


def test_replicas_have_different_dropout(mirrored: dict[str, dict[str, Any]]) -> None:
    """With the same rows, one replica's loss differs from the mean of two."""
    ((one,), (two,)) = (mirrored[name]["losses"] for name in ALIKE)
    assert abs(one - two) > 1e-4


def test_two_processes_match_one(mirrored: dict[str, dict[str, Any]]) -> None:
    hosts = [f"127.0.0.1:{port}" for port in free_ports(2)]
    case = {"devices": 0, "hosts": hosts, "config": {"distribution_strategy": "multi_worker_mirrored"}}
    processes = [start(0, [case | {"task": task}]) for task in range(2)]
    for process in processes:
        (found,) = results_of(process)
        assert found["replicas"] == 2
        assert_same_training(found, mirrored["one"])

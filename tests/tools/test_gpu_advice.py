"""The GPU check's advice for the next run, given the rows of the last one."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_check.advice import next_lines
from gpu_check.tables import GOALS


def smoke(precision: str, speed: float, **more: Any) -> dict[str, Any]:
    return {"precision": precision, "sequences_per_second": speed, "forms": {}, **more}


def timed(seconds: float) -> dict[str, Any]:
    return {"forward_seconds": seconds, "backward_seconds": 2 * seconds}


FAST = {f"attention: {form}": timed(seconds) for form, seconds in (("triton", 2.0), ("flash", 1.0), ("plain", 0.5))}
PROVED = {"attention: triton": {"passed": True}, "attention without dropout: flash": {"passed": True}}
REFUTED = {**PROVED, "attention dropout rate: flash": {"passed": False}}
CLOCK = {"sm_mhz": 1755.0, "least_sm_mhz": 900.0}
CASES: dict[str, tuple[int, dict[str, dict[str, Any]], list[str]]] = {
    "nothing special": (1, {}, ["tools/gpu_check.sh --run 2"]),
    "goal reached": (
        1,
        {"smoke": {"fp8, 48 packs": smoke("fp8", GOALS["fp8"])}},
        ["fp8 reaches 1450 sequences/s (fp8, 48 packs), 100% of its goal: the goal is reached"],
    ),
    "goal missed": (
        1,
        {"smoke": {"a": smoke("fp8", 1160.0), "b": smoke("bf16", 1170.0, did_not_fit=224)}},
        ["80% of its goal: the table of the part", "FP8 is slower than bfloat16", "224 packs did not fit"],
    ),
    "the clock fell": (
        3,
        {"record": {"a": smoke("fp8", 900.0, power=CLOCK)}},
        ["measure a again: the clock fell from 1755 to 900 MHz", "commit it under records/"],
    ),
    "another form is faster": (
        1,
        {"ops": FAST, "checks": PROVED},
        ["attention flash is the fastest form that passed its checks", "OPS=flash tools/gpu_check.sh --run 2"],
    ),
    "a wrong form is faster": (
        1,
        {"ops": FAST, "checks": REFUTED},
        ["fix the first failure (checks: attention dropout rate: flash", "--run 1 --resume", "next: tools/gpu_check"],
    ),
    "a kernel waits": (
        2,
        {"counters": {"cast_kernel": {"compute_percent": 20.0, "memory_percent": 45.0, "occupancy_percent": 12.0}}},
        [
            "cast_kernel saturates neither compute nor memory (compute 20 %, memory 45 %, occupancy 12 %)",
            "tools/gpu_check.sh --run 3",
        ],
    ),
    "a busy kernel": (2, {"counters": {"cast_kernel": {"compute_percent": 20.0, "memory_percent": 80.0}}}, ["--run 3"]),
}


@pytest.mark.parametrize("case", CASES)
def test_advice_depends_on_the_rows(case: str, tmp_path: Path) -> None:
    run, parts, expected = CASES[case]
    for part, rows in parts.items():
        (tmp_path / f"{part}.json").write_text(json.dumps({"rows": rows}))
    lines = next_lines(run, tmp_path, dict.fromkeys(parts, ""))
    assert all(line.startswith("next: ") for line in lines)
    for words in expected:
        assert words in "\n".join(lines)
    assert ("saturates neither" in "\n".join(lines)) == (case == "a kernel waits")
    assert ("flash is the fastest" in "\n".join(lines)) == (case == "another form is faster")

"""Processors and the GPU driver as Linux reports them, from recorded files; a busy machine."""

import os
from pathlib import Path

import pytest

from mlbert.host import machine
from mlbert.host.machine import gpu_driver, processor_name, read_processors
from programs import write_files

ARM = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"


def x86(name: str, family: int, model: int, stepping: int) -> str:
    return (
        f"processor\t: 0\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: "
        f"{name}\nstepping\t: {stepping}\n"
    )


def test_processors_and_their_generations(tmp_path):
    for cpuinfo, product, name in (
        (
            x86("Intel(R) Xeon(R) Platinum 8168 CPU", 6, 85, 4),
            "",
            "Intel(R) Xeon(R) Platinum 8168 CPU (Skylake-SP)",
        ),
        (
            x86("Intel(R) Xeon(R)  Gold 6226R", 6, 85, 7),
            "",
            "Intel(R) Xeon(R) Gold 6226R (Cascade Lake)",
        ),
        (x86("Intel(R) Core(TM) i9-7900X", 6, 85, 4), "", "Intel(R) Core(TM) i9-7900X"),
        (
            x86("Intel(R) Xeon(R) Platinum 8480C", 6, 143, 8),
            "",
            "Intel(R) Xeon(R) Platinum 8480C (Sapphire Rapids)",
        ),
        (
            x86("AMD EPYC 7742 64-Core Processor", 23, 49, 0),
            "",
            "AMD EPYC 7742 64-Core Processor (Rome)",
        ),
        (
            x86("AMD EPYC 9575F 64-Core Processor", 26, 2, 1),
            "",
            "AMD EPYC 9575F 64-Core Processor (Turin)",
        ),
        (ARM, "Amazon EC2\n", "AWS Graviton4 (Arm Neoverse V2)"),
        (ARM, "NVIDIA GB200 NVL72\n", "NVIDIA Grace (Arm Neoverse V2)"),
        (ARM, "", "Arm Neoverse V2"),
    ):
        write_files(tmp_path, {"proc/cpuinfo": cpuinfo, "sys/class/dmi/id/sys_vendor": product})
        assert processor_name(tmp_path) == name
        assert len(read_processors(tmp_path)) == 1


def test_the_driver(tmp_path):
    for text, version in {
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC "
            "2023\n"
        ): "535.104.05",
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
        ): "570.86.15",
        "": "none",
    }.items():
        write_files(tmp_path, {"proc/driver/nvidia/version": text})
        assert gpu_driver(tmp_path) == version
    assert gpu_driver(tmp_path / "nowhere") == "none"


def write_times(root, busy, idle):
    (root / "proc").mkdir(exist_ok=True)
    columns = f"{busy} 0 0 {idle} 0 0 0 0 0 0"
    lines = [f"cpu{index} {columns}" for index in os.sched_getaffinity(0)]
    (root / "proc/stat").write_text("\n".join(["cpu 1 1 1 1", *lines, "intr 1 2 3"]))


@pytest.mark.parametrize(
    ("load", "busy", "idle", "is_busy"),
    [(0.0, 50, 0, False), (1.0, 50, 0, True), (1.0, 10, 40, False), (1.0, 40, 10, True)],
    ids=["low load", "busy", "no longer busy", "nearly busy"],
)
def test_a_machine_is_busy_if_its_load_is_high_and_its_cores_are_not_idle(
    tmp_path, monkeypatch, load, busy, idle, is_busy
):
    load += len(os.sched_getaffinity(0))
    write_times(tmp_path, 100, 100)
    monkeypatch.setattr(machine, "SYSTEM", tmp_path)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(
        machine.time, "sleep", lambda _: write_times(tmp_path, 100 + busy, 100 + idle)
    )
    monkeypatch.setattr(machine, "idle_share", machine.idle_share.__wrapped__)
    assert machine.busy_load.__wrapped__() == (load if is_busy else None)


def test_the_times_of_this_machine_can_be_read():
    times = machine._cpu_times()
    assert len(times) == len(os.sched_getaffinity(0))
    assert all(sum(spent) > 0 for spent in times.values())


@pytest.mark.parametrize(
    ("load", "idle", "threads"),
    [(0.1, 0.0, 8), (9.5, 0.0, 1), (4.0, 0.5, 4), (4.0, 1.0, 8)],
    ids=["low load", "busy", "half free", "the load is of the past"],
)
def test_a_run_uses_the_free_cores(
    monkeypatch: pytest.MonkeyPatch, load: float, idle: float, threads: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(machine, "idle_share", lambda: idle)
    assert machine.threads_per_rank(None, 1) == threads
    assert machine.threads_per_rank(3, 1) == 3
    assert machine.threads_per_rank(None, 2, is_gpu=True) == 4
    words = machine.fewer_threads_words(None, threads)
    assert (words is None) == (threads == 8)
    assert threads == 8 or f"of the 8 cores: using {threads} thread" in words
    assert machine.fewer_threads_words(1, 1) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert machine.threads_per_rank(None, 1) == 8


@pytest.mark.parametrize(
    ("exports", "quota", "cores"),
    [
        ({}, "max 100000", 8),
        ({}, "250000 100000", 3),
        ({"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "2"}, "max 100000", 2),
        ({"SLURM_CPUS_PER_TASK": "2"}, "", 8),
        ({"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "64"}, "50000 100000", 1),
    ],
)
def test_the_cores_of_a_container_and_of_a_slurm_task(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    exports: dict[str, str],
    quota: str,
    cores: int,
) -> None:
    """Also where Slurm does not bind tasks to their cores."""
    write_files(tmp_path, {"sys/fs/cgroup/cpu.max": quota})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(machine, "SYSTEM", tmp_path)
    for name in ("SLURM_JOB_ID", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in exports.items():
        monkeypatch.setenv(name, value)
    assert machine.usable_cores() == cores

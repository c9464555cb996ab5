"""bind.sh: which cores each rank on a node gets."""

import os
from pathlib import Path

import pytest

from programs import run_checked, write_program

PROGRAM = "benchmarks/bert/implementations/pytorch/launch/bind.sh"


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """Create a stand-in for /sys: 2 NUMA nodes of 8 cores with 2 threads each; 4 GPUs, two per node."""
    system, pci = tmp_path / "devices/system", tmp_path / "bus/pci/devices"
    files = {system / f"cpu/cpu{n}/topology/thread_siblings_list": f"{n % 16},{n % 16 + 16}" for n in range(32)}
    files |= {system / f"node/node{node}/cpulist": cpus for node, cpus in enumerate(("0-7,16-23", "8-15,24-31"))}
    files |= {pci / f"0000:{gpu + 1}b:00.0/numa_node": str(node) for gpu, node in enumerate((1, 1, 0, 0))}
    for path, text in files.items():
        path.parent.mkdir(parents=True)
        path.write_text(f"{text}\n")
    write_program(
        tmp_path / "bin/nvidia-smi",
        '#!/bin/bash\necho called >>"${0}.notes"\n'
        'for i in 0 1 2 3; do echo "${i}, GPU-${i}aaaa, 00000000:$((i + 1))B:00.0"; done\n',
    )
    return tmp_path


def bind_lines(tree_root: Path, server: Path, allowed: str, gpus: bool = False, **exports: object) -> list[str]:
    path = f"{server / 'bin'}:/usr/bin:/bin" if gpus else "/usr/bin:/bin"
    lines = []
    for rank in range(4):
        environment = {"PATH": path, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 4, **exports}
        flags = ("--sysfs", server, "--allowed", allowed, "--show", "x")
        done = run_checked(tree_root / PROGRAM, *flags, env={name: str(value) for name, value in environment.items()})
        lines.append(done.stdout.strip().partition(": ")[2])
    return lines


SPREAD = ["0: 0,1,2,3", "0: 4,5,6,7", "1: 8,9,10,11", "1: 12,13,14,15"]
CASES = {
    "the node of each rank's GPU": ("0-31", True, {}, ["1: 8,9,10,11", "1: 12,13,14,15", "0: 0,1,2,3", "0: 4,5,6,7"]),
    "the GPUs that are visible": ("0-31", True, {"CUDA_VISIBLE_DEVICES": "GPU-3a,GPU-2a,1,0"}, SPREAD),
    "spread over the nodes": ("0-31", False, {}, SPREAD),
    # The end of the second node belongs to a storage client; only the second thread of core 0 is free.
    "the job's CPUs": ("1-11,16-27", False, {}, ["0: 1,2,3,4", "0: 5,6,7,16", "1: 8,9", "1: 10,11"]),
    "a node without CPUs": ("0-2", True, {}, ["0: 0", "0: 0", "0: 1", "0: 2"]),
}


@pytest.mark.parametrize(("allowed", "gpus", "exports", "expected"), CASES.values(), ids=CASES)
def test_ranks_are_bound(
    tree_root: Path, server: Path, allowed: str, gpus: bool, exports: dict[str, object], expected: list[str]
) -> None:
    found = bind_lines(tree_root, server, allowed, gpus=gpus, **exports)
    assert found == [f"node {line.replace(': ', ' cpus ')}" for line in expected]
    if gpus:
        assert (server / "bin/nvidia-smi.notes").read_text().split() == ["called"] * 4


def test_hyper_threads_are_bound_in_pairs(tree_root: Path, server: Path) -> None:
    assert bind_lines(tree_root, server, "0-31", DGXHT=2)[::3] == [
        "node 0 cpus 0,16,1,17,2,18,3,19",
        "node 1 cpus 12,28,13,29,14,30,15,31",
    ]


def test_bound_rank_runs_on_its_cpus_and_exports_its_thread_count(tree_root: Path) -> None:
    environ = {"PATH": os.environ["PATH"], "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    script = "grep Cpus_allowed_list /proc/self/status; echo $CPU_THREADS"
    done = run_checked(tree_root / PROGRAM, "bash", "-c", script, env=environ)
    assert "Cpus_allowed_list" in done.stdout
    assert int(done.stdout.split()[-1]) >= 1

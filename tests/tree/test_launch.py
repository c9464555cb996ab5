"""Ranks on one node: run_and_time.sh and `mlbert launch local` start them,
bind.sh binds them, stage.sh copies data.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlbert.cli.launch import local_command
from programs import assert_refused, free_ports, run_checked, run_quietly, write_program
from user_errors import user_error

PROGRAM = """
import json, os, sys
from pathlib import Path
rank = os.environ.get("RANK", "0")
names = ("CACHES_CLEARED", "WORLD_SIZE", "BATCHSIZE", "CPU_THREADS")
facts = {name: os.environ.get(name) for name in names}
facts["arguments"] = sys.argv[1:]
Path(os.environ["LOGDIR"], f"rank_{rank}.json").write_text(json.dumps(facts))
sys.exit(int(os.environ.get("EXIT_CODE", "0")))
"""
TORCHRUN = "python3 -m torch.distributed.run --standalone --nproc-per-node=2 --no-python"
BIND = "benchmarks/bert/implementations/pytorch/launch/bind.sh"
SPREAD = ["0: 0,1,2,3", "0: 4,5,6,7", "1: 8,9,10,11", "1: 12,13,14,15"]
CASES = {
    "the node of each rank's GPU": (
        "0-31",
        True,
        {},
        ["1: 8,9,10,11", "1: 12,13,14,15", "0: 0,1,2,3", "0: 4,5,6,7"],
    ),
    "the GPUs that are visible": (
        "0-31",
        True,
        {"CUDA_VISIBLE_DEVICES": "GPU-3a,GPU-2a,1,0"},
        SPREAD,
    ),
    "spread over the nodes": ("0-31", False, {}, SPREAD),
    # The end of the second node belongs to a storage client;
    # only the second thread of core 0 is free.
    "the job's CPUs": (
        "1-11,16-27",
        False,
        {},
        ["0: 1,2,3,4", "0: 5,6,7,16", "1: 8,9", "1: 10,11"],
    ),
    "both threads of a core": (
        "0-31",
        False,
        {"DGXHT": 2},
        [
            "0: 0,16,1,17,2,18,3,19",
            "0: 4,20,5,21,6,22,7,23",
            "1: 8,24,9,25,10,26,11,27",
            "1: 12,28,13,29,14,30,15,31",
        ],
    ),
    "a node without CPUs": ("0-2", True, {}, ["0: 0", "0: 0", "0: 1", "0: 2"]),
}
RANK_SCRIPT = r"""
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
words = [os.environ[name] for name in names] + sys.argv[1:]
sys.stdout.write(" ".join(words) + "\n")  # one write per line
dist.barrier()  # a rank that left now would break the connection that another still opens
dist.destroy_process_group()
"""


@pytest.fixture
def system(tree_root: Path, tmp_path: Path) -> Path:
    """Create a system folder whose training program records its arguments; return its config."""
    folder = tmp_path / "a system"
    folder.mkdir()
    (folder / "run_pretraining.py").write_text(PROGRAM)
    config = folder / "config_any_1x1x4x1.sh"
    exports = {
        "CONFIG_FILE": config,
        "LOGDIR": folder,
        "DGXNGPU": 1,
        "RECIPE": "any",
        "BATCHSIZE": 4,
    }
    exports["CLEAR_CACHES"] = 0
    config.write_text("".join(f"export {name}='{value}'\n" for name, value in exports.items()))
    return config


def start(config: Path, tree_root: Path, before: str = "", arguments: str = "", through: str = ""):
    """Source the config, run ``before`` and start the launcher,
    optionally ``through`` another launcher.
    """
    launcher = tree_root / "benchmarks/bert/implementations/pytorch/launch/run_and_time.sh"
    command = f"source '{config}'; {before} exec {through} '{launcher}' {arguments}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return run_quietly("bash", "-c", command, timeout=120, env={"PATH": path})


def test_flags_and_exports_reach_the_program_whose_status_is_passed_on(
    system: Path, tree_root: Path
) -> None:
    done = start(
        system, tree_root, "export BATCHSIZE=8 EXIT_CODE=3;", "--learning_rate '1e-3' 'key=a b'"
    )
    assert done.returncode == 3, done.stderr
    expected = {
        "CACHES_CLEARED": "false",
        "WORLD_SIZE": None,
        "BATCHSIZE": "8",
        "CPU_THREADS": None,
    }
    expected["arguments"] = ["--learning_rate", "1e-3", "key=a b"]
    assert json.loads(system.with_name("rank_0.json").read_text()) == expected


@pytest.mark.parametrize(
    ("exports", "through", "sizes", "dropped"),
    [
        ("CLEAR_CACHES=1", "", [None], ["by this"]),
        ("CLEAR_CACHES=1 CACHES_CLEARED=true", "", [None], ["true"]),  # by the job
        ("DGXNGPU=2 BIND_CPUS=1", "", ["2", "2"], ["false", "false"]),
        ("DGXNGPU=2 CLEAR_CACHES=1", TORCHRUN, ["2", "2"], ["by this", None]),
        (
            "DGXNGPU=2 SLURM_STEP_ID=0 SLURM_LOCALID=1",
            "",
            [None],
            [None],
        ),  # Slurm starts the other rank
    ],
)
def test_each_way_to_start_ranks_and_drop_caches(
    system, tree_root, exports, through, sizes, dropped
) -> None:
    done = start(system, tree_root, f"export {exports};", through=through)
    assert done.returncode == 0, done.stderr
    failed = "Page cache not cleared" in done.stderr
    assert not failed or "by this" in dropped, "dropped twice"
    found = [
        json.loads(system.with_name(f"rank_{rank}.json").read_text()) for rank in range(len(sizes))
    ]
    assert [rank["WORLD_SIZE"] for rank in found] == sizes
    is_bound = "DGXNGPU=2" in exports  # bind.sh divides the CPUs among several ranks
    assert all((rank["CPU_THREADS"] is not None) == is_bound for rank in found)
    own = "false" if failed else "true"
    assert [rank["CACHES_CLEARED"] for rank in found] == [
        own if by == "by this" else by for by in dropped
    ]


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """Create a stand-in for /sys: 2 NUMA nodes of 8 cores with 2 threads each;
    4 GPUs, two per node.
    """
    system = tmp_path / "devices/system"
    pci = tmp_path / "bus/pci/devices"
    files = {
        system / f"cpu/cpu{n}/topology/thread_siblings_list": f"{n % 16},{n % 16 + 16}"
        for n in range(32)
    }
    files |= {
        system / f"node/node{node}/cpulist": cpus
        for node, cpus in enumerate(("0-7,16-23", "8-15,24-31"))
    }
    files |= {
        pci / f"0000:{gpu + 1}b:00.0/numa_node": str(node) for gpu, node in enumerate((1, 1, 0, 0))
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True)
        path.write_text(f"{text}\n")
    show = 'for i in 0 1 2 3; do echo "${i}, GPU-${i}aaaa, 00000000:$((i + 1))B:00.0"; done'
    write_program(
        tmp_path / "bin/nvidia-smi", f'#!/bin/bash\necho called >>"${{0}}.notes"\n{show}\n'
    )
    return tmp_path


def bind_lines(
    tree_root: Path, server: Path, allowed: str, gpus: bool = False, **exports: object
) -> list[str]:
    path = f"{server / 'bin'}:/usr/bin:/bin" if gpus else "/usr/bin:/bin"
    lines = []
    for rank in range(4):
        environment = {"PATH": path, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 4, **exports}
        flags = ["--sysfs", server, "--allowed", allowed, "--show", "x"]
        done = run_checked(
            tree_root / BIND, *flags, env={name: str(value) for name, value in environment.items()}
        )
        lines.append(done.stdout.strip().partition(": ")[2])
    return lines


@pytest.mark.parametrize(("allowed", "gpus", "exports", "expected"), CASES.values(), ids=CASES)
def test_ranks_are_bound(tree_root, server, allowed, gpus, exports, expected) -> None:
    found = bind_lines(tree_root, server, allowed, gpus=gpus, **exports)
    assert found == [f"node {line.replace(': ', ' cpus ')}" for line in expected]
    if gpus:
        assert (server / "bin/nvidia-smi.notes").read_text().split() == ["called"] * 4


def stage(
    tree_root: Path, source: Path, target: Path, largest: int = 0
) -> subprocess.CompletedProcess[str]:
    script = tree_root / "benchmarks/bert/implementations/pytorch/launch/stage.sh"
    return run_quietly(
        "prlimit", f"--fsize={largest or 'unlimited'}", script, source, target, timeout=60
    )


def test_a_folder_is_staged_once(tree_root: Path, tmp_path: Path) -> None:
    source = tmp_path / "a set"
    target = tmp_path / "node/a set"
    (source / "below").mkdir(parents=True)
    (source / "one").write_bytes(os.urandom(300_000))
    (source / "below/it's two").write_bytes(b"two")

    def copied() -> dict[str, tuple[bytes, int, int]]:
        files = [path for path in target.rglob("[!.]*") if path.is_file()]
        return {
            str(p.relative_to(target)): (p.read_bytes(), p.stat().st_mtime_ns, p.stat().st_ino)
            for p in files
        }

    assert (done := stage(tree_root, source, target)).returncode == 0, done.stderr
    first = copied()
    assert {name: found[:2] for name, found in first.items()} == {
        name: ((source / name).read_bytes(), (source / name).stat().st_mtime_ns)
        for name in ("one", "below/it's two")
    }
    assert stage(tree_root, source, target).returncode == 0
    assert copied() == first, "a complete copy is kept"
    (target / "below/it's two").unlink()  # by a clean-up of the disk
    assert stage(tree_root, source, target).returncode == 0
    assert set(copied()) == set(first)
    (source / "one").write_bytes(b"another")
    assert stage(tree_root, source, target).returncode == 0
    assert copied()["one"][0] == b"another"
    mark = target / ".mlbert_staged"
    mark.write_text(mark.read_text().splitlines()[0] + "\n")  # an interrupted copy
    (target / "left over").touch()
    assert stage(tree_root, source, target).returncode == 0
    assert set(copied()) == set(first)
    assert mark.read_text().count("\n") == 3


@pytest.mark.parametrize("why", ["missing", "empty", "target", "full"])
def test_a_failed_copy_is_one_line(tree_root: Path, tmp_path: Path, why: str) -> None:
    source = tmp_path / "set"
    target = tmp_path / "node/set"
    if why != "missing":
        source.mkdir()
    if why in ("target", "full"):
        (source / "one").write_bytes(bytes(100_000))
    if why == "target":
        (tmp_path / "node").touch()
    largest = 50_000 if why == "full" else 0  # bytes of a file
    done = stage(tree_root, source, target, largest)
    assert_refused(done, f"{source} was not copied to {target}: ")
    assert not target.exists()


def test_staging_never_deletes_what_it_did_not_make(tree_root: Path, tmp_path: Path) -> None:
    source = tmp_path / "data/set"
    somewhere = tmp_path / "node"
    source.mkdir(parents=True)
    somewhere.mkdir()
    (source / "one").write_text("one")
    (somewhere / "link").symlink_to(tmp_path / "data")
    (somewhere / "root").symlink_to("/")
    own = somewhere / "own"
    own.mkdir()
    (own / "one").write_text("somebody's copy")
    (somewhere / "own.lock").write_text("somebody's file")
    for target, words in {
        f"/{source}": "the target is the source, or is inside it",
        somewhere / "link/set": "the target is the source, or is inside it",
        f"{somewhere}/root/{source}": "the target is the source, or is inside it",
        source / "copies/set": "the target is the source, or is inside it",
        tmp_path / "data": "the source is inside the target",
        somewhere / "link": "the source is inside the target",
        own: "the target already exists, and stage.sh did not make it",
        own / "one": "the target is a file",
    }.items():
        assert_refused(stage(tree_root, source, Path(target)), words)
        assert [path.name for path in source.iterdir()] == ["one"]
        assert (source / "one").read_text() == "one"
    assert (own / "one").read_text() == "somebody's copy"
    assert (somewhere / "own.lock").read_text() == "somebody's file"
    (somewhere / "empty").mkdir()
    assert stage(tree_root, source, somewhere / "empty").returncode == 0
    assert (somewhere / "empty/one").read_text() == "one"


def test_a_mount_of_the_source_is_the_source(tree_root: Path, tmp_path: Path) -> None:
    """Its real path is another one."""
    source = tmp_path / "data/set"
    mount = tmp_path / "node"
    source.mkdir(parents=True)
    mount.mkdir()
    (source / "one").write_text("one")
    script = tree_root / "benchmarks/bert/implementations/pytorch/launch/stage.sh"
    line = 'mount --bind "$1" "$2" || exit 77; exec "$3" "$4" "$2/set"'
    words = ["bash", "-c", line, "bash", source.parent, mount, script, source]
    done = run_quietly("unshare", "--mount", *words)
    if "unshare" in done.stderr or done.returncode == 77:
        pytest.skip("mounting a file system is not permitted here")
    assert_refused(done, "the target is the source, or is inside it")
    assert (source / "one").read_text() == "one"


def start_local(script: Path, *words: str, **exports: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "mlbert",
        "launch",
        "local",
        *words,
        str(script),
        "a.yaml",
        "--n=1",
    ]
    environ = {**os.environ, **exports}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )


def lines(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-2000:]
    return sorted(out.splitlines())


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (path := tmp_path / "script.py").write_text(RANK_SCRIPT, encoding="utf-8")
    return path


def test_one_node_starts_all_ranks_with_the_script_arguments(script: Path) -> None:
    assert lines(start_local(script, "-n", "2")) == ["0 2 0 2 a.yaml --n=1", "1 2 1 2 a.yaml --n=1"]


@pytest.mark.slow
def test_two_nodes_from_flags_and_from_environment_variables(script: Path) -> None:
    port = str(*free_ports(1))
    flags = ["-n", "1", "--world_size", "2", "--master_addr", "127.0.0.1", "--master_port", port]
    first = start_local(script, *flags, "--node_rank", "0")
    exports = {"WORLD_SIZE": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    second = start_local(script, "-n", "1", **exports)
    assert lines(first) == ["0 2 0 1 a.yaml --n=1"]
    assert lines(second) == ["1 2 0 1 a.yaml --n=1"]


def test_inconsistent_world_sizes_are_errors() -> None:
    for numbers, code, subject in (
        ((2, 3, 0, "127.0.0.1", 7501), "config.conflict", "--world-size 3"),
        ((2, 4, 2, "127.0.0.1", 7501), "config.conflict", "--world-size 4"),
        ((2, 4, 0, "127.0.0.1", None), "config.missing", "--master-port"),
    ):
        with user_error(code, subject):
            local_command(*numbers)


@pytest.mark.parametrize(
    ("end", "status", "stderr"),
    [
        ("sys.exit('mlbert: error: no data')", 1, "mlbert: error: no data\n"),
        pytest.param("os.kill(os.getpid(), 9)", 3, "", marks=pytest.mark.slow),
    ],
)
def test_failed_rank_decides_the_output_and_exit_status(
    tmp_path: Path, end: str, status: int, stderr: str
) -> None:
    """Print the rank's own error without torchrun's report;
    exit with its status, or 3 if it was killed.
    """
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, sys, time\nif os.environ['RANK'] == '1': {end}\ntime.sleep(100)\n"
    )
    process = start_local(script, "-n", "2")
    assert (process.communicate(timeout=120)[1], process.returncode) == (stderr, status)

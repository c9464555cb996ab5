"""tools/site_check.sh: a rehearsal on the CPU, what it hides, and wrong options."""

import getpass
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import site_check
from programs import run_quietly, write_program

# The second GPU is slower: its clock is lower at the same power.
SAMPLES = """\
0, 690.0, 1700, 3201, 60
1, 690.5, 1500, 3201, 71
0, 692.0, 1710, 3201, 61
1, [N/A], 1500, 3201, 71
1, 691.5, 1510, 3201, 72
"""


def checked(tree_root: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    return run_quietly(tree_root / "tools" / "site_check.sh", *words, env=environment)


@pytest.mark.slow
def test_a_rehearsal_runs_every_variant_twice_and_writes_one_file(
    tree_root: Path, tmp_path: Path
) -> None:
    out = tmp_path / "site.txt"
    tools = tmp_path / "bin"
    write_program(tools / "nvidia-smi", f"#!/bin/bash\ncat <<'END'\n{SAMPLES}END\n")
    path = f"{tools}:{os.environ['PATH']}"
    done = checked(tree_root, "--dry-run", "--seconds", "5", "--out", str(out), PATH=path)
    assert done.returncode == 0, done.stdout + done.stderr + out.read_text()
    text = out.read_text()
    table = text.split("== runs ==\n")[1].split("\n\n")[0].splitlines()
    names = ["config", "segmented", "fp32 weights"]
    assert [line.split("  ")[0] for line in table[1:]] == [*names, *reversed(names)]
    assert all(float(line.split()[-1]) > 0 for line in table[1:])
    assert "all-reduce of 256 MiB: " in text
    assert text.count("GPU 1: watts 691, sm_mhz 1505") == 6
    assert text.count("exit status 0") == 7
    assert socket.gethostname() not in text


def test_power_is_the_median_of_each_gpu() -> None:
    assert site_check.power_table(SAMPLES).splitlines() == [
        "GPU 0: watts 691, sm_mhz 1705, memory_mhz 3201, celsius 60 (2 samples)",
        "GPU 1: watts 691, sm_mhz 1505, memory_mhz 3201, celsius 72 (2 samples)",
    ]
    assert site_check.power_table("no devices\n") == "power and clocks: no devices"


def test_names_of_host_user_and_home_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu17.site.example")
    monkeypatch.setattr(getpass, "getuser", lambda: "jdoe")
    monkeypatch.setenv("HOME", "/users/jdoe")
    text = "gpu17.site.example gpu17 /users/jdoe/data /scratch-jdoe"
    assert site_check.without_names(text) == "node node ~/data /scratch-user"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "none.sh"], "--config: none.sh does not exist. Name a config_<system>.sh"),
        (["--seconds", "1"], "--seconds: 1 is not from 5 to 600. Give for example 45"),
        (["--out", "none/x"], "--out: none does not exist. Create it, or name another file"),
        ([], "torch sees no GPU. --dry-run rehearses the check on the CPU"),
    ],
)
def test_wrong_options_are_one_line(
    tree_root: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    done = run_quietly(
        tree_root / "tools" / "site_check.sh",
        *words,
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert (done.returncode, done.stderr) == (2, f"site_check: error: {message}\n")
    assert not list(tmp_path.iterdir())

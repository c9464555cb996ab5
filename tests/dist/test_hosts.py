"""``mlbert launch hosts``: ranks on several hosts, and how they end.

In place of ssh runs a program that does on this machine what sshd does: it starts a shell with
almost no variables in another folder. One test uses sshd itself.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlbert
from programs import free_ports, run_quietly, wait_for, write_program
from test_pretrain_ranks import STEP, stage1
from tiny_phases import newest, write_sentences
from training_settings import read_metrics, read_summary

HOSTS = ("node-a", "node-b")
SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
host=$1
shift
echo $$ >"{folder}/$host.pid"
[ "$host" != unknown ] || {{ echo "ssh: no host named unknown" >&2; exit 255; }}
cd /
exec env -i HOME="$HOME" PATH=/usr/bin:/bin sh -c "$*"
"""
NOTE = """
import json, os, sys
from pathlib import Path
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NCCL_DEBUG", "MINE", "NOT_MINE")
facts = {name: os.environ.get(name) for name in names}
facts |= {"folder": os.getcwd(), "arguments": sys.argv[2:]}
Path(sys.argv[1], f"rank_{facts['RANK']}.json").write_text(json.dumps(facts))
print("rank", facts["RANK"])
sys.exit(5 if facts["RANK"] == os.environ.get("MINE") else 0)
"""
SLEEP = """
import os, sys, time
from pathlib import Path
Path(sys.argv[1], f"rank_{os.environ['RANK']}.pid").write_text(str(os.getpid()))
time.sleep(300)
"""
TRAIN = """
import sys
sys.path[:0] = {folders!r}
from test_pretrain_ranks import pretrain
pretrain(1, *sys.argv[1:])
"""
ODD_WORDS = ["a b", "it's", '"$HOME"', "`id`", "!x", "*", "\\", "é\n", "", "--", "-n", "&;"]
FOREVER = 400  # steps, more than any test waits for


class Lab:
    """Two hosts, which are this machine.

    Args:
        folder: of the programs and files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "bin"
        write_program(self.programs / "ssh", SSH.format(folder=folder))

    def command(self, *words: object, hosts: str = ",".join(HOSTS)) -> list[str]:
        (port,) = free_ports(1)
        start = [sys.executable, "-m", "mlbert", "launch", "hosts", "--hosts", hosts, "-n", "1"]
        address = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        return [*start, *address, *map(str, words)]

    def environ(self, **exports: str) -> dict[str, str]:
        package = str(Path(mlbert.__file__).parents[1])
        path = f"{self.programs}:{os.environ['PATH']}"
        own = {"PATH": path, "PYTHONPATH": package, "GLOO_SOCKET_IFNAME": "lo", "CPU_THREADS": "1"}
        return {**os.environ, **own, **exports}

    def run(self, *words: object, **exports: str) -> subprocess.CompletedProcess[str]:
        environ = self.environ(**exports)
        return run_quietly(*self.command(*words), cwd=self.folder, env=environ, timeout=200)

    def start(self, *words: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*words),
            cwd=self.folder,
            env=self.environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def processes(self, host: str) -> list[int]:
        """Return the processes of a host."""
        found = [int((self.folder / f"{host}.pid").read_text())]
        for pid in found:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found += map(int, children.read_text().split())
        return found

    def script(self, text: str) -> Path:
        path = self.folder / "program.py"
        path.write_text(text)
        return path


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    yield made
    for path in tmp_path.glob("*.pid"):  # of a test that failed
        try:
            os.kill(int(path.read_text()), signal.SIGKILL)
        except OSError:
            continue


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def training(lab: Lab) -> Path:
    """Return a program that is ``mlbert pretrain`` with the preset `tiny`."""
    folders = [path for path in sys.path if path.endswith(("tests", "tests/dist"))]
    return lab.script(TRAIN.format(folders=folders))


def read_notes(folder: Path) -> list[dict[str, object]]:
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(len(HOSTS))]


def test_words_and_variables_reach_the_hosts_and_a_status_comes_back(lab: Lab) -> None:
    program = lab.script(NOTE)
    exports = {"NCCL_DEBUG": "WARN", "MINE": "1", "NOT_MINE": "x"}
    done = lab.run("--export", "MINE", program, lab.folder, *ODD_WORDS, **exports)
    assert done.returncode == 5, done.stderr
    assert sorted(done.stdout.splitlines()) == ["node-a: rank 0", "node-b: rank 1"]
    (line,) = done.stderr.splitlines()
    assert line.startswith("mlbert: error: node-b failed first, with status 5.")
    for rank, note in enumerate(read_notes(lab.folder)):
        expected = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "NCCL_DEBUG": "WARN"}
        expected |= {"MINE": "1", "NOT_MINE": None}
        assert note == {**expected, "folder": str(lab.folder), "arguments": ODD_WORDS}


def test_a_host_that_ssh_cannot_reach(lab: Lab) -> None:
    """The others are ended before their ranks wait for it."""
    lab.script(SLEEP)
    command = lab.command("program.py", lab.folder, hosts="node-a,unknown")
    done = run_quietly(*command, cwd=lab.folder, env=lab.environ(), timeout=100)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert "unknown: ssh: no host named unknown" in lines
    assert lines[-1].startswith("mlbert: error: ssh unknown: could not start this program there")
    assert lines[-1].endswith("[program.failed]")
    assert not is_running(int((lab.folder / "node-a.pid").read_text()))


@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_a_signal_ends_all_processes_of_all_hosts(lab: Lab, number: int, status: int) -> None:
    """Also if the launcher itself is killed."""
    launcher = lab.start(lab.script(SLEEP), lab.folder)
    ranks = [lab.folder / f"rank_{rank}.pid" for rank in range(len(HOSTS))]
    wait_for(lambda: all(path.exists() and path.read_text() for path in ranks), 60)
    known = [pid for host in HOSTS for pid in lab.processes(host)]
    assert {int(path.read_text()) for path in ranks} < set(known)
    launcher.send_signal(number)
    launcher.communicate(timeout=60)
    assert launcher.returncode == status
    wait_for(lambda: not any(map(is_running, known)), 60)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_sentences(tmp_path / "text.txt", 900)


@pytest.mark.slow
def test_two_hosts_train_as_two_ranks_of_one(lab: Lab, text: Path) -> None:
    program = training(lab)
    done = lab.run(program, *stage1(text, Path("over-ssh")))
    assert done.returncode == 0, done.stderr
    assert "node-a: finished: held-out accuracy" in done.stdout
    assert "node-b: " not in done.stdout
    local = [sys.executable, "-m", "mlbert", "launch", "local", "-n", 2, program]
    options = {"cwd": lab.folder, "env": lab.environ(), "timeout": 200}
    done = run_quietly(*local, *stage1(text, Path("local")), **options)
    assert done.returncode == 0, done.stderr
    assert_equal_losses(lab.folder / "over-ssh", lab.folder / "local")


def assert_equal_losses(ours: Path, others: Path) -> None:
    losses = [[point["loss"] for point in read_metrics(folder)] for folder in (ours, others)]
    assert losses[0] == losses[1]
    assert len(losses[0]) >= 12
    assert read_summary(ours)["ranks"] == 2


@pytest.mark.slow
def test_a_host_that_dies_ends_the_run_which_then_resumes(lab: Lab, text: Path) -> None:
    program = training(lab)
    words = stage1(text, Path("out"), FOREVER)
    launcher = lab.start(program, *words)
    checkpoints = lab.folder / "out/run_0/checkpoints"
    wait_for(lambda: len(list(checkpoints.glob("step_*"))) > 1, 100)
    known = [lab.processes(host) for host in HOSTS]
    for pid in known[1]:
        os.kill(pid, signal.SIGKILL)
    _, errors = launcher.communicate(timeout=100)
    assert launcher.returncode in (3, 128 + signal.SIGKILL)
    assert "mlbert: error: node-b failed first, with status 137" in errors or (
        "node-a: mlbert: error: rank 1 on" in errors
    )
    wait_for(lambda: not any(map(is_running, [*known[0], *known[1]])), 60)
    steps = int(newest(lab.folder / "out").name.removeprefix("step_")) + 20
    assert steps < FOREVER
    words[words.index("--tokens") + 1] = steps * STEP
    done = lab.run(program, *words)
    assert done.returncode == 0, done.stderr
    assert "node-a: resumed at step" in done.stdout


@pytest.mark.slow
def test_ctrl_c_saves_a_checkpoint(lab: Lab, text: Path) -> None:
    launcher = lab.start(training(lab), *stage1(text, Path("out"), FOREVER))
    checkpoints = lab.folder / "out/run_0/checkpoints"
    wait_for(lambda: len(list(checkpoints.glob("step_*"))) > 1, 100)
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 130
    assert "a checkpoint is saved. Run the same command to resume." in output


@pytest.mark.slow
def test_two_hosts_over_sshd(lab: Lab, text: Path) -> None:
    with_sshd = Sshd(lab.folder)
    try:
        write_program(lab.programs / "ssh", with_sshd.client())
        done = lab.run(training(lab), *stage1(text, Path("out")))
        assert done.returncode == 0, done.stderr
        assert "node-a: finished: held-out accuracy" in done.stdout
        assert read_summary(lab.folder / "out")["ranks"] == 2
        launcher = lab.start(lab.script(SLEEP), lab.folder)
        ranks = [lab.folder / f"rank_{rank}.pid" for rank in range(len(HOSTS))]
        wait_for(lambda: all(path.exists() and path.read_text() for path in ranks), 60)
        launcher.kill()
        wait_for(lambda: not any(is_running(int(path.read_text())) for path in ranks), 90)
    finally:
        with_sshd.stop()


class Sshd:
    """An ssh server on this machine, with which only its own client can connect."""

    def __init__(self, folder: Path) -> None:
        programs = [shutil.which(name, path="/usr/sbin:/usr/bin") for name in ("sshd", "ssh")]
        if None in programs:
            pytest.skip("needs sshd and ssh (Debian: openssh-server)")
        if os.geteuid() == 0 and not Path("/run/sshd").is_dir():
            pytest.skip("needs /run/sshd, as sshd does if root starts it")
        self._folder = folder / "sshd"
        self._folder.mkdir()
        self._ssh = programs[1]
        for name in ("host", "user"):
            words = ["-q", "-t", "ed25519", "-N", "", "-f", self._folder / name]
            assert run_quietly("ssh-keygen", *words).returncode == 0
        (self._port,) = free_ports(1)
        settings = {
            "Port": self._port,
            "ListenAddress": "127.0.0.1",
            "HostKey": self._folder / "host",
            "AuthorizedKeysFile": self._folder / "user.pub",
            "PidFile": "none",
            "StrictModes": "no",
            "UsePAM": "no",
            "PermitRootLogin": "yes",
        }
        self._write("server", settings)
        log = (self._folder / "log").open("wb")
        self._server = subprocess.Popen(
            [str(programs[0]), "-D", "-e", "-f", str(self._folder / "server")], stderr=log
        )
        time.sleep(0.5)
        assert self._server.poll() is None, (self._folder / "log").read_text()

    def client(self) -> str:
        """Return a program ssh that connects to this server for any host."""
        settings = {
            "HostName": "127.0.0.1",
            "Port": self._port,
            "IdentityFile": self._folder / "user",
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": self._folder / "known",
            "StrictHostKeyChecking": "no",
            "LogLevel": "ERROR",
        }
        self._write("client", settings)
        return f'#!/bin/sh\nexec {self._ssh} -F "{self._folder / "client"}" "$@"\n'

    def stop(self) -> None:
        self._server.terminate()
        self._server.wait()

    def _write(self, name: str, settings: dict[str, object]) -> None:
        lines = [f"{key} {value}" for key, value in settings.items()]
        (self._folder / name).write_text("\n".join(lines) + "\n")

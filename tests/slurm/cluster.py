"""Run a real Slurm cluster on one machine: munged, slurmctld and one slurmd per node,
without systemd.

    python tests/slurm/cluster.py 4      # opens a shell with a cluster of 4 nodes;
                                         exit stops the cluster

Everything is in one temporary folder: configuration, key, sockets, logs, spool. Each node has its
own host name; nodes share the network, so their names cannot be resolved. Each claims 8 GPUs, which
are copies of /dev/null. Needs root and Debian's packages slurmctld, slurmd, slurm-client and munge.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
NUM_GPUS = 8
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmdLogFile={folder}/%n/slurmd.log
SlurmdSpoolDir={folder}/%n/spool
TmpFS={folder}/%n/tmp
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
MinJobAge=7200
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
EnforcePartLimits=ALL
ReturnToService=1
GresTypes=gpu
MailProg=/bin/true
SlurmdTimeout=10
SlurmctldTimeout=10
SchedulerParameters=sched_interval=2,batch_sched_delay=0
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=NO
"""
NODE = (
    "NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs=16 RealMemory=64000 "
    "Gres=gpu:8"
)


def unavailable_reason() -> str | None:
    """Return why no cluster can be started here, or None if it can."""
    missing = [name for name in PROGRAMS if not shutil.which(name, path=SYSTEM_PATH)]
    if missing:
        packages = "apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge"
        return f"Slurm is not installed ({', '.join(missing)} missing): {packages}"
    if os.geteuid() != 0:
        return "slurmd needs root, but this user is not root"
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode:
        return "this root user may not set a node's host name (unshare --uts)"
    return None


def free_ports(count: int) -> list[int]:
    """Return free TCP ports below Linux's range for outgoing connections."""
    found: list[int] = []
    while len(found) < count:
        port = 6800 + secrets.randbelow(7000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in found:
                found.append(port)
    return found


class Cluster:
    """A running cluster, with all its files in a folder; see `running`."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder = folder
        self.nodes = [f"node{i + 1}" for i in range(num_nodes)]
        # Of client programs.
        self.environment = {"PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}", "USER": "root"}
        self.environment |= {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "HOME": os.environ.get("HOME", "/"),
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        self._write_files()
        munge = self.folder / "munge"
        files = {
            "socket": "socket",
            "key-file": "key",
            "pid-file": "pid",
            "seed-file": "seed",
            "log-file": "log",
        }
        self._daemon(
            "munged",
            "--foreground",
            "--force",
            *(f"--{flag}={munge / name}" for flag, name in files.items()),
        )
        self.wait_for((munge / "socket").exists, 10, "munged's socket")
        self._daemon("slurmctld", "-D", "-c")
        for node in self.nodes:
            self.start_node(node)
        self.wait_for(lambda: self.states() == {"idle"}, 30, "idle nodes")

    def _write_files(self) -> None:
        for name in ("munge", "state", "gpus", *(f"{node}/tmp" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        for index in range(NUM_GPUS):
            os.mknod(
                self.folder / "gpus" / f"nvidia{index}", 0o666 | stat.S_IFCHR, os.makedev(1, 3)
            )
        host = socket.gethostname().split(".")[0]
        controller_port, *ports = free_ports(1 + len(self.nodes))
        lines = [
            NODE.format(name=node, port=port) for node, port in zip(self.nodes, ports, strict=True)
        ]
        text = CONFIG.format(
            host=host, folder=self.folder, controller_port=controller_port, nodes="\n".join(lines)
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text(
            f"Name=gpu File={self.folder}/gpus/nvidia[0-{NUM_GPUS - 1}]\n"
        )

    def _daemon(self, name: str, *arguments: str, label: str = "") -> None:
        path = shutil.which(name, path=SYSTEM_PATH)
        assert path
        with (self.folder / f"{label or name}.out").open("ab") as log:
            options = {
                "stdin": subprocess.DEVNULL,
                "stdout": log,
                "stderr": log,
                "start_new_session": True,
            }
            options |= {"env": self.environment, "cwd": self.folder}
            self._daemons[label or name] = subprocess.Popen([path, *arguments], **options)

    def start_node(self, node: str) -> None:
        program = 'hostname "$0" && exec slurmd -D -N "$0"'
        self._daemon("unshare", "--uts", "sh", "-c", program, node, label=node)

    def kill_node(self, node: str) -> None:
        """Simulate a power failure: kill the node's daemon and everything that runs on it."""
        own = f"{self.folder}/{node}/".encode()
        victims = [
            self._daemons.pop(node).pid,
            *self._processes(f"SLURMD_NODENAME={node}".encode()),
        ]
        victims += [pid for pid in self._processes() if own in _read(pid, "cmdline")]
        # slurmstepd has no node name in its environment, but its children do.
        victims += [
            parent for parent in map(_parent, victims) if b"slurmstepd" in _read(parent, "cmdline")
        ]
        for pid in dict.fromkeys(victims):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _processes(self, *markers: bytes) -> list[int]:
        """Return the cluster's processes that have these markers in their environment."""
        wanted = {f"SLURM_CONF={self.folder}/slurm.conf".encode(), *markers}
        others = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return [
            pid
            for pid in others
            if pid != os.getpid() and wanted <= set(_read(pid, "environ").split(b"\0"))
        ]

    def stop(self) -> None:
        with contextlib.suppress(subprocess.SubprocessError):
            self.run("scancel", "--user=root", timeout=10)
            self.wait_for(
                lambda: not self.run("squeue", "--noheader").stdout.strip(), 5, "an empty queue"
            )
        for daemon in self._daemons.values():
            daemon.terminate()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and any(
            daemon.poll() is None for daemon in self._daemons.values()
        ):
            time.sleep(0.05)
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for daemon in self._daemons.values():
            daemon.wait(10)
        self._daemons.clear()

    def run(
        self, *words: str | Path, timeout: float = 30, **options: object
    ) -> subprocess.CompletedProcess[str]:
        options |= {
            "env": {**self.environment, **options.pop("environment", {})},
            "timeout": timeout,
        }
        return subprocess.run(
            [str(word) for word in words], capture_output=True, text=True, check=False, **options
        )

    def states(self) -> set[str]:
        """Return the states of the nodes, without flags."""
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()
        return set(lines) if len(lines) == len(self.nodes) else set()

    def job(self, job: str) -> dict[str, str]:
        """Return the job's fields in Slurm: JobState, ExitCode, Restarts, NodeList, ..."""
        text = self.run("scontrol", "--oneliner", "show", "job", job).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def rank(self, job: str, rank: int) -> int:
        own = self._processes(f"SLURM_JOB_ID={job}".encode(), f"SLURM_PROCID={rank}".encode())
        return min(pid for pid in own if b"run_pretraining.py" in _read(pid, "cmdline"))

    def running(self, program: str) -> list[int]:
        """Return the processes of jobs that Python runs with a script of this name."""
        words = ((pid, _read(pid, "cmdline").split(b"\0")) for pid in self._processes())
        return [pid for pid, some in words if len(some) > 1 and some[1].endswith(program.encode())]

    def kill_step_daemon(self, job: str, rank: int) -> None:
        pid = self.rank(job, rank)
        while b"slurmstepd" not in _read(pid, "cmdline"):
            pid = _parent(pid)
        os.kill(pid, signal.SIGKILL)

    def wait_for(self, condition: object, seconds: float, description: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise subprocess.SubprocessError(
                    f"no {description} within {seconds:.0f} s; logs in {self.folder}"
                )
            time.sleep(0.2)

    def wait_for_end(self, job: str, seconds: float = 240) -> dict[str, str]:
        running = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED", None)
        self.wait_for(
            lambda: self.job(job).get("JobState") not in running, seconds, f"end of job {job}"
        )
        return self.job(job)


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _parent(pid: int) -> int:
    text = _read(pid, "stat").rpartition(b")")[2].split()
    return int(text[1]) if len(text) > 1 else 0


@contextlib.contextmanager
def running(num_nodes: int) -> Iterator[Cluster]:
    """Start a cluster, and stop it and delete its folder afterwards."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        cluster = Cluster(Path(folder), num_nodes)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def main() -> None:
    reason = unavailable_reason()
    if reason:
        sys.exit(f"error: {reason}")
    with running(int(sys.argv[1]) if len(sys.argv) > 1 else 4) as cluster:
        print(cluster.run("sinfo").stdout, "exit stops the cluster.", sep="\n")
        subprocess.run(
            [os.environ.get("SHELL", "bash")],
            env={**os.environ, **cluster.environment},
            check=False,
        )


if __name__ == "__main__":
    main()

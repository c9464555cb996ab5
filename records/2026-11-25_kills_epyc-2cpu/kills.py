"""Kill, stop or end a random rank of a small run at a random moment, once for each case, and resume the run.

PYTHONPATH=tests:tests/slurm python kills.py WORK_FOLDER SEED WORKERS [CASE...]

Prints a line for each case and, after it, a line for everything that differs from docs/how_a_run_ends.md. Needs root,
Slurm, sshd and mpirun.
"""

import contextlib
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cluster import free_ports, running
from slurm_site import Site
from stored_sets import VOCAB_SIZE, make_rows, random_lengths, write_set
from training_settings import SHAPE

ROOT = Path(__file__).parents[2]
# Launcher, nodes and ranks per node.
LAYOUTS = {
    "run_and_time.sh": ((1, 2), (1, 3)),
    "launch local": ((1, 2), (1, 3)),
    "torchrun": ((1, 2), (1, 3)),
    "ssh": ((2, 1), (2, 1), (2, 2)),
    "mpirun": ((2, 1), (2, 1), (2, 2)),
    "run.sub": ((2, 1), (2, 1), (3, 1)),
}
SHARES = {"run_and_time.sh": 4, "launch local": 4, "torchrun": 4, "ssh": 12, "mpirun": 12, "run.sub": 14}
MOMENTS = {"start": 10, "training": 11, "evaluation": 11, "checkpoint": 10, "end": 8}
SIGNALS = {"SIGKILL": 7, "SIGSTOP": 2, "SIGTERM": 1}
NUM_CASES = 50
DATA = Path(sys.argv[1]).resolve() / "data"
JOIN_SECONDS = 100  # ranks of a busy machine start slowly
STEPS = 60
EVALUATIONS = 8  # at least
RUN = {
    "MAX_STEPS": STEPS,
    "SAVE_CHECKPOINT_STEPS": 5,
    "EVAL_ITER_START_SAMPLES": 40,
    "EVAL_ITER_SAMPLES": 80,
    "NUM_EVAL_EXAMPLES": 600,
    "SYNTH_DATA": 0,
    "JOIN_TIMEOUT": JOIN_SECONDS,
    "SEED": 5,
}
# Seconds after which all processes must have ended. Docs: 25 s of silence, 30 s more until a launcher kills a suspended
# process, ten minutes before the first step, and 130 s for a rank that joins and dies. Doubled for a busy machine.
BOUNDS = {"SIGKILL": 60, "SIGTERM": 60, "SIGSTOP": 150}
START_BOUNDS = {"SIGKILL": 200, "SIGTERM": 200, "SIGSTOP": 700}
RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
NAMED = re.compile(
    r"rank (\d+) on (\S+) (?:died|is silent|hangs|stood still|failed after|joined, then)|rank ([\d, ]+) did not join"
)
print_lock = threading.Lock()


@dataclass
class Case:
    """What happens to which run, and what was seen."""

    number: int
    launcher: str
    nodes: int
    per_node: int
    signum: str
    victim: int
    moment: str
    share: float  # of the time, or of the occasions, that the moment allows

    @property
    def layout(self) -> str:
        """Return launcher, nodes and ranks per node."""
        return f"{self.launcher} {self.nodes}x{self.per_node}"

    def __str__(self) -> str:
        return f"{self.number:02d} | {self.layout} | {self.signum} | rank {self.victim} | {self.moment}"


def draw_cases(seed: int, count: int) -> list[Case]:
    """Return the cases of a seed."""
    draw = random.Random(seed)
    launchers = [name for name, share in SHARES.items() for _ in range(share)]
    cases = []
    for number in range(count):
        launcher = launchers[number * 7 % len(launchers)]  # 7 and 50 have no common factor: all launchers in turns
        nodes, per_node = draw.choice(LAYOUTS[launcher])
        signum, moment = (draw.choices(list(one), list(one.values()))[0] for one in (SIGNALS, MOMENTS))
        victim, share = draw.randrange(nodes * per_node), draw.random()
        cases.append(Case(number, launcher, nodes, per_node, signum, victim, moment, share))
    return cases


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[dict[str, str]]:
    """Run a real sshd for each of two addresses, with its own host name; yield exports with which ssh reaches them."""
    folder.mkdir(parents=True)
    (port,) = free_ports(1)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "config").write_text(
        f"Host *\nPort {port}\nIdentityFile {folder}/user\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n"
        "LogLevel ERROR\n"
    )
    ssh = folder / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder}/config "$@"\n')
    ssh.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    daemons = []
    for number in (1, 2):
        options = {"ListenAddress": f"127.0.0.{number}:{port}", "HostKey": folder / "host", "StrictModes": "no"}
        options |= {"AuthorizedKeysFile": folder / "user.pub", "PermitRootLogin": "yes", "MaxStartups": "100"}
        options |= {"PidFile": "none", "UsePAM": "no"}
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        program = 'hostname "$0" && exec /usr/sbin/sshd -D -e -f /dev/null "$@"'
        command = ["unshare", "--uts", "sh", "-c", program, f"host{number}", *words]
        with (folder / f"sshd{number}.txt").open("w") as log:
            daemons.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
    try:
        time.sleep(1)
        mpi = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_oob_tcp_if_include": "lo",
        }
        yield {"PATH": f"{ssh.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}", **mpi}
    finally:
        for daemon in daemons:
            daemon.terminate()


def processes(site: Site) -> dict[int, dict[str, str]]:
    """Return the environment of each process of the site's runs."""
    mark, found = f"LOGDIR={site.runs}/".encode(), {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and mark in (text := (entry / "environ").read_bytes()):
                variables = (word.partition("=") for word in text.decode(errors="replace").split("\0"))
                found[int(entry.name)] = {name: value for name, _, value in variables}
    return found


def find_rank(site: Site, rank: int) -> int | None:
    """Return the process of a rank, which first is a shell that starts it; None if it has ended."""
    found = {}
    for pid, variables in processes(site).items():
        name = next((name for name in RANK_NAMES if name in variables), None)
        # The shell of a Slurm job has the variable too.
        is_rank = name and variables[name] == str(rank) and (name != "SLURM_PROCID" or "SLURM_STEP_ID" in variables)
        if is_rank:
            found[pid] = 0
            with contextlib.suppress(OSError):
                found[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    own = [pid for pid, parent in found.items() if parent not in found]
    return min(own, default=None)


class Attempt:
    """A started run of a site: its end and its output."""

    def __init__(self, site: Site, case: Case, exports: dict[str, str], **settings: object) -> None:
        self.site, self.case = site, case
        site.config.parents[4].joinpath("bert_config.json").write_text(json.dumps({**SHAPE, "vocab_size": VOCAB_SIZE}))
        data = {"DATADIR_PHASE2": DATA / "train", "EVALDIR": DATA / "eval"}
        overrides = {**RUN, **data, "DGXNNODES": case.nodes, "DGXNGPU": case.per_node, **settings}
        overrides |= {"HOSTS": "127.0.0.1,127.0.0.2", "MASTER_PORT": free_ports(1)[0]}
        if case.launcher == "run.sub":
            self._job = site.submit(nodes=case.nodes, **overrides)
            return
        command = {
            "run_and_time.sh": "../pytorch/launch/run_and_time.sh",
            "launch local": f"python3 -m mlbert launch local -n {case.per_node} run_pretraining.py",
            "torchrun": f"torchrun --standalone --nproc-per-node {case.per_node} run_pretraining.py",
            "ssh": "../pytorch/launch/run_multinode.sh",
            "mpirun": "../pytorch/launch/run_multinode.sh --mpirun",
        }[case.launcher]
        words = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in overrides.items())
        line = f'source "$1" && export {words} && exec {command}'
        environment = {**os.environ, **exports, "PYTHONPATH": str(ROOT / "benchmarks/bert/implementations/pytorch")}
        environment |= {"OMP_NUM_THREADS": "1"}
        self._path = site.runs.with_name(f"output-{len(list(site.runs.parent.glob('output-*')))}.txt")
        with self._path.open("wb") as output:
            self._process = subprocess.Popen(
                ["bash", "-c", line, "bash", site.config],
                env=environment,
                cwd=site.config.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def output(self) -> str:
        """Return the output so far."""
        if self.case.launcher == "run.sub":
            return self.site.output(self._job)
        return self._path.read_text(errors="replace")

    def status(self) -> int | None:
        """Return the launcher's exit status; None while it runs."""
        if self.case.launcher != "run.sub":
            return self._process.poll()
        job = self.site.cluster.job(self._job)
        if job.get("JobState") in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", None):
            return None
        status, number = job["ExitCode"].split(":")
        return int(status) or 128 * (number != "0") + int(number)

    def wait(self, seconds: float) -> int | None:
        """Wait for the end of the launcher and of everything it started; None if it takes longer."""
        deadline = time.monotonic() + seconds
        while self.status() is None or processes(self.site):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.5)
        return self.status()

    def kill(self) -> list[int]:
        """Kill what is left, and return it."""
        left = list(processes(self.site))
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.case.launcher == "run.sub":
            self.site.cluster.run("scancel", self._job)
        return left


def steps_done(site: Site) -> int:
    """Return the last step in the metrics file."""
    path = site.runs / "out/run_0/metrics.jsonl"
    found = re.findall(r'"step": (\d+)', path.read_text()) if path.exists() else []
    return int(found[-1]) if found else 0


def log_of(site: Site) -> str:
    """Return the run's log so far."""
    path = site.runs / "out/result_0.txt"
    return path.read_text() if path.exists() else ""


def reach_moment(case: Case, site: Site, start_seconds: float, attempt: Attempt) -> None:
    """Return at the case's moment, or if the run has ended."""

    def until(condition: Callable[[], object], seconds: float = 0.01) -> None:
        while not any(condition() or time.sleep(seconds) for _ in range(20)) and attempt.status() is None:
            pass

    def evaluates() -> bool:
        log = log_of(site)
        return log.count('"eval_start"') > max(case.share * EVALUATIONS, log.count('"eval_stop"'))

    folder = site.runs / "out/run_0/checkpoints"
    until(lambda: find_rank(site, case.victim), 0.1)
    if case.moment == "start":
        time.sleep(case.share * start_seconds)
    elif case.moment == "training":
        until(lambda: steps_done(site) > case.share * STEPS)
    elif case.moment == "evaluation":
        until(evaluates)
    elif case.moment == "checkpoint":
        until(lambda: steps_done(site) > case.share * (STEPS - 20))
        until(lambda: list(folder.glob(".partial_*")))
    else:
        until(lambda: steps_done(site) >= STEPS)
        time.sleep(case.share**2 * 1.5)


def expected_statuses(case: Case, has_begun: bool) -> set[int]:
    """Return the statuses that docs/how_a_run_ends.md allows."""
    if case.launcher == "torchrun":
        return {1}
    statuses = {3}
    if case.signum == "SIGTERM" and case.victim == 0:
        statuses = {143} if case.launcher == "run.sub" else {3, 143}
    if not has_begun:
        statuses |= {2, 143} if case.signum == "SIGTERM" else {2}
    return statuses | ({1} if case.moment == "end" else set())


def check_names(case: Case, text: str) -> tuple[str, list[str]]:
    """Return what names ranks in the text, and what is wrong with it."""
    anomalies, named = [], []
    for match in NAMED.finditer(text):
        named.append(match[0])
        ranks = match[1] or match[3]
        if ranks != str(case.victim):
            anomalies.append(f"rank {ranks} is accused: {match[0]}")
    return "; ".join(dict.fromkeys(named)), anomalies


def run_case(case: Case, site: Site, exports: dict[str, str], whole: bytes, start_seconds: float) -> None:
    """Run and print one case."""
    attempt = Attempt(site, case, exports)
    reach_moment(case, site, start_seconds, attempt)
    pid, step = find_rank(site, case.victim), steps_done(site)
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, getattr(signal, case.signum))
    killed = time.monotonic()
    bound = (START_BOUNDS if step == 0 else BOUNDS)[case.signum]
    status = attempt.wait(bound)
    seconds, log, output = time.monotonic() - killed, log_of(site), attempt.output()
    anomalies = [] if pid or case.moment == "end" else ["the run ended before the moment"]
    if left := attempt.kill():
        anomalies.append(f"{len(left)} processes are left after {bound} s, status {attempt.status()}")
        attempt.wait(30)
    has_begun = '"run_start"' in log
    if pid and not left and status not in expected_statuses(case, has_begun):
        anomalies.append(f"status {status}, expected {sorted(expected_statuses(case, has_begun))}")
    if has_begun and log.count('"run_stop"') != 1:
        anomalies.append(f"{log.count(chr(34) + 'run_stop' + chr(34))} run_stop lines")
    named, false = check_names(case, log + output)
    anomalies += false
    reason = "".join(re.findall(r'"run_stop".*"reason": "((?:[^"\\]|\\.)*)"', log)) or "-"
    must_name = has_begun and case.moment != "end" and pid and not (case.signum == "SIGTERM" and case.victim == 0)
    if must_name and not re.match(rf"rank {case.victim} on ", reason):
        anomalies.append(f"the log names no rank {case.victim}: {reason}")
    resumed = Attempt(site, case, exports, RESUME=1)
    again = resumed.wait(240)
    if left := resumed.kill():
        anomalies.append(f"{len(left)} processes are left of the resumed run")
    weights = site.runs / "out/run_0/weights/model.safetensors"
    equal = weights.exists() and weights.read_bytes() == whole
    if again != 1:
        anomalies.append(f"the resumed run ends with {again}")
    if not equal:
        anomalies.append("the weights differ")
    at = "".join(re.findall(r"resumed at step (\d+)", resumed.output())[:1]) or "0"
    story = reason if has_begun else named or "-"
    seen = f"{step} | {seconds:.1f} | {status} | {story} | {at} | {'yes' if equal else 'NO'}"
    with print_lock:
        print(f"{case} | {seen}{'' if pid else ' | the rank had ended'}", flush=True)
        for anomaly in anomalies:
            print(f"   !! {case.number:02d}: {anomaly}", flush=True)
    if anomalies:
        (site.runs.parent / "resumed.txt").write_text(resumed.output())
        (site.runs.parent / "killed.txt").write_text(output)
        (site.runs.parent / "killed.log").write_text(log)


def run_undisturbed(case: Case, site: Site, exports: dict[str, str]) -> tuple[bytes, float]:
    """Return the weights, and the seconds from the first process of rank 0 to the first step."""
    attempt = Attempt(site, case, exports)
    while not find_rank(site, 0):
        assert attempt.status() is None, attempt.output()
        time.sleep(0.02)
    begun = time.monotonic()
    while not steps_done(site):
        assert attempt.status() is None, attempt.output()
        time.sleep(0.02)
    seconds = time.monotonic() - begun
    assert attempt.wait(300) == 1, attempt.output()
    return (site.runs / "out/run_0/weights/model.safetensors").read_bytes(), seconds


def main() -> None:
    """Run the cases."""
    work, seed, workers = DATA.parent, int(sys.argv[2]), int(sys.argv[3])
    cases = draw_cases(seed, NUM_CASES)
    if chosen := set(map(int, sys.argv[4:])):
        cases = [case for case in cases if case.number in chosen]
    write_set(DATA / "train", make_rows(random_lengths(900)))
    write_set(DATA / "eval", make_rows(random_lengths(600, seed=1), seed=1))
    with two_hosts(work / "ssh") as exports, running(12) as cluster:
        layouts = {case.layout: case for case in cases}

        def undisturbed(case: Case) -> tuple[bytes, float]:
            return run_undisturbed(case, Site(cluster, work / case.layout, ROOT), exports)

        def run(case: Case) -> None:
            try:
                run_case(case, Site(cluster, work / f"case {case.number:02d}", ROOT), exports, *whole[case.layout])
            except Exception as error:
                print(f"{case} | !! {type(error).__name__}: {error}", flush=True)

        with ThreadPoolExecutor(workers) as pool:
            whole = dict(zip(layouts, pool.map(undisturbed, layouts.values()), strict=True))
            for ranks in sorted({case.nodes * case.per_node for case in cases}):
                same = [name for name, case in layouts.items() if case.nodes * case.per_node == ranks]
                equal = len({whole[name][0] for name in same}) == 1
                print(f"undisturbed, {ranks} ranks: weights of {', '.join(same)} equal: {equal}", flush=True)
            list(pool.map(run, cases))


if __name__ == "__main__":
    main()

"""Read machine facts from Linux: processor model and generation, and GPU driver version."""

from __future__ import annotations

import functools
import os
import platform
import re
import time
from pathlib import Path

from mlbert.host.environment import environment
from mlbert.host.errors import UserError

SYSTEM = Path("/")
LOOK_SECONDS = 0.5
BUSY_CORES = 0.5  # used by other programs, from which on a run leaves cores to them
LEAST_IDLE = 0.25  # share of the cores' time without which they count as busy
_IDLE_COLUMNS = (3, 4)  # of a line of /proc/stat, after its name: idle, and waiting for a disk
_GUEST = 8  # from this column on, the times are part of other columns
NONE = "none"

# (word of the name, family, models, steppings, generation)
_ANY = range(256)
_GENERATIONS = (
    ("Xeon", 6, range(63, 64), _ANY, "Haswell"),
    ("Xeon", 6, range(79, 80), _ANY, "Broadwell"),
    ("Xeon", 6, range(85, 86), range(5), "Skylake-SP"),
    ("Xeon", 6, range(85, 86), range(5, 10), "Cascade Lake"),
    ("Xeon", 6, range(85, 86), range(10, 12), "Cooper Lake"),
    ("Xeon", 6, range(106, 107), _ANY, "Ice Lake-SP"),
    ("Xeon", 6, range(108, 109), _ANY, "Ice Lake-D"),
    ("Xeon", 6, range(143, 144), _ANY, "Sapphire Rapids"),
    ("Xeon", 6, range(207, 208), _ANY, "Emerald Rapids"),
    ("Xeon", 6, range(173, 175), _ANY, "Granite Rapids"),
    ("Xeon", 6, range(175, 176), _ANY, "Sierra Forest"),
    ("EPYC", 23, range(16), _ANY, "Naples"),
    ("EPYC", 23, range(48, 64), _ANY, "Rome"),
    ("EPYC", 25, range(16), _ANY, "Milan"),
    ("EPYC", 25, range(16, 32), _ANY, "Genoa"),
    ("EPYC", 25, range(160, 176), _ANY, "Bergamo"),
    ("EPYC", 26, range(16), _ANY, "Turin"),
    ("EPYC", 26, range(16, 32), _ANY, "Turin Dense"),
)
# (implementer, part) of an Arm core -> its name
_ARM_CORES = {
    ("0x41", "0xd08"): "Arm Cortex-A72",
    ("0x41", "0xd0c"): "Arm Neoverse N1",
    ("0x41", "0xd40"): "Arm Neoverse V1",
    ("0x41", "0xd49"): "Arm Neoverse N2",
    ("0x41", "0xd4f"): "Arm Neoverse V2",
    ("0x41", "0xd84"): "Arm Neoverse V3",
    ("0x41", "0xd8e"): "Arm Neoverse N3",
    ("0xc0", "0xac3"): "AmpereOne",
}
# (vendor or product of the machine, core, processor name)
_ARM_PROCESSORS = (
    ("Amazon", "Cortex-A72", "AWS Graviton"),
    ("Amazon", "Neoverse N1", "AWS Graviton2"),
    ("Amazon", "Neoverse V1", "AWS Graviton3"),
    ("Amazon", "Neoverse V2", "AWS Graviton4"),
    ("Google", "Neoverse V2", "Google Axion"),
    ("Microsoft", "Neoverse N2", "Microsoft Cobalt 100"),
    ("Grace|GH200|GB200|GB300", "Neoverse V2", "NVIDIA Grace"),
)


def read_processors(root: Path = SYSTEM) -> list[dict[str, str]]:
    """Return the fields of ``/proc/cpuinfo`` below ``root``, one dict per logical processor."""
    parsed = []
    for block in re.split(r"\n\s*\n", read_text(root / "proc/cpuinfo").strip()):
        fields = dict(re.findall(r"^([^:\n]*[^:\s])\s*:[ \t]*(.*?)[ \t]*$", block, re.MULTILINE))
        if "processor" in fields:
            parsed.append(fields)
    return parsed


def processor_name(root: Path = SYSTEM) -> str:
    """Return the processor's model and, for common server processors, its generation.

    Examples: ``AMD EPYC 7742 64-Core Processor (Rome)``, ``NVIDIA Grace (Arm Neoverse V2)``.
    """
    first = next(iter(read_processors(root)), {})
    model = " ".join((first.get("model name") or first.get("Processor") or "").split())
    if core := _ARM_CORES.get((first.get("CPU implementer", ""), first.get("CPU part", ""))):
        ids = ("sys_vendor", "product_name")
        machine = " ".join(read_text(root / "sys/class/dmi/id" / name).strip() for name in ids)
        meant = [
            name
            for place, part, name in _ARM_PROCESSORS
            if part in core and re.search(place, machine)
        ]
        return f"{meant[0]} ({core})" if meant else core
    generation = _generation(model, first)
    return f"{model} ({generation})" if generation else model or platform.machine() or "unknown"


def _generation(model: str, fields: dict[str, str]) -> str | None:
    numbers = [fields.get(key, "") for key in ("cpu family", "model", "stepping")]
    if not all(number.isdecimal() for number in numbers):
        return None
    family, number, stepping = map(int, numbers)
    for word, its_family, models, steppings, name in _GENERATIONS:
        if word in model and family == its_family and number in models and stepping in steppings:
            return name
    return None


def gpu_driver(root: Path = SYSTEM) -> str:
    """Return the version of the loaded NVIDIA driver, or "none", without running a program."""
    found = re.search(
        r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", read_text(root / "proc/driver/nvidia/version")
    )
    return found[1] if found else NONE


def read_text(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read, as is common in /sys."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@functools.cache
def idle_share() -> float:
    """Return the share of the time for which the cores that this process may use are idle,
    while this process sleeps.

    Measured once per process, so that all parts of a command agree. The load average would also
    count what this process did in the last minute, or one that has just ended.
    """
    before = _cpu_times()
    time.sleep(LOOK_SECONDS)
    after = _cpu_times()
    idle = total = 0
    for cpu in before.keys() & after.keys():
        spent = [late - early for early, late in zip(before[cpu], after[cpu], strict=True)]
        total += sum(spent)
        idle += sum(spent[column] for column in _IDLE_COLUMNS)
    return idle / total if total else 1.0


def usable_cores(local_world_size: int = 1) -> int:
    """Return the number of cores that each of this many ranks on the machine may use: its share of
    the affinity mask and of the control group's quota (a container's), or what its Slurm task has
    if that is less.

    Slurm binds tasks to their cores only where a site has configured that.
    """
    cores = len(os.sched_getaffinity(0))
    quota = _cgroup_quota()
    if quota is not None:
        cores = min(cores, quota)
    share = max(1, cores // local_world_size)
    allotted = environment().get("SLURM_CPUS_PER_TASK", "").strip()
    if allotted.isdecimal() and int(allotted) and environment().get("SLURM_JOB_ID"):
        share = min(share, int(allotted))
    return share


def _cgroup_quota() -> int | None:
    """Return the cores that the control group's CPU bandwidth amounts to, rounded up; None without
    a limit.
    """
    quota, _, period = read_text(SYSTEM / "sys/fs/cgroup/cpu.max").strip().partition(" ")
    if not quota.isdecimal() or not period.isdecimal() or not int(period):
        return None
    return -(-int(quota) // int(period))


def free_cores() -> int:
    """Return how many of the `usable_cores` other programs leave idle, at least 1.

    An idle machine answers at once; otherwise it takes `LOOK_SECONDS`, once per process.
    """
    cores = usable_cores()
    if os.getloadavg()[0] < BUSY_CORES:
        return cores
    return max(1, min(cores, round(idle_share() * len(os.sched_getaffinity(0)))))


@functools.cache
def busy_load() -> float | None:
    """Return the machine's load if other programs keep all cores busy
    that this process may use; None if not.
    """
    load = os.getloadavg()[0]
    if load < len(os.sched_getaffinity(0)) + 1:
        return None
    return load if idle_share() < LEAST_IDLE else None


def busy_words() -> str | None:
    """Return the sentence that a command prints if other programs keep this machine busy."""
    load = busy_load()
    if load is None:
        return None
    cores = len(os.sched_getaffinity(0))
    words = "1 core" if cores == 1 else f"{cores} cores"
    return f"Other programs keep this machine busy (load {load:.1f} on {words})"


def busy_seconds() -> float:
    """Return the core seconds that all programs have used since the machine started, on the cores
    that this process may use. Time that a virtual machine did not get from its host counts too.
    """
    ticks = 0
    for spent in _cpu_times().values():
        ticks += sum(spent[:_GUEST]) - sum(spent[column] for column in _IDLE_COLUMNS)
    return ticks / os.sysconf("SC_CLK_TCK")


def _cpu_times() -> dict[str, list[int]]:
    """Return the times that /proc/stat has for each core that this process may use, in ticks."""
    names = {f"cpu{index}" for index in os.sched_getaffinity(0)}
    lines = [line.split() for line in read_text(SYSTEM / "proc/stat").splitlines()]
    return {line[0]: [int(text) for text in line[1:]] for line in lines if line[0] in names}


def threads_per_rank(
    cpu_threads: int | None, local_world_size: int, *, is_gpu: bool = False
) -> int:
    """Return the CPU threads per rank: the setting,
    or an equal share of the cores that the process may use.

    Without the setting, cores that other programs keep busy do not count: threads wait for each
    other many times in a step, and a thread without a core delays all. So many small runs on one
    machine share its cores. This does not hold on a GPU (``is_gpu``), nor if OMP_NUM_THREADS is
    set, by a launcher or the user.

    Raises:
        UserError: more threads than CPUs, which with OpenMP can stall the whole machine.
    """
    if cpu_threads:
        if cpu_threads > (cpus := os.cpu_count() or 1):
            subject = f"CPU_THREADS={cpu_threads}"
            raise UserError(
                "config.range", subject, f"this machine has {cpus} CPUs", "Set it to none"
            )
        return cpu_threads
    share = usable_cores(local_world_size)
    if share == 1 or is_gpu or "OMP_NUM_THREADS" in environment():
        return share
    if local_world_size == 1:
        return free_cores()
    return 1 if busy_load() is not None else share  # the load may be that of the other ranks


def fewer_threads_words(cpu_threads: int | None, threads: int) -> str | None:
    """Return what a command prints if `threads_per_rank` left cores to other programs; None if
    not.
    """
    cores = usable_cores()
    if cpu_threads is not None or threads >= cores or "OMP_NUM_THREADS" in environment():
        return None
    words = "1 thread" if threads == 1 else f"{threads} threads"
    return (
        f"Other programs use some of the {cores} cores: using {words}. "
        "CPU_THREADS sets a different number."
    )

"""A system description for ``systems/<system>.json``, from what Linux says about the machine.

All values are text: the official checker joins several of them and crashes on numbers. What cannot be seen from
inside is "unknown" and is for a person to fill in; "N/A" is for what the machine does not have.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from mlbert.core.errors import UserError
from mlbert.submission.templates import FIELDS

STATUS = "Research, Development, or Internal (RDI)"
NOT_THERE = "N/A"
UNKNOWN = "unknown"

_GPU_QUERY = "name,memory.total,clocks.max.sm,pcie.link.gen.max"
_NOTED_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve")
_DISK_SECTOR_BYTES = 512

Ask = Callable[[Sequence[str]], str]


def ask(command: Sequence[str]) -> str:
    """What a program prints; empty when it is absent or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


# Framework to the distributions that have it.
FRAMEWORKS = {"PyTorch": ("torch",), "TensorFlow": ("tensorflow", "tensorflow-cpu")}


def describe_system(
    submitter: str,
    division: str,
    num_nodes: int = 1,
    root: Path = Path("/"),
    ask: Ask = ask,
    framework: str = "PyTorch",
) -> dict[str, str]:
    """The 33 fields that the official checker wants, in its order.

    ``submitter`` is the same as in the logs, ``num_nodes`` counts nodes like this one; /proc, /sys and /etc are found
    below ``root``, and ``ask`` runs a program and returns what it prints. ``framework`` is one of `FRAMEWORKS`.
    """
    facts = {
        "submitter": submitter,
        "division": division,
        "status": STATUS,
        "number_of_nodes": str(num_nodes),
        **_describe_processor(root),
        **_describe_memory(root),
        **_describe_storage(root),
        **_describe_network(root, num_nodes),
        **_describe_accelerators(ask),
        **_describe_software(root, ask, framework),
        "cooling": UNKNOWN,
    }
    facts["system_name"] = _name_system(facts)
    assert set(facts) == set(FIELDS), set(facts) ^ set(FIELDS)
    return {name: facts[name] for name in FIELDS}


def write_description(path: Path, facts: dict[str, str]) -> None:
    """Write the description as indented JSON; the file's stem is the name of the system's results folder.

    Raises:
        UserError: the name is illegal or the file cannot be written.
    """
    if path.suffix != ".json" or " " in path.name or path.name.startswith("."):
        raise UserError(path, "is no legal name of a system file", "Use systems/<system>.json, without spaces")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(path, f"cannot be written ({error.strerror})", "Choose a file that is writable") from error


def _describe_processor(root: Path) -> dict[str, str]:
    processors = _read_cpuinfo(root)
    first = processors[0] if processors else {}
    sockets = {item.get("physical id", "0") for item in processors}
    cores = {(item.get("physical id", "0"), item.get("core id", str(n))) for n, item in enumerate(processors)}
    num_sockets = max(1, len(sockets))
    flags = (first.get("flags") or first.get("Features") or "").split()
    noted = [flag for flag in _NOTED_FLAGS if flag in flags]
    notes = [f"vector extensions: {' '.join(noted) or 'none of ' + ' '.join(_NOTED_FLAGS)}"]
    if {"family", "model"} <= {key.removeprefix("cpu ") for key in first}:
        notes.append(f"CPU family {first['cpu family']} model {first['model']} stepping {first.get('stepping', '?')}")
    if "hypervisor" in flags:
        notes.append("virtual machine")
    model = first.get("model name") or first.get("Processor") or platform.machine() or UNKNOWN
    return {
        "host_processors_per_node": str(num_sockets),
        "host_processor_model_name": " ".join(model.split()),
        "host_processor_core_count": str(max(1, len(cores)) // num_sockets),
        "host_processor_vcpu_count": str(len(processors) or 1),
        "host_processor_frequency": _frequency(root, first),
        "host_processor_caches": _caches(root),
        "host_processor_interconnect": NOT_THERE if num_sockets == 1 else UNKNOWN,
        "hw_notes": "; ".join(notes),
    }


def _read_cpuinfo(root: Path) -> list[dict[str, str]]:
    """One dict for each logical processor."""
    parsed = []
    for block in re.split(r"\n\s*\n", _read(root / "proc/cpuinfo").strip()):
        fields = dict(re.findall(r"^([^:\n]*[^:\s])\s*:[ \t]*(.*?)[ \t]*$", block, re.MULTILINE))
        if "processor" in fields:
            parsed.append(fields)
    return parsed


def _frequency(root: Path, processor: dict[str, str]) -> str:
    limit = _read(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").strip()
    if limit.isdecimal():
        return f"{int(limit) / 1000:.0f} MHz (maximum)"
    current = processor.get("cpu MHz")
    return f"{float(current):.0f} MHz (as reported)" if current else UNKNOWN


def _caches(root: Path) -> str:
    """Such as ``L1d 32K, L1i 32K, L2 512K, L3 32768K``, each with how many processors share it."""
    found = []
    for index in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_read(index / name).strip() for name in ("level", "type", "size"))
        if level and size:
            letter = {"Data": "d", "Instruction": "i"}.get(kind, "")
            shared = _count_cpus(_read(index / "shared_cpu_list").strip())
            found.append(f"L{level}{letter} {size}" + (f" (shared by {shared} vCPUs)" if shared > 1 else ""))
    return ", ".join(found) or UNKNOWN


def _count_cpus(cpu_list: str) -> int:
    """Length of a list such as ``0-3,8``."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", cpu_list)
    return sum(int(high or low) - int(low) + 1 for low, high in ranges)


def _describe_memory(root: Path) -> dict[str, str]:
    match = re.search(r"^MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    return {
        "host_memory_capacity": f"{int(match[1]) / 2**20:.1f} GiB" if match else UNKNOWN,
        "host_memory_configuration": f"{nodes} NUMA node{'s' if nodes > 1 else ''}" if nodes else UNKNOWN,
    }


def _describe_storage(root: Path) -> dict[str, str]:
    sizes: dict[Path, int] = {}
    for disk in sorted((root / "sys/block").glob("*")):
        sectors = _read(disk / "size").strip()
        if sectors.isdecimal() and not re.match(r"(loop|ram|zram|sr|dm-|md|fd)", disk.name):
            sizes[disk] = int(sectors) * _DISK_SECTOR_BYTES
    kinds = dict.fromkeys(_disk_kind(disk) for disk, size in sizes.items() if size)
    return {
        "host_storage_type": ", ".join(kinds) or UNKNOWN,
        "host_storage_capacity": f"{sum(sizes.values()) / 1e9:.0f} GB" if kinds else UNKNOWN,
    }


def _disk_kind(disk: Path) -> str:
    if disk.name.startswith(("nvme", "vd")):
        return "NVMe SSD" if disk.name.startswith("nvme") else "virtual disk"
    return "hard disk" if _read(disk / "queue/rotational").strip() == "1" else "SSD"


def _describe_network(root: Path, num_nodes: int) -> dict[str, str]:
    speeds = [_read(device.with_name("speed")).strip() for device in sorted((root / "sys/class/net").glob("*/device"))]
    cards = [f"{int(n) / 1000:g} Gb/s Ethernet" if n.isdecimal() else "Ethernet, speed not reported" for n in speeds]
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/1"))
    cards += [f"InfiniBand {port.parents[1].name}" for port in ports]
    return {
        "host_networking": ", ".join(dict.fromkeys(cards)) or UNKNOWN,
        "host_networking_topology": NOT_THERE if num_nodes == 1 else UNKNOWN,
    }


def _describe_accelerators(ask: Ask) -> dict[str, str]:
    listed = ask(["nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader"])
    gpus = [[part.strip() for part in line.split(",")] for line in listed.splitlines() if line.count(",") == 3]
    if not gpus:
        absent = [name for name in FIELDS if name.startswith("accelerator_")]
        return {"accelerators_per_node": "0", **dict.fromkeys(absent, NOT_THERE)}
    name, memory, clock, link = gpus[0]
    linked = "NVLink" in ask(["nvidia-smi", "nvlink", "--status"]) if len(gpus) > 1 else False
    return {
        "accelerators_per_node": str(len(gpus)),
        "accelerator_model_name": ", ".join(dict.fromkeys(gpu[0] for gpu in gpus)) if name else UNKNOWN,
        "accelerator_host_interconnect": f"PCIe Gen{link}" if link.isdecimal() else UNKNOWN,
        "accelerator_frequency": f"{clock} (maximum)",
        "accelerator_on-chip_memories": UNKNOWN,
        "accelerator_memory_configuration": UNKNOWN,
        "accelerator_memory_capacity": memory,
        "accelerator_interconnect": NOT_THERE if len(gpus) == 1 else ("NVLink" if linked else "PCIe"),
        "accelerator_interconnect_topology": NOT_THERE if len(gpus) == 1 else UNKNOWN,
    }


def _describe_software(root: Path, ask: Ask, framework: str) -> dict[str, str]:
    release = re.search(r'^PRETTY_NAME="?([^"\n]*)"?$', _read(root / "etc/os-release"), re.MULTILINE)
    stack = [f"Python {platform.python_version()}"]
    stack += ask(["cc", "--version"]).splitlines()[:1]
    stack += [f"{name} {_version(name)}" for name in ("numpy", "h5py", "tokenizers")]
    found = [version for name in FRAMEWORKS[framework] if (version := _version(name)) != UNKNOWN]
    driver = ask(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).splitlines()[:1]
    stack += [f"NVIDIA driver {version.strip()}" for version in driver]
    return {
        "framework": f"{framework} {' or '.join(found) or UNKNOWN}",
        "other_software_stack": ", ".join(stack),
        "operating_system": release[1] if release else platform.system(),
        "sw_notes": f"Linux kernel {platform.release()}",
    }


def _name_system(facts: dict[str, str]) -> str:
    """Such as ``2x Xeon 8480C, 8x H100``: the real models, because results are compared by this name."""
    nodes = f"{facts['number_of_nodes']} nodes of " if facts["number_of_nodes"] != "1" else ""
    host = f"{facts['host_processors_per_node']}x {facts['host_processor_model_name']}"
    if facts["accelerators_per_node"] == "0":
        return f"{nodes}{host} ({facts['host_processor_vcpu_count']} vCPUs, no accelerator)"
    return f"{nodes}{facts['accelerators_per_node']}x {facts['accelerator_model_name']}, {host}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return UNKNOWN


def _read(path: Path) -> str:
    """Text of a file; empty when it cannot be read, as many in /sys cannot."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

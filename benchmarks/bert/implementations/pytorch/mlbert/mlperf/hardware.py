"""What Linux says of a machine's hardware, in the words of a system description."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from mlbert.host.machine import processor_name, read_processors, read_text
from mlbert.mlperf.templates import FIELDS

NOT_THERE = "N/A"
UNKNOWN = "unknown"

_GPU_QUERY = "name,memory.total,clocks.max.sm,pcie.link.gen.max"
_NOTED_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve")
_DISK_SECTOR_BYTES = 512
_NO_DISKS = re.compile(r"loop|ram|zram|sr|dm-|md|fd")
_FILE_SYSTEMS = ("ext4", "xfs", "btrfs", "zfs", "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "virtiofs")
_INFINIBAND_ADDRESSES = "32"  # what /sys/class/net/*/type says of InfiniBand, which has a place of its own

Ask = Callable[[Sequence[str]], str]


def describe_processor(root: Path) -> dict[str, str]:
    """Sockets, cores, threads, clock and caches; /proc and /sys are found below ``root``."""
    processors = read_processors(root)
    first = processors[0] if processors else {}
    cores = {_place(root, number, item) for number, item in enumerate(processors)} or {("0", "0")}
    num_sockets = len({socket for socket, _ in cores})
    flags = (first.get("flags") or first.get("Features") or "").split()
    noted = [flag for flag in _NOTED_FLAGS if flag in flags]
    threads = (len(processors) or 1) / len(cores)
    notes = [f"{threads:g} threads per core (SMT on)" if threads > 1 else "1 thread per core"]
    notes.append(f"vector extensions: {' '.join(noted) or 'none of ' + ' '.join(_NOTED_FLAGS)}")
    if {"family", "model"} <= {key.removeprefix("cpu ") for key in first}:
        notes.append(f"CPU family {first['cpu family']} model {first['model']} stepping {first.get('stepping', '?')}")
    if "hypervisor" in flags:
        notes.append("virtual machine")
    return {
        "host_processors_per_node": str(num_sockets),
        "host_processor_model_name": processor_name(root),
        "host_processor_core_count": str(len(cores) // num_sockets),
        "host_processor_vcpu_count": str(len(processors) or 1),
        "host_processor_frequency": _frequency(root, first),
        "host_processor_caches": _caches(root),
        "host_processor_interconnect": NOT_THERE if num_sockets == 1 else UNKNOWN,
        "hw_notes": "; ".join(notes),
    }


def _place(root: Path, number: int, processor: dict[str, str]) -> tuple[str, str]:
    """Socket and core of a logical processor."""
    folder = root / f"sys/devices/system/cpu/cpu{processor.get('processor', number)}/topology"
    socket, core = (read_text(folder / name).strip() for name in ("physical_package_id", "core_id"))
    return socket or processor.get("physical id", "0"), core or processor.get("core id", str(number))


def _frequency(root: Path, processor: dict[str, str]) -> str:
    limit = read_text(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").strip()
    if limit.isdecimal():
        return f"{int(limit) / 1000:.0f} MHz (maximum)"
    current = processor.get("cpu MHz")
    return f"{float(current):.0f} MHz (as reported)" if current else UNKNOWN


def _caches(root: Path) -> str:
    """Such as ``L1d 32K, L1i 32K, L2 512K, L3 32768K``, each with how many processors share it."""
    found = []
    for index in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (read_text(index / name).strip() for name in ("level", "type", "size"))
        if level and size:
            letter = {"Data": "d", "Instruction": "i"}.get(kind, "")
            shared = _count_cpus(read_text(index / "shared_cpu_list").strip())
            found.append(f"L{level}{letter} {size}" + (f" (shared by {shared} vCPUs)" if shared > 1 else ""))
    return ", ".join(found) or UNKNOWN


def _count_cpus(cpu_list: str) -> int:
    """Length of a list such as ``0-3,8``."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", cpu_list)
    return sum(int(high or low) - int(low) + 1 for low, high in ranges)


def describe_memory(root: Path, ask: Ask) -> dict[str, str]:
    """Size, modules where root's ``dmidecode`` tells them, and NUMA nodes."""
    match = re.search(r"^MemTotal:\s+(\d+) kB", read_text(root / "proc/meminfo"), re.MULTILINE)
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    parts = [_modules(ask(["dmidecode", "-t", "17"])) or "modules unknown"]
    parts += [f"{nodes} NUMA node{'s' if nodes > 1 else ''}"] if nodes else []
    return {
        "host_memory_capacity": f"{int(match[1]) / 2**20:.1f} GiB" if match else UNKNOWN,
        "host_memory_configuration": ", ".join(parts),
    }


def _modules(listed: str) -> str:
    """Such as ``16x 64 GB DDR5 at 4800 MT/s``, of what ``dmidecode -t 17`` prints; empty slots do not count."""
    found = []
    for block in listed.split("Memory Device\n")[1:]:
        told = dict(re.findall(r"^\s+([\w ]+): (.+?) *$", block, re.MULTILINE))
        if re.match(r"\d", told.get("Size", "")):
            speed = told.get("Configured Memory Speed") or told.get("Configured Clock Speed") or told.get("Speed") or ""
            known = speed if speed[:1].isdecimal() else "unknown speed"
            found.append(f"{told['Size']} {told.get('Type', 'of unknown type')} at {known}")
    return _counted(found)


def describe_storage(root: Path) -> dict[str, str]:
    """Disks by kind and model, and the file systems that are mounted, shared ones too."""
    sizes: dict[Path, int] = {}
    for disk in sorted((root / "sys/block").glob("*")):
        sectors = read_text(disk / "size").strip()
        if sectors.isdecimal() and int(sectors) and not _NO_DISKS.match(disk.name):
            sizes[disk] = int(sectors) * _DISK_SECTOR_BYTES
    mounted = {words[2] for line in read_text(root / "proc/mounts").splitlines() if len(words := line.split()) > 2}
    file_systems = [name for name in _FILE_SYSTEMS if name in mounted]
    parts = [_counted(_disk_kind(disk) for disk in sizes) or UNKNOWN]
    parts += [f"file systems {' '.join(file_systems)}"] if file_systems else []
    return {
        "host_storage_type": "; ".join(parts),
        "host_storage_capacity": f"{sum(sizes.values()) / 1e9:.0f} GB" if sizes else UNKNOWN,
    }


def _disk_kind(disk: Path) -> str:
    model = " ".join(read_text(disk / "device/model").split())
    if disk.name.startswith("vd"):
        kind = "virtual disk"
    elif disk.name.startswith("nvme"):
        kind = "NVMe SSD"
    else:
        kind = "hard disk" if read_text(disk / "queue/rotational").strip() == "1" else "SSD"
    return f"{kind} ({model})" if model else kind


def describe_network(root: Path, num_nodes: int) -> dict[str, str]:
    """Ethernet devices with their speed, and InfiniBand ports with their rate."""
    cards = []
    for device in sorted((root / "sys/class/net").glob("*/device")):
        speed, kind = (read_text(device.with_name(name)).strip() for name in ("speed", "type"))
        if kind != _INFINIBAND_ADDRESSES:
            known = speed.isdecimal()
            cards.append(f"{int(speed) / 1000:g} Gb/s Ethernet" if known else "Ethernet, speed not reported")
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        rate, layer = (read_text(port / name).strip() for name in ("rate", "link_layer"))
        kind = "RoCE" if layer == "Ethernet" else "InfiniBand"
        if "DOWN" not in read_text(port / "state"):
            cards.append(f"{kind} {rate.replace('Gb/sec', 'Gb/s') or port.parents[1].name}")
    return {
        "host_networking": _counted(cards) or UNKNOWN,
        "host_networking_topology": NOT_THERE if num_nodes == 1 else UNKNOWN,
    }


def describe_accelerators(ask: Ask) -> dict[str, str]:
    """What ``nvidia-smi`` says of the GPUs."""
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


def _counted(names: Iterable[str]) -> str:
    """Such as ``2x a, b``."""
    counts = Counter(names).items()
    return ", ".join(f"{count}x {name}" if count > 1 else name for name, count in counts)

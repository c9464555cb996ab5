"""Describe this machine's hardware and software for ``systems/<system>.json``,
as Linux reports them.

All values are text: the official checker joins several of them and crashes on numbers. "unknown"
marks facts that are not visible from inside the machine and must be filled in by hand; "N/A" marks
parts that the machine does not have.

A machine that was not measured yet has a template, ``systems/templates/<system>.json``, in which
the fields to fill in begin with ``FILL IN``. Official tools read only ``systems/*.json``, so they
ignore templates. If a template is copied there unchanged, the official checker rejects its
``status`` and ``mlbert submission check`` names every such field.
"""

from __future__ import annotations

import importlib
import json
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlbert.host.errors import UserError
from mlbert.host.files import writing
from mlbert.host.machine import NONE, gpu_driver, processor_name, read_processors, read_text
from mlbert.host.native import openmp_runtime
from mlbert.host.provenance import installed_version

# Framework -> the distributions that provide it.
DISTRIBUTIONS_OF = {"PyTorch": ("torch",), "TensorFlow": ("tensorflow", "tensorflow-cpu")}
FOLDER = "templates"
MARK = "FILL IN"

# Field -> hint for the person who fills it in.
_HINTS = {
    "submitter": "organization, the same as MLPERF_SUBMISSION_ORG",
    "division": "open or closed, the same as MLPERF_DIVISION",
    "status": (
        "Available on-premise, Available cloud, Preview, or Research, Development, "
        "or Internal (RDI)"
    ),
    "system_name": "vendor and model, as customers know it",
    "number_of_nodes": "number",
    "host_processors_per_node": "number",
    "host_processor_model_name": "vendor and model",
    "host_processor_core_count": "cores of one processor",
    "host_processor_vcpu_count": "hardware threads of the node, or N/A",
    "host_processor_frequency": "as known, or N/A",
    "host_processor_caches": "as known, or N/A",
    "host_processor_interconnect": "as known, or N/A",
    "host_memory_capacity": "of the node, with unit",
    "host_storage_type": "such as NVMe SSD",
    "host_storage_capacity": "of the node, with unit",
    "host_networking": "kind and speed of the adapters for training",
    "host_networking_topology": "N/A for one node",
    "host_memory_configuration": "modules: number, size, kind and speed",
    "accelerators_per_node": "number",
    "accelerator_model_name": "vendor, model, form and memory",
    "accelerator_host_interconnect": "such as PCIe and its generation",
    "accelerator_frequency": "as known, or N/A",
    "accelerator_on-chip_memories": "as known, or N/A",
    "accelerator_memory_configuration": "kind of memory",
    "accelerator_memory_capacity": "of one accelerator, with unit",
    "accelerator_interconnect": "between the accelerators of a node",
    "accelerator_interconnect_topology": "as known, or N/A",
    "cooling": "air or liquid",
    "hw_notes": "power limit, clocks, anything unusual, or N/A",
    "framework": (
        "PyTorch or TensorFlow and its version, as mlbert submission describe-system prints it"
    ),
    "other_software_stack": "driver, CUDA, NCCL, image with digest",
    "operating_system": "name and version",
    "sw_notes": "anything unusual, or N/A",
}
FIELDS = tuple(_HINTS)  # all fields that the official checker requires, in its order
NOT_THERE = "N/A"
UNKNOWN = "unknown"
_ACCELERATOR_FIELDS = [name for name in FIELDS if name.startswith("accelerator_")]
NO_ACCELERATORS = {"accelerators_per_node": "0", **dict.fromkeys(_ACCELERATOR_FIELDS, NOT_THERE)}

_GPU_QUERY = "name,memory.total,clocks.max.sm,pcie.link.gen.max"
_NOTED_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve")
_DISK_SECTOR_BYTES = 512
_NO_DISKS = re.compile(r"loop|ram|zram|sr|dm-|md|fd")
_FILE_SYSTEMS = (
    "ext4",
    "xfs",
    "btrfs",
    "zfs",
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "wekafs",
    "virtiofs",
)
# /sys/class/net/*/type of InfiniBand, which is read from /sys/class/infiniband.
_INFINIBAND_ADDRESSES = "32"
_PACKAGES = (
    "numpy",
    "h5py",
    "tokenizers",
    "safetensors",
    "triton",
    "nvidia-dali-cuda120",
    "mlperf-logging",
)

# Value in the log -> value in the system description.
STATUSES = {
    "research": "Research, Development, or Internal (RDI)",
    "onprem": "Available on-premise",
    "cloud": "Available cloud",
    "preview": "Preview",
}


def template(known: Mapping[str, str]) -> dict[str, str]:
    """Return the official fields in order, each with its known value or a hint to fill it in."""
    assert set(known) <= set(FIELDS), set(known) - set(FIELDS)
    return {name: known.get(name) or f"{MARK}: {hint}" for name, hint in _HINTS.items()}


def unfilled(description: Mapping[str, object]) -> list[str]:
    """Return the fields that still have to be filled in."""
    return [name for name, value in description.items() if str(value).startswith(MARK)]


Ask = Callable[[Sequence[str]], str]


def describe_processor(root: Path, ask: Ask) -> dict[str, str]:
    """Return sockets, cores, threads and caches as ``lscpu`` reports them,
    the rest from /proc and /sys.
    """
    first = next(iter(read_processors(root)), {})
    places = re.findall(r"^\d*,\d*$", ask(["lscpu", "--parse=SOCKET,CORE"]), re.MULTILINE) or [
        "0,0"
    ]
    num_sockets = len({place.partition(",")[0] for place in places})
    num_cores = len(set(places))
    flags = (first.get("flags") or first.get("Features") or "").split()
    noted = [flag for flag in _NOTED_FLAGS if flag in flags]
    threads = len(places) / num_cores
    notes = [f"{threads:g} threads per core (SMT on)" if threads > 1 else "1 thread per core"]
    notes.append(f"vector extensions: {' '.join(noted) or 'none of ' + ' '.join(_NOTED_FLAGS)}")
    if {"family", "model"} <= {key.removeprefix("cpu ") for key in first}:
        notes.append(
            f"CPU family {first['cpu family']} model {first['model']} stepping "
            f"{first.get('stepping', '?')}"
        )
    if "hypervisor" in flags:
        notes.append("virtual machine")
    return {
        "host_processors_per_node": str(num_sockets),
        "host_processor_model_name": processor_name(root),
        "host_processor_core_count": str(num_cores // num_sockets),
        "host_processor_vcpu_count": str(len(places)),
        "host_processor_frequency": _frequency(root, first),
        "host_processor_caches": _caches(ask, len(places)),
        "host_processor_interconnect": NOT_THERE if num_sockets == 1 else UNKNOWN,
        "hw_notes": "; ".join(notes),
    }


def _frequency(root: Path, processor: dict[str, str]) -> str:
    limit = read_text(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").strip()
    if limit.isdecimal():
        return f"{int(limit) / 1000:.0f} MHz (maximum)"
    current = processor.get("cpu MHz")
    return f"{float(current):.0f} MHz (as reported)" if current else UNKNOWN


def _caches(ask: Ask, num_cpus: int) -> str:
    """Return text such as ``L1d 32K, L1i 32K, L2 512K``,
    each with the number of processors that share it.
    """
    listed = ask(["lscpu", "--bytes", "--caches=NAME,ONE-SIZE,ALL-SIZE"])
    found = []
    for name, one, every in re.findall(r"^(L\w+) +(\d+) +(\d+)$", listed, re.MULTILINE):
        shared = num_cpus * int(one) // int(every)
        sharers = f" (shared by {shared} vCPUs)" if shared > 1 else ""
        found.append(f"{name} {int(one) // 1024}K{sharers}")
    return ", ".join(found) or UNKNOWN


def describe_memory(root: Path, ask: Ask) -> dict[str, str]:
    """Return size, modules (if ``dmidecode`` may run, which needs root) and NUMA nodes."""
    match = re.search(r"^MemTotal:\s+(\d+) kB", read_text(root / "proc/meminfo"), re.MULTILINE)
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    parts = [_modules(ask(["dmidecode", "-t", "17"])) or "modules unknown"]
    if nodes:
        parts.append(f"{nodes} NUMA node{'s' if nodes > 1 else ''}")
    return {
        "host_memory_capacity": f"{int(match[1]) / 2**20:.1f} GiB" if match else UNKNOWN,
        "host_memory_configuration": ", ".join(parts),
    }


def _modules(listed: str) -> str:
    """Return text such as ``16x 64 GB DDR5 at 4800 MT/s`` from ``dmidecode -t 17``,
    without empty slots.
    """
    found = []
    for block in listed.split("Memory Device\n")[1:]:
        slot = dict(re.findall(r"^\s+([\w ]+): (.+?) *$", block, re.MULTILINE))
        if re.match(r"\d", slot.get("Size", "")):
            speed = (
                slot.get("Configured Memory Speed")
                or slot.get("Configured Clock Speed")
                or slot.get("Speed")
                or ""
            )
            known = speed if speed[:1].isdecimal() else "unknown speed"
            found.append(f"{slot['Size']} {slot.get('Type', 'of unknown type')} at {known}")
    return _counted(found)


def describe_storage(root: Path) -> dict[str, str]:
    """Return disks by kind and model, and the mounted file systems, including shared ones."""
    sizes: dict[Path, int] = {}
    for disk in sorted((root / "sys/block").glob("*")):
        sectors = read_text(disk / "size").strip()
        if sectors.isdecimal() and int(sectors) and not _NO_DISKS.match(disk.name):
            sizes[disk] = int(sectors) * _DISK_SECTOR_BYTES
    mounted = {
        words[2]
        for line in read_text(root / "proc/mounts").splitlines()
        if len(words := line.split()) > 2
    }
    file_systems = [name for name in _FILE_SYSTEMS if name in mounted]
    parts = [_counted(_disk_kind(disk) for disk in sizes) or UNKNOWN]
    if file_systems:
        parts.append(f"file systems {' '.join(file_systems)}")
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
    """Return Ethernet devices with their speed and InfiniBand ports with their rate."""
    cards = []
    for device in sorted((root / "sys/class/net").glob("*/device")):
        speed, kind = (read_text(device.with_name(name)).strip() for name in ("speed", "type"))
        if kind != _INFINIBAND_ADDRESSES:
            known = speed.isdecimal()
            cards.append(
                f"{int(speed) / 1000:g} Gb/s Ethernet" if known else "Ethernet, speed not reported"
            )
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
    """Return the GPUs as ``nvidia-smi`` reports them."""
    listed = ask(["nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader"])
    gpus = [
        [part.strip() for part in line.split(",")]
        for line in listed.splitlines()
        if line.count(",") == 3
    ]
    if not gpus:
        return NO_ACCELERATORS
    name, memory, clock, link = gpus[0]
    names = ", ".join(dict.fromkeys(gpu[0] for gpu in gpus)) if name else UNKNOWN
    interconnect = NOT_THERE
    if len(gpus) > 1:
        status = ask(["nvidia-smi", "nvlink", "--status"])
        interconnect = "NVLink" if "NVLink" in status else "PCIe"
    return {
        "accelerators_per_node": str(len(gpus)),
        "accelerator_model_name": names,
        "accelerator_host_interconnect": f"PCIe Gen{link}" if link.isdecimal() else UNKNOWN,
        "accelerator_frequency": f"{clock} (maximum)",
        "accelerator_on-chip_memories": UNKNOWN,
        "accelerator_memory_configuration": UNKNOWN,
        "accelerator_memory_capacity": memory,
        "accelerator_interconnect": interconnect,
        "accelerator_interconnect_topology": NOT_THERE if len(gpus) == 1 else UNKNOWN,
    }


def _counted(names: Iterable[str]) -> str:
    """Count names, as in ``2x a, b``."""
    counts = Counter(names).items()
    return ", ".join(f"{count}x {name}" if count > 1 else name for name, count in counts)


def describe_software(root: Path, ask: Ask, framework: str) -> dict[str, str]:
    """Return the framework (imported if installed), its software stack and the operating system."""
    release = re.search(
        r'^PRETTY_NAME="?([^"\n]*)"?$', read_text(root / "etc/os-release"), re.MULTILINE
    )
    found = [
        version for name in DISTRIBUTIONS_OF[framework] if (version := installed_version(name))
    ]
    stack = {
        "Python": platform.python_version(),
        "C compiler": ask(["cc", "--version"]).partition("\n")[0],
    }
    if found:
        stack |= _framework_parts(framework)
    asked = (
        ask(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
        .partition("\n")[0]
        .strip()
    )
    stack |= {"NVIDIA driver": gpu_driver(root).replace(NONE, "") or asked}
    stack |= {
        "glibc": platform.libc_ver()[1],
        "kernel": f"{platform.system()} {platform.release()}",
    }
    stack |= {name: installed_version(name) or "" for name in _PACKAGES}
    pairs = [f"{name}: {version.replace(', ', ' ')}" for name, version in stack.items() if version]
    return {
        "framework": f"{framework} {' or '.join(found) or UNKNOWN}",
        "other_software_stack": ", ".join(pairs),
        "operating_system": release[1] if release else platform.system(),
        "sw_notes": f"Linux kernel {platform.release()}",
    }


def _framework_parts(framework: str) -> dict[str, str]:
    """Return the libraries that a framework reports,
    with an empty version for those it does not have.
    """
    if framework == "TensorFlow":
        built = importlib.import_module("tensorflow").sysconfig.get_build_info()
        return {"CUDA": built.get("cuda_version", ""), "cuDNN": built.get("cudnn_version", "")}
    torch: Any = importlib.import_module("torch")
    build = torch.__config__.show()
    nccl = torch.cuda.nccl.version() if torch.version.cuda else ()
    return {
        "MKL": _found(r"Math Kernel Library Version ([\d.]+)", build),
        "BLAS": _found(r"BLAS_INFO=(\w+)", build),
        "oneDNN": _found(r"MKL-DNN v(\S+)", build),
        "OpenMP": Path(openmp_runtime() or "").name,
        "CUDA": torch.version.cuda or "",
        "cuDNN": str(torch.backends.cudnn.version() or ""),
        "NCCL": ".".join(map(str, nccl)),
    }


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def ask(command: Sequence[str]) -> str:
    """Return the output of a program, empty if it is not installed or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def describe_system(
    submitter: str,
    division: str,
    num_nodes: int = 1,
    root: Path = Path("/"),
    ask: Ask = ask,
    framework: str = "PyTorch",
) -> dict[str, str]:
    """Return the 33 fields that the official checker requires, in its order.

    ``submitter`` must be the same as in the logs, and ``num_nodes`` is the number of nodes like
    this one. /proc, /sys and /etc are read below ``root``, and ``ask`` runs a program and returns
    its output. ``framework`` is a key of `DISTRIBUTIONS_OF`.
    """
    facts = {
        "submitter": submitter,
        "division": division,
        "status": STATUSES["research"],
        "number_of_nodes": str(num_nodes),
        **describe_processor(root, ask),
        **describe_memory(root, ask),
        **describe_storage(root),
        **describe_network(root, num_nodes),
        **describe_accelerators(ask),
        **describe_software(root, ask, framework),
        "cooling": UNKNOWN,
    }
    facts["system_name"] = _name_system(facts)
    assert set(facts) == set(FIELDS), set(facts) ^ set(FIELDS)
    return {name: facts[name] for name in FIELDS}


def write_description(path: Path, facts: dict[str, str]) -> None:
    """Write the description as indented JSON.

    The file's stem is the name of the system's results folder.

    Raises:
        UserError: the name is invalid or the file cannot be written.
    """
    if path.suffix != ".json" or " " in path.name or path.name.startswith("."):
        reason = "is not a valid name of a system file"
        raise UserError("config.value", path, reason, "Use systems/<system>.json, without spaces")
    with writing(path, "Choose a file that is writable"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _name_system(facts: dict[str, str]) -> str:
    """Return a name such as ``8x H100, 2x Xeon 8480C``,
    with the real models because results are compared by it.
    """
    nodes = f"{facts['number_of_nodes']} nodes of " if facts["number_of_nodes"] != "1" else ""
    host = f"{facts['host_processors_per_node']}x {facts['host_processor_model_name']}"
    if facts["accelerators_per_node"] == "0":
        return f"{nodes}{host} ({facts['host_processor_vcpu_count']} vCPUs, no accelerator)"
    return f"{nodes}{facts['accelerators_per_node']}x {facts['accelerator_model_name']}, {host}"

"""System descriptions, from machines made of files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlbert.cli.submission import app
from mlbert.core.errors import UserError
from mlbert.submission.describe import describe_system, write_description
from mlbert.submission.templates import FIELDS

CPUINFO = """\
processor\t: {n}
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R)  Platinum 8480C
stepping\t: 8
cpu MHz\t\t: 2000.000
physical id\t: {socket}
core id\t\t: {core}
flags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile amx_bf16
"""


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """Two sockets of two cores with two threads each."""
    threads = [(socket, core) for _ in range(2) for socket in range(2) for core in range(2)]
    blocks = [CPUINFO.format(n=n, socket=socket, core=core) for n, (socket, core) in enumerate(threads)]
    files = {
        "proc/cpuinfo": "\n".join(blocks) + "\n",
        "proc/meminfo": "MemTotal:       2147483648 kB\nMemFree: 1 kB\n",
        "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04 LTS"\n',
        "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "3800000\n",
        "sys/devices/system/cpu/cpu0/cache/index0/level": "1\n",
        "sys/devices/system/cpu/cpu0/cache/index0/type": "Data\n",
        "sys/devices/system/cpu/cpu0/cache/index0/size": "48K\n",
        "sys/devices/system/cpu/cpu0/cache/index0/shared_cpu_list": "0,4\n",
        "sys/block/nvme0n1/size": "7501476528\n",
        "sys/block/loop0/size": "8\n",
        "sys/class/net/eth0/speed": "100000\n",
        "sys/class/net/eth0/device/vendor": "x",
        "sys/class/net/lo/speed": "1\n",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "sys/devices/system/node/node0/x": "",
        "sys/devices/system/node/node1/x": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def _ask(command: Sequence[str]) -> str:
    if command[0] != "nvidia-smi":
        return ""
    if command[1] == "nvlink":
        return "GPU 0: NVLink 0: 26 GB/s"
    if "driver_version" in command[1] and "name" not in command[1]:
        return "570.1\n" * 8
    return "NVIDIA H100 80GB HBM3, 81559 MiB, 1980 MHz, 5\n" * 8


def test_a_server_with_accelerators(server: Path) -> None:
    facts = describe_system("SomeOrg", "closed", 2, server, _ask)
    assert tuple(facts) == FIELDS
    assert len(facts) == 33
    assert facts["system_name"] == "2 nodes of 8x NVIDIA H100 80GB HBM3, 2x Intel(R) Xeon(R) Platinum 8480C"
    assert facts["status"] == "Research, Development, or Internal (RDI)"
    assert facts["host_processors_per_node"] == "2"
    assert facts["host_processor_core_count"] == "2"
    assert facts["host_processor_vcpu_count"] == "8"
    assert facts["host_processor_frequency"] == "3800 MHz (maximum)"
    assert facts["host_processor_caches"] == "L1d 48K (shared by 2 vCPUs)"
    assert facts["host_memory_capacity"] == "2048.0 GiB"
    assert facts["host_memory_configuration"] == "2 NUMA nodes"
    assert facts["host_storage_type"] == "NVMe SSD"
    assert facts["host_storage_capacity"] == "3841 GB"
    assert facts["host_networking"] == "100 Gb/s Ethernet, InfiniBand mlx5_0"
    assert facts["accelerators_per_node"] == "8"
    assert facts["accelerator_memory_capacity"] == "81559 MiB"
    assert facts["accelerator_host_interconnect"] == "PCIe Gen5"
    assert facts["accelerator_interconnect"] == "NVLink"
    assert facts["operating_system"] == "Ubuntu 24.04 LTS"
    assert "NVIDIA driver 570.1" in facts["other_software_stack"]
    assert "amx_bf16" in facts["hw_notes"]
    assert all(type(value) is str for value in facts.values())


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    facts = describe_system("SomeOrg", "open", 1, tmp_path, lambda command: "")
    assert tuple(facts) == FIELDS
    assert facts["accelerators_per_node"] == "0"
    assert facts["accelerator_model_name"] == "N/A"
    assert facts["host_memory_capacity"] == "unknown"
    for name in ("number_of_nodes", "host_processors_per_node", "accelerators_per_node"):
        assert facts[name].isdecimal()


def test_the_command_writes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "systems" / "this.json"
    done = CliRunner().invoke(app, ["describe-system", "--out", str(path), "--submitter", "SomeOrg"])
    assert done.exit_code == 0, done.output
    facts = json.loads(path.read_text())
    assert tuple(facts) == FIELDS
    assert (facts["submitter"], facts["division"]) == ("SomeOrg", "open")
    assert facts["host_processor_model_name"] in facts["system_name"]


@pytest.mark.parametrize("name", ["x.txt", "a b.json", ".json"])
def test_illegal_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no legal name"):
        write_description(tmp_path / name, {})


def test_an_unwritable_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_description(tmp_path / "file" / "x.json", {})

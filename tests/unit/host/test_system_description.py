"""System descriptions, from machines made of files."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlaudit import official
from mlaudit.cli.submission import app
from mlaudit.findings import Outcome
from mlbert.host.system_description import (
    FIELDS,
    MARK,
    describe_system,
    template,
    unfilled,
    write_description,
)
from programs import write_files
from user_errors import user_error

MODEL = (
    "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: "
    "Intel(R) Xeon(R)  Platinum 8480C\n"
)
FLAGS = (
    "stepping\t: 8\ncpu MHz\t\t: 2000.000\nflags\t\t: "
    "fpu avx2 avx512f avx512_bf16 amx_tile amx_bf16\n"
)
MODULE = """
Handle 0x0{n}, DMI type 17, 92 bytes
Memory Device
\tTotal Width: 80 bits
\tSize: {size}
\tType: {kind}
\tSpeed: {speed}
\tConfigured Memory Speed: {configured}
"""
UNKNOWN = dict.fromkeys(("kind", "speed", "configured"), "Unknown")
MODULES = "".join(
    MODULE.format(n=n, size="64 GB", kind="DDR5", speed="5600 MT/s", configured="4800 MT/s")
    for n in range(16)
) + MODULE.format(n=16, size="No Module Installed", **UNKNOWN)
CPUS = "# Socket,Core\n0,0\n0,1\n1,2\n1,3\n" + "0,0\n0,1\n1,2\n1,3\n"
CACHES = "NAME ONE-SIZE ALL-SIZE\nL1d     49152   196608\nL3  110100480 220200960\n"

ANSWERS = {  # to commands that begin like this
    "lscpu --parse": CPUS,
    "lscpu": CACHES,
    "dmidecode": MODULES,
    "cc ": "cc (Ubuntu 13.3.0-6ubuntu2, patched) 13.3.0\nCopyright\n",
    "nvidia-smi nvlink": "GPU 0: NVLink 0: 26 GB/s",
    "nvidia-smi --query-gpu=driver_version": "570.1\n" * 8,
    "nvidia-smi": "NVIDIA H100 80GB HBM3, 81559 MiB, 1980 MHz, 5\n" * 8,
}


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """Write the files of two sockets of two cores with two threads each."""
    files = {
        "proc/cpuinfo": "\n".join(f"processor\t: {n}\n{MODEL}{FLAGS}" for n in range(8)),
        "proc/meminfo": "MemTotal:       2147483648 kB\nMemFree: 1 kB\n",
        "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04 LTS"\n',
        "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "3800000\n",
        **{f"sys/block/nvme{n}n1/size": "7501476528\n" for n in range(2)},
        **{
            f"sys/block/nvme{n}n1/device/model": "SAMSUNG MZQL23T8HCLS-00A07   \n" for n in range(2)
        },
        "sys/block/loop0/size": "8\n",
        "proc/mounts": (
            "/dev/nvme0n1 / ext4 rw 0 0\nmgs:/data /data lustre rw 0 0\nproc /proc proc rw 0 0\n"
        ),
        **{
            f"sys/class/net/{name}/speed": x
            for name, x in (("eth0", "100000"), ("ib0", "400000"), ("lo", "1"))
        },
        **{f"sys/class/net/{name}/type": kind for name, kind in (("eth0", "1\n"), ("ib0", "32\n"))},
        **{f"sys/class/net/{name}/device/vendor": "x" for name in ("eth0", "ib0")},
        **{f"sys/devices/system/node/node{n}/x": "" for n in range(2)},
    }
    ports = {"0/state": "4: ACTIVE", "0/rate": "400 Gb/sec (4X NDR)", "0/link_layer": "InfiniBand"}
    ports |= {"1/state": "4: ACTIVE", "1/rate": "400 Gb/sec (4X NDR)", "2/state": "1: DOWN"}
    ports |= {"3/rate": "100 Gb/sec (4X EDR)", "3/link_layer": "Ethernet"}
    infiniband = {
        f"sys/class/infiniband/mlx5_{name.replace('/', '/ports/1/')}": f"{x}\n"
        for name, x in ports.items()
    }
    return write_files(tmp_path, files | infiniband)


def _ask(command: Sequence[str]) -> str:
    return next(
        (text for start, text in ANSWERS.items() if " ".join(command).startswith(start)), ""
    )


def test_a_server_with_accelerators(server: Path) -> None:
    facts = describe_system("SomeOrg", "closed", 2, server, _ask)
    assert tuple(facts) == FIELDS
    expected = {
        "system_name": (
            "2 nodes of 8x NVIDIA H100 80GB HBM3, "
            "2x Intel(R) Xeon(R) Platinum 8480C (Sapphire Rapids)"
        ),
        "status": "Research, Development, or Internal (RDI)",
        "host_processors_per_node": "2",
        "host_processor_core_count": "2",
        "host_processor_vcpu_count": "8",
        "host_processor_frequency": "3800 MHz (maximum)",
        "host_processor_caches": "L1d 48K (shared by 2 vCPUs), L3 107520K (shared by 4 vCPUs)",
        "host_memory_capacity": "2048.0 GiB",
        "host_memory_configuration": "16x 64 GB DDR5 at 4800 MT/s, 2 NUMA nodes",
        "host_storage_type": "2x NVMe SSD (SAMSUNG MZQL23T8HCLS-00A07); file systems ext4 lustre",
        "host_storage_capacity": "7682 GB",
        "host_networking": (
            "100 Gb/s Ethernet, 2x InfiniBand 400 Gb/s (4X NDR), RoCE 100 Gb/s (4X EDR)"
        ),
        "accelerators_per_node": "8",
        "accelerator_memory_capacity": "81559 MiB",
        "accelerator_host_interconnect": "PCIe Gen5",
        "accelerator_interconnect": "NVLink",
        "operating_system": "Ubuntu 24.04 LTS",
    }
    assert {name: facts[name] for name in expected} == expected
    stack = dict(pair.split(": ", 1) for pair in facts["other_software_stack"].split(", "))
    compiler = "cc (Ubuntu 13.3.0-6ubuntu2 patched) 13.3.0"
    assert (stack["NVIDIA driver"], stack["C compiler"]) == ("570.1", compiler)
    assert {"Python", "BLAS", "oneDNN", "OpenMP", "glibc", "kernel", "numpy"} <= set(stack)
    assert facts["hw_notes"].startswith("2 threads per core (SMT on); vector extensions: avx2")
    assert "amx_bf16" in facts["hw_notes"]
    assert all(type(value) is str for value in facts.values())


def test_a_machine_without_facts(tmp_path: Path) -> None:
    facts = describe_system("SomeOrg", "open", 1, tmp_path, lambda command: "")
    assert tuple(facts) == FIELDS
    assert (facts["accelerators_per_node"], facts["accelerator_model_name"]) == ("0", "N/A")
    assert facts["host_memory_capacity"] == "unknown"
    assert facts["host_memory_configuration"] == "modules unknown"
    assert facts["hw_notes"].startswith("1 thread per core")
    for name in ("number_of_nodes", "host_processors_per_node", "accelerators_per_node"):
        assert facts[name].isdecimal()


def test_the_command_writes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "systems" / "this.json"
    done = CliRunner().invoke(
        app, ["describe-system", "--out", str(path), "--submitter", "SomeOrg"]
    )
    assert done.exit_code == 0, done.output
    facts = json.loads(path.read_text())
    assert tuple(facts) == FIELDS
    assert (facts["submitter"], facts["division"]) == ("SomeOrg", "open")
    assert facts["host_processor_model_name"] in facts["system_name"]


def test_illegal_names_and_an_unwritable_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    codes = dict.fromkeys(("x.txt", "a b.json", ".json"), "config.value") | {
        "file/x.json": "file.unwritable"
    }
    for name, code in codes.items():
        with user_error(code, tmp_path / name):
            write_description(tmp_path / name, {})


def test_a_template_has_every_field_and_is_no_description(tmp_path: Path) -> None:
    made = template({"number_of_nodes": "8", "division": "closed"})
    assert tuple(made) == FIELDS
    assert made["number_of_nodes"] == "8"
    assert set(unfilled(made)) == set(FIELDS) - {"number_of_nodes", "division"}
    assert all(value.startswith(MARK) for name, value in made.items() if name in unfilled(made))
    with pytest.raises(AssertionError):
        template({"color": "red"})
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(template({"number_of_nodes": "1", "accelerators_per_node": "8"})))
    assert (
        official.run(official.system_desc_checker(path, "machine.json"))[0].outcome is Outcome.ERROR
    )

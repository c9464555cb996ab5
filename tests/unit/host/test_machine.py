"""Processors and the GPU driver as Linux reports them, from recorded files."""

from mlbert.host.machine import gpu_driver, processor_name, read_processors
from programs import write_files


def x86(name: str, family: int, model: int, stepping: int) -> str:
    return f"processor\t: 0\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: {name}\nstepping\t: {stepping}\n"


ARM = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"


def test_processors_and_their_generations(tmp_path):
    for cpuinfo, machine, name in (
        (
            x86("Intel(R) Xeon(R) Platinum 8168 CPU", 6, 85, 4),
            "",
            "Intel(R) Xeon(R) Platinum 8168 CPU (Skylake-SP)",
        ),
        (
            x86("Intel(R) Xeon(R)  Gold 6226R", 6, 85, 7),
            "",
            "Intel(R) Xeon(R) Gold 6226R (Cascade Lake)",
        ),
        (x86("Intel(R) Core(TM) i9-7900X", 6, 85, 4), "", "Intel(R) Core(TM) i9-7900X"),
        (
            x86("Intel(R) Xeon(R) Platinum 8480C", 6, 143, 8),
            "",
            "Intel(R) Xeon(R) Platinum 8480C (Sapphire Rapids)",
        ),
        (
            x86("AMD EPYC 7742 64-Core Processor", 23, 49, 0),
            "",
            "AMD EPYC 7742 64-Core Processor (Rome)",
        ),
        (
            x86("AMD EPYC 9575F 64-Core Processor", 26, 2, 1),
            "",
            "AMD EPYC 9575F 64-Core Processor (Turin)",
        ),
        (ARM, "Amazon EC2\n", "AWS Graviton4 (Arm Neoverse V2)"),
        (ARM, "NVIDIA GB200 NVL72\n", "NVIDIA Grace (Arm Neoverse V2)"),
        (ARM, "", "Arm Neoverse V2"),
    ):
        write_files(tmp_path, {"proc/cpuinfo": cpuinfo, "sys/class/dmi/id/sys_vendor": machine})
        assert processor_name(tmp_path) == name
        assert len(read_processors(tmp_path)) == 1


def test_the_driver(tmp_path):
    for text, version in {
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n": "535.104.05",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n": "570.86.15",
        "": "none",
    }.items():
        write_files(tmp_path, {"proc/driver/nvidia/version": text})
        assert gpu_driver(tmp_path) == version
    assert gpu_driver(tmp_path / "nowhere") == "none"

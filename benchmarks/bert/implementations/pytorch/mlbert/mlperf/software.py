"""The software of a system description: a pair ``name: version`` for each part that decides speed or numbers."""

from __future__ import annotations

import importlib
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from mlbert.host.machine import NONE, gpu_driver, read_text
from mlbert.host.native import openmp_runtime
from mlbert.mlperf.hardware import UNKNOWN, Ask

# Framework to the distributions that have it.
FRAMEWORKS = {"PyTorch": ("torch",), "TensorFlow": ("tensorflow", "tensorflow-cpu")}
_PACKAGES = ("numpy", "h5py", "tokenizers", "safetensors", "triton", "nvidia-dali-cuda120", "mlperf-logging")


def describe_software(root: Path, ask: Ask, framework: str) -> dict[str, str]:
    """The framework, which is imported where it is installed, what stands under it, and the operating system."""
    release = re.search(r'^PRETTY_NAME="?([^"\n]*)"?$', read_text(root / "etc/os-release"), re.MULTILINE)
    found = [version for name in FRAMEWORKS[framework] if (version := _version(name))]
    stack = {"Python": platform.python_version(), "C compiler": ask(["cc", "--version"]).partition("\n")[0]}
    stack |= _framework_parts(framework) if found else {}
    stack |= {"NVIDIA driver": gpu_driver(root).replace(NONE, "") or _asked_driver(ask)}
    stack |= {"glibc": platform.libc_ver()[1], "kernel": f"{platform.system()} {platform.release()}"}
    stack |= {name: _version(name) for name in _PACKAGES}
    pairs = [f"{name}: {version.replace(', ', ' ')}" for name, version in stack.items() if version]
    return {
        "framework": f"{framework} {' or '.join(found) or UNKNOWN}",
        "other_software_stack": ", ".join(pairs),
        "operating_system": release[1] if release else platform.system(),
        "sw_notes": f"Linux kernel {platform.release()}",
    }


def _framework_parts(framework: str) -> dict[str, str]:
    """Libraries that a framework brings, as it tells of them; an empty version is one that it does not have."""
    if framework == "TensorFlow":
        built = importlib.import_module("tensorflow").sysconfig.get_build_info()
        return {"CUDA": built.get("cuda_version", ""), "cuDNN": built.get("cudnn_version", "")}
    torch: Any = importlib.import_module("torch")
    told = torch.__config__.show()
    nccl = torch.cuda.nccl.version() if torch.version.cuda else ()
    return {
        "MKL": _found(r"Math Kernel Library Version ([\d.]+)", told),
        "BLAS": _found(r"BLAS_INFO=(\w+)", told),
        "oneDNN": _found(r"MKL-DNN v(\S+)", told),
        "OpenMP": Path(openmp_runtime() or "").name,
        "CUDA": torch.version.cuda or "",
        "cuDNN": str(torch.backends.cudnn.version() or ""),
        "NCCL": ".".join(map(str, nccl)),
    }


def _asked_driver(ask: Ask) -> str:
    listed = ask(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return listed.partition("\n")[0].strip()


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""

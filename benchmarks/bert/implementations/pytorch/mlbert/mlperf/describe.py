"""A system description for ``systems/<system>.json``, from what Linux says about the machine.

All values are text: the official checker joins several of them and crashes on numbers. What cannot be seen from
inside is "unknown" and is for a person to fill in; "N/A" is for what the machine does not have.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from mlbert.host.errors import UserError
from mlbert.mlperf import hardware
from mlbert.mlperf.hardware import UNKNOWN, Ask
from mlbert.mlperf.software import describe_software
from mlbert.mlperf.templates import FIELDS

STATUS = "Research, Development, or Internal (RDI)"


def ask(command: Sequence[str]) -> str:
    """What a program prints; empty when it is absent or fails."""
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
    """The 33 fields that the official checker wants, in its order.

    ``submitter`` is the same as in the logs, ``num_nodes`` counts nodes like this one; /proc, /sys and /etc are found
    below ``root``, and ``ask`` runs a program and returns what it prints. ``framework`` is one of
    `mlbert.mlperf.software.FRAMEWORKS`.
    """
    facts = {
        "submitter": submitter,
        "division": division,
        "status": STATUS,
        "number_of_nodes": str(num_nodes),
        **hardware.describe_processor(root),
        **hardware.describe_memory(root, ask),
        **hardware.describe_storage(root),
        **hardware.describe_network(root, num_nodes),
        **hardware.describe_accelerators(ask),
        **describe_software(root, ask, framework),
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
        raise UserError(
            "config.value", path, "is no legal name of a system file", "Use systems/<system>.json, without spaces"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(
            "file.unwritable", path, f"cannot be written ({error.strerror})", "Choose a file that is writable"
        ) from error


def _name_system(facts: dict[str, str]) -> str:
    """Such as ``2x Xeon 8480C, 8x H100``: the real models, because results are compared by this name."""
    nodes = f"{facts['number_of_nodes']} nodes of " if facts["number_of_nodes"] != "1" else ""
    host = f"{facts['host_processors_per_node']}x {facts['host_processor_model_name']}"
    if facts["accelerators_per_node"] == "0":
        return f"{nodes}{host} ({facts['host_processor_vcpu_count']} vCPUs, no accelerator)"
    return f"{nodes}{facts['accelerators_per_node']}x {facts['accelerator_model_name']}, {host}"

"""Impossible system descriptions, and those that contradict the logs, are found;
published ones pass.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from audit import ROOT, add_line, copy_of_ours, edit, expect, report, system_of
from mlaudit.findings import Outcome
from mlbert.host.system_description import FIELDS

PUBLISHED = ROOT / "tests/assets/published_logs/2xXE9712x4GB200.tar.xz"
MUTATIONS = {
    "no node": ({"number_of_nodes": "0"}, "system description", "number_of_nodes is '0'"),
    "no memory": (
        {"host_memory_capacity": "0 GB"},
        "system description",
        "host_memory_capacity is '0 GB'",
    ),
    "number": ({"number_of_nodes": 1}, "system description", "number_of_nodes is 1, not text"),
    "words for a count": ({"accelerators_per_node": "none"}, "submitter", "'none', not a number"),
    "division": ({"division": "closed"}, "division", "says 'open', not 'closed'"),
    "no division": (
        {"division": "Closed"},
        "division",
        "division 'Closed' is neither open nor closed",
    ),
    "submitter": (
        {"submitter": "Other"},
        "submitter",
        "submission_org is 'mlbert', systems/cpu_demo.json: line 2: ",
    ),
    "too few threads": (
        {"host_processor_vcpu_count": "1"},
        "system description",
        "is 1, fewer than 1 x 2 of host",
    ),
    "to do later": (
        {"cooling": "tbd: ask them"},
        "system description",
        "is 'tbd: ask them', still to be written",
    ),
    "question": ({"hw_notes": "?"}, "system description", "hw_notes is '?', still to be written"),
    "GPU build": (
        {"framework": "PyTorch 2.13.0+cu130"},
        "machine",
        "the logs ran PyTorch 2.13.0+cpu",
    ),
    "status": (
        {"status": "sold out"},
        "system description",
        "none of the four that the rules know",
    ),
    "another status": (
        {"status": "Preview"},
        "filed under",
        "is 'research', the system description says 'Preview'",
    ),
    "a model": (
        {"accelerator_model_name": "NVIDIA H100"},
        "system description",
        "is 0, but the accelerator is",
    ),
    "none of a model": (
        {"accelerators_per_node": "8"},
        "system description",
        "is 'N/A', but there are 8",
    ),
    "too many": (
        {"accelerators_per_node": "8"},
        "machine",
        "is 8 on 1 nodes, the logs have 1 ranks",
    ),
    "CPU build": ({"accelerators_per_node": "1"}, "machine", "the logs ran PyTorch 2.13.0+cpu"),
    "framework": (
        {"framework": "PyTorch 2.1.0"},
        "machine",
        "is 'PyTorch 2.1.0', the logs ran PyTorch 2.13.0+cpu",
    ),
    "other framework": ({"framework": "TensorFlow 2.21.0"}, "machine", "the logs ran PyTorch"),
    "Python": (
        {"other_software_stack": "Python: 3.9"},
        "machine",
        "says Python: 3.9, the logs ran 3.11.7",
    ),
    "package": (
        {"other_software_stack": "Python 3.11.7, numpy 1.26.0"},
        "machine",
        "says numpy 1.26.0",
    ),
    "kernel": (
        {"sw_notes": "Linux kernel 5.4.0"},
        "machine",
        "says Linux kernel 5.4.0, the logs ran on Linux-6",
    ),
    "system": (
        {"operating_system": "Windows 11"},
        "machine",
        "is 'Windows 11', the logs ran on Linux-6",
    ),
}


@pytest.fixture
def ours(tmp_path: Path) -> list[Path]:
    return copy_of_ours(tmp_path)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a log of another submitter with its description."""
    folder = tmp_path_factory.mktemp("published")
    subprocess.run(["tar", "-xf", PUBLISHED, "-C", folder], check=True)
    return [folder / "results/2xXE9712x4GB200/bert/result_0.txt"]


def describe(logs: list[Path], **changes: Any) -> dict[str, tuple[Outcome, str]]:
    """Return what is reported of a description with other fields; None leaves one out."""
    path = system_of(logs)
    before = path.read_text()
    system = {**json.loads(before), **changes}
    path.write_text(
        json.dumps({key: value for key, value in system.items() if value is not None}, indent=2)
    )
    try:
        return report(logs, ROOT)
    finally:
        path.write_text(before)


def test_good_descriptions_pass(ours: list[Path], published: list[Path]) -> None:
    newer = copy_of_ours(ours[0].parents[3] / "newer")
    add_line(newer[0], "ranks", "cpu", '"Intel(R) Xeon(R)  Processor @ 2.50GHz (Skylake-SP)"')
    add_line(newer[0], "ranks", "gpus", "{}")
    add_line(newer[0], "precision", "nodes", "1")
    for logs in (ours, newer, published):
        assert (
            describe(logs)
            .keys()
            .isdisjoint(("submitter", "filed under", "system description", "machine"))
        )


@pytest.mark.parametrize("field", FIELDS)
def test_no_field_of_ours_is_blank(field: str, ours: list[Path]) -> None:
    line = FIELDS.index(field) + 2
    words = f"systems/cpu_demo.json: line {line}: {field} is blank or missing"
    for value in ("", "  "):
        changes = {field: value}
        expect(describe(ours, **changes), "system description", Outcome.ERROR, words)


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_mutation_is_found_and_its_file_named(
    mutation: tuple[dict[str, Any], str, str], ours: list[Path]
) -> None:
    changes, check, words = mutation
    outcome, text = describe(ours, **changes)[check]
    assert outcome is Outcome.ERROR
    assert (
        check == "division"
        or "systems/cpu_demo.json: line " in text
        or "result_0.txt: line " in text
    )
    assert words in text


def test_a_field_that_is_there_twice_or_nobodys(ours: list[Path]) -> None:
    words = "systems/cpu_demo.json: line 35: color is not a field of a system description"
    assert describe(ours, color="grey")["system description"] == (Outcome.NOTE, words)
    path = system_of(ours)
    path.write_text(path.read_text().replace('"cooling"', '"number_of_nodes": "2",\n  "cooling"'))
    expect(
        report(ours, ROOT),
        "system description",
        Outcome.ERROR,
        "number_of_nodes occurs 2 times: ['1', '2']",
    )


def test_others_fill_in_as_they_like(published: list[Path]) -> None:
    blank = dict.fromkeys(("cooling", "hw_notes", "host_networking", "accelerator_frequency"), "")
    assert "system description" not in describe(
        published, **blank, other_software_stack={"cuda": "12"}
    )
    for changes in (
        {"operating_system": ""},
        {"accelerator_model_name": "N/A"},
        {"status": "onprem"},
        {"host_storage_type": "", "host_storage_capacity": ""},
        {"accelerator_memory_capacity": "0 GB"},
        {"cooling": "TODO"},
        {"host_processor_vcpu_count": "71"},
    ):
        assert describe(published, **changes)["system description"][0] is Outcome.WARN, changes
    assert "values" not in describe(published, number_of_nodes="9" * 400)
    for changes in (
        {"framework": ""},
        {"number_of_nodes": "0"},
        {"accelerators_per_node": 8},
        {"submitter": None},
    ):
        assert describe(published, **changes)["system description"][0] is Outcome.ERROR, changes


@pytest.mark.parametrize(
    ("changes", "check", "words"),
    [
        (
            {"accelerators_per_node": "8"},
            "machine",
            "8 init_start, systems/2xXE9712x4GB200.json: line",
        ),
        ({"number_of_nodes": "16"}, "machine", "accelerators_per_node is 4 on 16 nodes"),
        (
            {"number_of_nodes": "5"},
            "values",
            "global_batch_size 768 has no equal shares for 5 nodes x 4 accelerators",
        ),
        (
            {"submitter": "Habana"},
            "submitter",
            "submission_org is 'Dell', systems/2xXE9712x4GB200.json: line 2: ",
        ),
    ],
)
def test_a_description_of_another_size_or_submitter(changes, check, words, published) -> None:
    expect(describe(published, **changes), check, Outcome.WARN, "result_0.txt: line ", words)


def test_a_gpu_that_the_description_does_not_have(ours: list[Path]) -> None:
    edit(ours[0], "packages", r"\+cpu", "+cu130")
    line = "result_0.txt: systems/cpu_demo.json: line 20: accelerators_per_node is 0, the logs ran"
    build = "framework is 'PyTorch 2.13.0+cpu', the logs ran PyTorch 2.13.0+cu130 (line "
    expect(report(ours, ROOT), "machine", Outcome.ERROR, build, f"warning: {line}")
    edit(ours[0], "ops", r'\\"native\\"', r'\\"triton\\"')
    expect(report(ours, ROOT), "machine", Outcome.ERROR, f"{line} kernels")


@pytest.mark.parametrize(
    ("key", "value", "changes", "words"),
    [
        ("nodes", "2", {}, "number_of_nodes is 1, the logs ran on 2"),
        ("cpu", '"AMD EPYC 7742"', {}, "the logs ran on 'AMD EPYC 7742'"),
        (
            "gpus",
            '{"NVIDIA H100 80GB HBM3": 8}',
            {},
            "accelerators_per_node is 0, the logs ran on 8 of a machine",
        ),
        (
            "gpus",
            '{"NVIDIA H100": 1}',
            {"accelerator_model_name": "NVIDIA B200"},
            "the logs ran on 'NVIDIA H100",
        ),
        (
            "gpu_driver",
            '"570.1"',
            {"other_software_stack": "NVIDIA driver: 550.2"},
            "the logs ran with 570.1",
        ),
    ],
)
def test_the_machine_named_by_newer_logs(
    key: str, value: str, changes: dict, words: str, ours: list[Path]
) -> None:
    add_line(ours[0], "ranks", key, value)
    expect(describe(ours, **changes), "machine", Outcome.ERROR, words)

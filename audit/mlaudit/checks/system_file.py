"""Check that the system description is consistent, and agrees with the logs."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlaudit.findings import Complaint, Complaints, Outcome
from mlaudit.logs import Log, is_number
from mlaudit.result_set import ResultSet
from mlaudit.rounds import earlier_status
from mlbert.host.files import read_plain
from mlbert.host.provenance import TENSORFLOW2
from mlbert.host.system_description import DISTRIBUTIONS_OF, FIELDS

_MEANINGFUL = "rules: the system description says what the system is"
_MACHINE = "rules: the system description is of the system that ran"
_TEXT = "result_summarizer and system_desc_checker read text there"
_COUNTS = ("number_of_nodes", "host_processors_per_node", "accelerators_per_node")
_TEXTS = (
    "submitter",
    "system_name",
    "host_processor_model_name",
    "host_processor_core_count",
    "accelerator_model_name",
    "accelerators_per_node",
    "framework",
)
_NEEDED = ("submitter", "division", "status", "system_name", "framework", *_COUNTS)
_ABOVE_ZERO = (
    "number_of_nodes",
    "host_processors_per_node",
    "host_processor_core_count",
    "host_processor_vcpu_count",
    "host_memory_capacity",
    "host_storage_capacity",
)
_NOTED = (
    "host_processor_model_name",
    "host_processor_core_count",
    "host_memory_capacity",
    "accelerator_model_name",
    "operating_system",
    "host_storage_type",
    "host_storage_capacity",
)
_UNWRITTEN = re.compile(r"(todo|fixme|tbd|xxx+|fill[ _-]?in)\b.*|\?+", re.IGNORECASE | re.DOTALL)
_WHOLE_FLOAT = re.compile(r"\.0+$")  # a spreadsheet makes 1.0 of 1
_STATUSES = ("availableonpremise", "availablecloud", "researchdevelopmentorinternalrdi", "preview")
_NOTHING = ("", "n/a", "na", "none", "-", "no", "0")
_OPTIONAL = ("framework_name",)


@dataclass(frozen=True)
class _Description:
    """A system description, its name in messages,
    and the severity of checks that are strict only for our own.
    """

    fields: Mapping[str, Any]
    name: str
    lines: Sequence[str]
    strict: Outcome

    def text(self, key: str) -> str:
        """Return a field as text, empty if it is missing or null."""
        value = self.fields.get(key)
        return "" if value is None else str(value).strip()

    def count(self, key: str) -> int | None:
        """Return a field as a number, or None if it is not one."""
        text = _WHOLE_FLOAT.sub("", self.text(key))
        return int(text) if text.isdecimal() else None

    def complaint(
        self, outcome: Outcome, key: str, problem: str, rule: str = _MEANINGFUL
    ) -> Complaint:
        """Return a complaint about a field, with its line."""
        return Complaint(outcome, self.sentence(key, problem), rule)

    def sentence(self, key: str, problem: str) -> str:
        """Return the text of a complaint: file, line, field and problem."""
        numbers = [number for number, line in enumerate(self.lines, start=1) if f'"{key}"' in line]
        place = f"line {numbers[-1]}: " if numbers else ""
        return f"{self.name}: {place}{key} {problem}"


def check_submitter(results: ResultSet) -> Complaints:
    """The system description names the same submitter as the logs,
    and its counts are numbers as text.
    """
    system = _description(results)
    submitter = system.fields.get("submitter")
    orgs = [(log, event) for log in results.logs if (event := log.first("submission_org"))]
    for name, (log, event) in {str(org[1].value): org for org in reversed(orgs)}.items():
        if name.casefold() != str(submitter).casefold():
            text = (
                f"submission_org is {name!r}, {system.sentence('submitter', f'is {submitter!r}')}"
            )
            yield log.complaint(system.strict, text, _MACHINE, event)
    for key in _COUNTS:
        if system.count(key) is None:
            yield system.complaint(
                Outcome.ERROR, key, f"is {system.fields.get(key)!r}, not a number", _TEXT
            )


def check_description(results: ResultSet) -> Complaints:
    """The system description has all fields filled in with plausible values."""
    system = _description(results)
    yield from _duplicates(system)
    blank = [key for key in FIELDS if not system.text(key)]
    for key in blank:
        if system.strict is Outcome.ERROR or key in _NEEDED:
            yield system.complaint(Outcome.ERROR, key, "is blank or missing")
        elif key in _NOTED:
            yield system.complaint(Outcome.WARN, key, "is blank or missing")
    for key, value in system.fields.items():
        is_asked = system.strict is Outcome.ERROR or key in _TEXTS
        if key in FIELDS and not isinstance(value, str) and (is_asked or key in _COUNTS):
            yield system.complaint(
                Outcome.ERROR if is_asked else Outcome.WARN, key, f"is {value!r}, not text", _TEXT
            )
        if _UNWRITTEN.fullmatch(str(value).strip()):
            yield system.complaint(system.strict, key, f"is {value!r}, still to be written")
        if key not in FIELDS and key not in _OPTIONAL:
            yield system.complaint(Outcome.NOTE, key, "is not a field of a system description", "")
    for key in _ABOVE_ZERO:
        if _is_nothing(system.text(key)):
            outcome = Outcome.ERROR if key in _COUNTS else system.strict
            yield system.complaint(outcome, key, f"is {system.text(key)!r}")
    yield from _threads(system)
    status = system.text("status")
    letters = re.sub(r"[^a-z]|in(?= cloud)", "", status.casefold())
    is_earlier = results.round.has_earlier_statuses and earlier_status(status) is not None
    if status and letters not in _STATUSES and not is_earlier:
        yield system.complaint(
            system.strict, "status", f"is {status!r}, none of the four that the rules know"
        )
    yield from _accelerators(system)


def check_machine(results: ResultSet) -> Complaints:
    """The system description matches the machine and software in this code's logs."""
    system = _description(results)
    for log in results.own_logs:
        for key, problem in itertools.chain(_software(system, log), _hardware(system, log)):
            yield log.error(system.sentence(key, problem), _MACHINE)
        for problem in _unused_gpu_build(system, log):
            yield log.warning(system.sentence("accelerators_per_node", problem), _MACHINE)
    for log in results.logs:
        if not log.is_ours:
            yield from _processes(system, log)


def _unused_gpu_build(system: _Description, log: Log) -> Iterable[str]:
    ran = str(_packages(log).get("torch"))
    is_without = system.count("accelerators_per_node") == 0 and not log.value("gpus")
    if is_without and "+cu" in ran and log.value("recipe") != TENSORFLOW2:
        yield f"is 0, the logs ran PyTorch {ran}"


def _processes(system: _Description, log: Log) -> Iterable[Complaint]:
    """Check the process count of other programs: if several processes log,
    it is one per accelerator or per node.
    """
    nodes = system.count("number_of_nodes")
    each = system.count("accelerators_per_node")
    starts = log.all("init_start")
    if nodes and each and len(starts) > 1 and len(starts) not in (nodes, nodes * each):
        described = system.sentence("accelerators_per_node", f"is {each} on {nodes} nodes")
        yield log.warning(f"{len(starts)} init_start, {described}", _MACHINE, starts[0])


def _packages(log: Log) -> Mapping[str, Any]:
    packages = log.value("packages")
    return packages if isinstance(packages, dict) else {}


def _description(results: ResultSet) -> _Description:
    assert results.system is not None
    path = results.system_file
    text = ""
    if path is not None and path.is_file():
        text = read_plain(path, "Fix it").decode(errors="replace")
    name = f"systems/{path.name}" if path is not None else "system description"
    strict = Outcome.ERROR if results.own_logs else Outcome.WARN
    return _Description(results.system, name, text.splitlines(), strict)


def _duplicates(system: _Description) -> Iterable[Complaint]:
    """Find duplicate keys, of which JSON readers use the last."""
    pairs: list[tuple[str, Any]] = []

    def keep(found: list[tuple[str, Any]]) -> dict[str, Any]:
        pairs[:] = found  # the outermost object comes last
        return dict(found)

    try:
        json.loads("\n".join(system.lines), object_pairs_hook=keep)
    except (ValueError, RecursionError):
        return  # reported by the official checker
    values: dict[str, list[Any]] = {}
    for key, value in pairs:
        values.setdefault(key, []).append(value)
    for key, found in values.items():
        if len(found) > 1:
            is_same = all(value == found[0] for value in found)
            outcome = Outcome.WARN if is_same else Outcome.ERROR
            yield system.complaint(outcome, key, f"occurs {len(found)} times: {found}")


def _is_nothing(text: str) -> bool:
    """Return True if a field begins with a number that is 0 or less."""
    number = re.match(r"-?\d+(\.\d+)?", text)
    return number is not None and float(number[0]) <= 0


def _threads(system: _Description) -> Iterable[Complaint]:
    """Check that a node has a thread for each core.

    Others may give the threads of one processor.
    """
    processors = system.count("host_processors_per_node") if system.strict is Outcome.ERROR else 1
    cores = system.count("host_processor_core_count")
    threads = system.count("host_processor_vcpu_count")
    if processors and cores and threads and threads < processors * cores:
        text = f"is {threads}, fewer than {processors} x {cores} of host_processor_core_count"
        yield system.complaint(system.strict, "host_processor_vcpu_count", text)


def _accelerators(system: _Description) -> Iterable[Complaint]:
    key = "accelerator_memory_capacity"
    if system.count("accelerators_per_node") and _is_nothing(system.text(key)):
        yield system.complaint(system.strict, key, f"is {system.text(key)!r}")
    count = system.count("accelerators_per_node")
    model = system.text("accelerator_model_name")
    if count == 0 and model.casefold() not in _NOTHING:
        yield system.complaint(
            system.strict, "accelerators_per_node", f"is 0, but the accelerator is {model!r}"
        )
    if count and model.casefold() in _NOTHING:
        yield system.complaint(
            system.strict, "accelerator_model_name", f"is {model!r}, but there are {count}"
        )


def _software(system: _Description, log: Log) -> Iterable[tuple[str, str]]:
    packages = _packages(log)
    name = "TensorFlow" if log.value("recipe") == TENSORFLOW2 else "PyTorch"
    ran = next((packages[key] for key in DISTRIBUTIONS_OF[name] if packages.get(key)), None)
    framework = system.text("framework")
    if framework and log.first("recipe") and name.casefold() not in framework.casefold():
        yield "framework", f"is {framework!r}, the logs ran {name}"
    elif framework and ran and (_version(ran) not in framework or not _is_build(ran, framework)):
        event = log.first("packages")
        place = f" (line {event.line})" if event else ""
        yield "framework", f"is {framework!r}, the logs ran {name} {ran}{place}"
    stack = system.text("other_software_stack")
    for package, version in {**packages, "Python": log.value("python")}.items():
        found = re.search(rf"(?<![\w-]){re.escape(package)}:? (\d\S*?)(?=,|;|\s|$)", stack)
        if found and version and _version(found[1]) != _version(str(version)):
            yield "other_software_stack", f"says {found[0]}, the logs ran {version}"
    platform = str(log.value("platform") or "")
    for key in ("sw_notes", "operating_system", "other_software_stack"):
        kernel = re.search(r"(?:Linux kernel|kernel: Linux) (\S+?)(?=,|;|\s|$)", system.text(key))
        if kernel and platform and not platform.startswith(f"Linux-{kernel[1]}-"):
            yield key, f"says {kernel[0]}, the logs ran on {platform}"
    if platform.startswith("Linux") and re.search(
        r"windows|macos|darwin", system.text("operating_system").casefold()
    ):
        yield (
            "operating_system",
            f"is {system.text('operating_system')!r}, the logs ran on {platform}",
        )


def _is_build(ran: str, framework: str) -> bool:
    """Return False if both versions name a build, such as +cpu, and the builds differ."""
    described = re.search(re.escape(_version(ran)) + r"\+([\w.]+)", framework)
    build = ran.partition("+")[2]
    return described is None or not build or described[1] == build


def _version(text: str) -> str:
    """Return a version without its build suffix, such as +cpu."""
    return text.partition("+")[0]


def _hardware(system: _Description, log: Log) -> Iterable[tuple[str, str]]:
    nodes = system.count("number_of_nodes")
    each = system.count("accelerators_per_node")
    ranks = log.value("ranks")
    packages = _packages(log)
    if nodes and each and is_number(ranks) and nodes * each != ranks:
        yield "accelerators_per_node", f"is {each} on {nodes} nodes, the logs have {ranks} ranks"
    if each and str(packages.get("torch")).endswith("+cpu") and log.value("recipe") != TENSORFLOW2:
        yield "accelerators_per_node", f"is {each}, the logs ran PyTorch {packages['torch']}"
    if each == 0 and re.search(r'"(triton|cublaslt|flash|fmha)"', str(log.value("ops"))):
        yield "accelerators_per_node", "is 0, the logs ran kernels of a GPU"
    logged = log.value("nodes")
    if nodes and is_number(logged) and nodes != logged:
        yield "number_of_nodes", f"is {nodes}, the logs ran on {logged}"
    cpu = log.value("cpu")
    model = system.text("host_processor_model_name")
    if isinstance(cpu, str) and model and not _begins_alike(cpu, model):
        yield "host_processor_model_name", f"is {model!r}, the logs ran on {cpu!r}"
    gpus = log.value("gpus")
    if isinstance(gpus, dict):
        yield from _gpus(system, gpus)
    stack = system.text("other_software_stack")
    driver = str(log.value("gpu_driver") or "none")
    found = re.search(r"NVIDIA driver:? (\d[\d.]*)", stack)
    if found and found[1] != driver and driver != "none":
        yield "other_software_stack", f"says {found[0]}, the logs ran with {driver}"


def _begins_alike(one: str, other: str) -> bool:
    """Return True if one processor name is a prefix of the other: some omit the generation."""
    plain = [" ".join(name.casefold().split()) for name in (one, other)]
    return plain[0].startswith(plain[1]) or plain[1].startswith(plain[0])


def _gpus(system: _Description, gpus: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Check the number and models of GPUs.

    A model is recognized by its words with a digit, such as H100.
    """
    each = system.count("accelerators_per_node")
    described = system.text("accelerator_model_name")
    ran = sum(number for number in gpus.values() if is_number(number))
    if each is not None and ran != each:
        yield "accelerators_per_node", f"is {each}, the logs ran on {ran} of a machine"
    for model in gpus:
        words = [
            word
            for word in re.findall(r"(?<![a-z])[a-z]+\d+\w*", model.casefold())
            if not word.startswith("hbm")
        ]
        if words and not any(word in described.casefold() for word in words):
            yield "accelerator_model_name", f"is {described!r}, the logs ran on {model!r}"

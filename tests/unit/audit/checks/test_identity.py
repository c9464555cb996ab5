"""Whether this code's logs have all that their writer gives them,
and lead to the code and system that they name.
"""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest

from audit import ROOT, copy_of_ours, edit, expect, report, set_value
from logger_logs import write_log
from mlaudit.checks.run_identity import check_whose
from mlaudit.findings import Outcome
from mlaudit.logs import read_log
from mlaudit.result_set import ResultSet
from mlbert.data.formats.base import named_by_files
from mlbert.host.provenance import SOURCE_STATEMENT

# Where it was when the log was written
IDENTITY = "benchmarks/bert/implementations/pytorch/mlbert/core/identity.py"
# Every key of the identity, the submission and the hyper-parameters that one function writes.
DELETED = (
    "config_file",
    "config_file_sha256",
    "config_parents",
    "model_shape",
    "model_shape_sha256",
    "train_data",
    "eval_data",
    "commit",
    "tree_modified",
    "image",
    "image_digest",
    "image_commit",
    "python",
    "platform",
    "packages",
    "precision",
    "ops",
    "ranks",
    "submission_org",
    "submission_status",
    "submission_platform",
    "global_batch_size",
    "gradient_accumulation_steps",
)
# The recipe logs these three: only the code of the commit shows that they are missing.
BY_THE_RECIPE = ("opt_name", "opt_lamb_beta_1", "num_warmup_steps")

# key, pattern, replacement, check, what it must say.
MUTATIONS = {
    "type": (
        "run_start",
        "INTERVAL_START",
        "POINT_IN_TIME",
        "event types",
        "run_start is of type 'POINT_IN_TIME'",
    ),
    "namespace": (
        "seed",
        '"namespace": ""',
        '"namespace": "worker0"',
        "event types",
        "has the namespace 'worker0'",
    ),
    "short commit": (
        "commit",
        r'"value": "\w{8}\w*"',
        '"value": "457f900e"',
        "writer",
        "neither a commit of 40",
    ),
    "unknown commit": (
        "commit",
        r'"value": "\w+"',
        f'"value": "{"ab" * 20}"',
        "code",
        "is not in the tree's history",
    ),
    "modified": (
        "tree_modified",
        "false",
        "true",
        "code",
        "tree_modified is True, so no commit contains the code",
    ),
    "another config": (
        "config_file_sha256",
        r'"value": "\w',
        '"value": "0',
        "code",
        "is another file",
    ),
    "no digest": (
        "config_file_sha256",
        r'"value": "\w+"',
        '"value": "abc"',
        "writer",
        "'abc' is not a SHA-256",
    ),
    "another parent": (
        "config_parents",
        r'": "[0-9a-f]{2}',
        '": "00',
        "code",
        "env.sh is another file",
    ),
    "no such config": ("config_file", "demo.sh", "gone.sh", "code", "gone.sh is not in the tree"),
    "no such recipe": (
        "recipe",
        "packed_lamb",
        "packed_adam",
        "code",
        "recipes/packed_adam.py is not in the tree",
    ),
    "data": (
        "train_data",
        "sha256:",
        "sha256:0",
        "writer",
        "neither the identity of a set nor synthetic",
    ),
    "digest": ("image_digest", '"none"', '"sha256:12"', "writer", "is not a sha256: digest"),
    "digest of nothing": (
        "image_digest",
        '"none"',
        f'"sha256:{"0" * 64}"',
        "writer",
        "image_digest without an image",
    ),
    "no packages": ("packages", r'"torch": "[^"]*", ', "", "writer", "packages has no torch"),
    "no numpy": (
        "packages",
        r'"numpy": "[^"]*", ',
        "",
        "writer",
        "packages has no numpy, which the program needs",
    ),
    "wrong line": (
        "opt_lamb_beta_1",
        r'"lineno": (\d+)',
        r'"lineno": 1\1',
        "call sites",
        "opt_lamb_beta_1",
    ),
    "other line": (
        "seed",
        r'"lineno": \d+',
        '"lineno": 133',
        "call sites",
        "experiment.py:133 does not log seed",
    ),
    "other file": (
        "seed",
        r'"file": "[^"]*"',
        f'"file": "{IDENTITY}"',
        "call sites",
        "identity.py",
    ),
    "no line": ("seed", r', "lineno": \d+', "", "call sites", "seed names no file and line"),
    "other platform": (
        "submission_platform",
        '"cpu_demo"',
        '"dgx"',
        "filed under",
        "'dgx', filed under 'cpu_demo'",
    ),
    "other status": (
        "submission_status",
        "research",
        "onprem",
        "filed under",
        "is 'onprem', the system description",
    ),
    "truncated line": ("eval_samples", r"\}\}$", "", "lines", ""),
    "no metadata": (
        "train_samples",
        r', "metadata".*\}$',
        "}",
        "lines",
        "train_samples has no metadata",
    ),
    "misread text": (
        "init_stop",
        r'"lineno"',
        '"eval_accuracy": 1, "lineno"',
        "lines",
        "contains the text",
    ),
    "other division": (
        "submission_division",
        '"open"',
        '"closed"',
        "division",
        "says 'closed', not 'open'",
    ),
    "aborted": ("run_stop", '"success"', '"aborted"', "status", "status is 'aborted'"),
    "fraction": (
        "eval_accuracy",
        r'"epoch_num": (\d+)',
        r'"epoch_num": \1.5',
        "plain numbers",
        "not a count",
    ),
    "no status": (
        "submission_status",
        "research",
        "done",
        "filed under",
        "'done' is not one of research",
    ),
}


def test_a_good_log_passes(ours: Path) -> None:
    said = report([ours], ROOT)
    # Another job had the cores.
    assert "72.16 s since the evaluation before" in said.pop("speed")[1]
    assert {outcome for outcome, _ in said.values()} <= {Outcome.NOTE}


def test_a_run_before_its_commit(ours: Path) -> None:
    text = re.sub(
        r'"time_ms": (\d+)',
        lambda ms: f'"time_ms": {int(ms[1]) - 7 * 86_400_000}',
        ours.read_text(),
    )
    ours.write_text(text)
    words = "result_0.txt: line 48: run_start is 167.8 hours before commit 457f900ece"
    expect(report([ours], ROOT), "code", Outcome.ERROR, words)


@pytest.mark.parametrize(("limit", "is_wrong"), [("190.0", False), ("60.0", True)])
def test_a_run_beyond_its_time(ours: Path, limit: str, is_wrong: bool) -> None:
    edit(ours, "configuration", r'("MAX_SECONDS": \{"value": )200\.0', rf"\g<1>{limit}")
    outcome, text = report([ours]).get("configuration", (Outcome.PASS, ""))
    assert (outcome is Outcome.ERROR) == is_wrong
    words = "result_0.txt: line 85: the run took 200 s, its configuration says MAX_SECONDS"
    assert text.startswith(words if is_wrong else "")


@pytest.mark.parametrize("deleted", ["configuration", "recipe"])
def test_a_log_stays_ours_without_its_provenance(deleted: str, ours: Path, log: Path) -> None:
    edit(ours, deleted, ".*\n", "")
    edit(ours, "configuration" if deleted == "recipe" else "recipe", ".*\n", "")
    assert read_log(ours).is_ours
    assert not read_log(log).is_ours
    expect(
        report([ours], ROOT),
        "writer",
        Outcome.ERROR,
        f"result_0.txt: {deleted} is missing, which {IDENTITY}:",
    )


def test_the_callback_for_other_programs_is_not_this_code(log: Path) -> None:
    callback = "benchmarks/bert/implementations/pytorch/mlbert/mlperf/callback.py"
    for key in ("seed", "init_stop"):
        edit(log, key, r'"file": "[^"]*"', f'"file": "{callback}"')
    assert not read_log(log).is_ours


@pytest.mark.parametrize(
    ("file", "is_ours"),
    [
        ("benchmarks/bert/implementations/tensorflow2/tf2_bert/loop.py", True),
        ("/workspace/tree/benchmarks/bert/implementations/pytorch/mlbert/runs/identity.py", True),
        ("/opt/env/lib/python3.12/site-packages/mlbert/runs/identity.py", True),
        ("/usr/lib/python3/dist-packages/tf2_bert/loop.py", True),
        # As Google's results of v0.7 name it.
        ("/w/site-packages/staging/models/prod/tf2_bert/bert/run_pretraining.py", False),
        ("/opt/someone/mlbert/train.py", False),
        ("mlbert/train.py", False),
        ("<string>", False),
    ],
)
def test_a_log_is_ours_by_where_its_calls_are(file: str, is_ours: bool, log: Path) -> None:
    edit(log, "seed", r'"file": "[^"]*"', f'"file": "{file}"')
    assert read_log(log).is_ours is is_ours


def test_an_image_of_another_commit(ours: Path) -> None:
    commit = read_log(ours).value("commit")
    set_value(ours, "image_commit", f'"{commit[:12]}-dirty"')
    assert "writer" not in report([ours], ROOT)
    number = set_value(ours, "image_commit", f'"{"4" * 40}"')
    expect(
        report([ours], ROOT),
        "writer",
        Outcome.WARN,
        f"result_0.txt: line {number}: image_commit is 4444",
    )


@pytest.mark.parametrize(
    ("platform", "folder", "name", "is_warned"),
    [
        ("16xNVIDIA GB200", "tyche_ngpu64", "Tyche (1x NVIDIA GB200 NVL72)", False),
        ("1xNVIDIA HGX B200", "nyx_n1_ngc25.04_pytorch", "Nyx (1x NVIDIA DGX B200)", False),
        ("2xA5000", "7920T_2xA5000_hdd", "Dell Precision 7920", False),
        ("1xDGX-H100", "XE9680x8H200-SXM-141GB", "XE9680x8H200-SXM-141GB", True),
        ("another machine", "XE9680x8H200-SXM-141GB", "XE9680x8H200-SXM-141GB", False),
    ],
)
def test_a_platform_of_another_system(platform, folder, name, is_warned, tmp_path) -> None:
    path = tmp_path / "results" / folder / "bert" / "result_0.txt"
    path.parent.mkdir(parents=True)
    number = set_value(write_log(path), "submission_platform", json.dumps(platform))
    results = ResultSet([read_log(path)], {"system_name": name})
    said = [
        complaint for complaint in check_whose(results) if "submission_platform" in complaint.text
    ]
    assert [complaint.outcome for complaint in said] == [Outcome.WARN] * is_warned
    assert all(
        f"result_0.txt: line {number}: submission_platform is" in complaint.text
        for complaint in said
    )


@pytest.mark.parametrize("content", [None, "1" * 64])
def test_data_known_by_its_files_is_data(content: str | None, ours: Path) -> None:
    set_value(ours, "train_data", f'"{named_by_files("0" * 64, content)}"')
    assert "writer" not in report([ours], ROOT)


@pytest.mark.parametrize("key", [*DELETED, *BY_THE_RECIPE])
def test_a_deleted_key_is_missed(key: str, ours: Path) -> None:
    edit(ours, key, ".*\n", "")
    found = report([ours], ROOT if key in BY_THE_RECIPE else None)
    expect(found, "writer", Outcome.ERROR, f"result_0.txt: {key} is missing")


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_mutation_is_found_at_its_line(mutation: tuple[str, ...], ours: Path) -> None:
    key, pattern, replacement, check, words = mutation
    number = edit(ours, key, pattern, replacement)
    expect(report([ours], ROOT), check, Outcome.ERROR, f"result_0.txt: line {number}: ", words)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("run_start", "init_stop", "init_stop comes after run_start"),
        ("train_samples", "run_stop", "eval_samples comes after run_stop"),
        ("cache_clear", "init_start", "cache_clear comes after init_start"),
        ("commit", "python", "comes after python, which the code logs later"),
        (
            "submission_org",
            "submission_status",
            "comes after submission_status, which the code logs later",
        ),
    ],
)
def test_the_order_is_the_writers(first: str, second: str, words: str, ours: Path) -> None:
    lines = ours.read_text().splitlines(keepends=True)
    one, two = (
        next(n for n, line in enumerate(lines) if f'"key": "{key}"' in line)
        for key in (first, second)
    )
    lines[one], lines[two] = lines[two], lines[one]
    ours.write_text("".join(lines))
    expect(report([ours]), "writer", Outcome.ERROR, "result_0.txt: line ", words)


def test_a_config_outside_the_tree_and_a_modified_tree_without_one_are_warnings(ours: Path) -> None:
    number = edit(ours, "config_file", '"value": "', '"value": "/elsewhere/')
    expect(
        report([ours], ROOT),
        "code",
        Outcome.WARN,
        f"line {number}: /elsewhere/",
        "outside the tree",
    )
    edit(ours, "tree_modified", "false", "true")
    assert report([ours])["code"][0] is Outcome.WARN


def test_a_model_of_another_size_in_closed(ours: Path) -> None:
    edit(ours, "submission_division", '"open"', '"closed"')
    expect(
        report([ours], ROOT),
        "code",
        Outcome.ERROR,
        "demo.json: num_hidden_layers is 1, closed requires 24",
    )


@pytest.mark.parametrize(("replacement", "count"), [(r"\1\1", 2), ("", 0)])
def test_a_log_names_one_seed(replacement: str, count: int, ours: Path) -> None:
    edit(ours, "seed", "(.*\n)", replacement)
    expect(report([ours]), "seeds", Outcome.ERROR, f"result_0.txt: logs {count} seeds, not one")


def test_a_line_logged_twice(ours: Path) -> None:
    number = edit(ours, "commit", "(.*\n)", r"\1\1")
    expect(
        report([ours]),
        "writer",
        Outcome.ERROR,
        f"line {number + 1}: commit is logged again, after line {number}",
    )


def test_a_call_that_other_logs_make_elsewhere_needs_no_history(tmp_path: Path) -> None:
    logs = copy_of_ours(tmp_path, num_logs=4)
    edit(logs[2], "seed", r'"lineno": \d+', '"lineno": 1')
    words = "result_2.txt: line 8: seed is logged at benchmarks/"
    expect(
        report(logs, tmp_path), "call sites", Outcome.ERROR, words, "in other logs at benchmarks/"
    )


def test_an_export_proves_its_files_by_their_digests(ours: Path, tmp_path: Path) -> None:
    """The export is of the log's commit, as `mlbert submission export` writes it."""
    log = read_log(ours)
    export = tmp_path / "export"
    files = {}
    for name in {event.call_site[0] for event in log.events if event.call_site}:
        (export / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, export / name) if (ROOT / name).exists() else (
            export / name
        ).write_text("")
        files[name] = hashlib.sha256((export / name).read_bytes()).hexdigest()
    statement = {"commit": log.value("commit"), "dirty": False, "files": files}
    (export / SOURCE_STATEMENT).write_text(json.dumps(statement))
    assert "is not available" not in report([ours], export).get("call sites", ("", ""))[1]
    (export / IDENTITY).write_text("changed")
    words = f"result_0.txt: {IDENTITY} is not the file of source.json"
    expect(report([ours], export), "call sites", Outcome.ERROR, words)
    (export / SOURCE_STATEMENT).write_text(json.dumps(statement | {"dirty": True}))
    assert "modified since commit" in report([ours], export)["call sites"][1]


def test_other_programs_are_not_asked_for_our_form(log: Path, tmp_path: Path) -> None:
    edit(log, "seed", '"namespace": ""', '"namespace": "worker0"')
    edit(log, "submission_status", "research", "onprem")
    assert {"writer", "code", "event types", "configuration"}.isdisjoint(report([log]))
    edit(log, "run_start", "INTERVAL_START", "POINT_IN_TIME")
    assert report([log])["event types"][0] is Outcome.WARN

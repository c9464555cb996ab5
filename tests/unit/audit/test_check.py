"""The whole check on trees, folders and single logs; and its command."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from audit import set_value
from interrupted_runs import train
from logger_logs import write_log, write_tree
from mlaudit import official
from mlaudit.check import check
from mlaudit.cli.submission import app
from mlaudit.findings import Complaint, Finding, Outcome, failed, finding_of
from mlaudit.logs import read_log
from mlaudit.own_checks import run_checks
from mlaudit.result_set import NAMES, ResultSet, samples_per_second
from mlaudit.scratch_copy import Workplace
from mlaudit.seal import seal
from mlbert.host.system_description import MARK, template
from programs import run_git, write_files
from stored_sets import tree as stored_files
from user_errors import user_error

PUBLISHED = Path(__file__).parents[2] / "assets/published_logs/2xXE9712x4GB200.tar.xz"

DEEP = "[" * 20_000 + "]" * 20_000
DEEP_LINE = f':::MLLOG {{"time_ms": 1, "key": "x", "metadata": {{}}, "value": {DEEP}}}\n'

STEP = 120  # at which the run is interrupted
REQUEUED = 128 + signal.SIGUSR1  # what `run.sub` requeues a job for


def _by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def test_a_good_closed_tree_passes_everything_and_stays_as_it_is(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", "closed")
    write_files(tree / "systems/templates", {"other.json": json.dumps(template({}))})
    before = stored_files(tree)
    steps: list[str] = []
    findings = check(tree, progress=steps.append)
    # The logger alone wrote these logs, without the events that name a recipe and its
    # configuration.
    not_passed = [
        (finding.check, finding.outcome)
        for finding in findings
        if finding.outcome is not Outcome.PASS
    ]
    assert not_passed == [("own: program", Outcome.NOTE)]
    # Written on a day after the last round with BERT.
    assert findings[0].words.endswith("round v5.0, the last with BERT (ruleset 5.0.0)")
    assert stored_files(tree) == before
    reported = _by_check(findings)
    assert reported["package_checker"].words == "PACKAGE CHECKER FOUND NO ERRORS, SUCCESS !"
    assert reported["rcp_checker"].words == "RCP found, RCP test PASSED"
    assert reported["result_summarizer"].words.endswith("minutes (closed)")
    assert reported["repo_checker"].words == "ALL CHECKS PASSED"
    assert any(step.startswith("package_checker, tool ") for step in steps)
    assert sum(f"tool {len(steps) - 2} of {len(steps) - 2}" in step for step in steps) == 1


def test_a_tree_that_the_official_tools_let_pass(tmp_path: Path) -> None:
    """Everything wrong here is invisible to all official tools together."""
    tree = write_tree(tmp_path / "tree", "open")
    results = tree / "results" / "machine" / "bert"
    for name, old, new in (
        ("result_1.txt", '"success"', '"aborted"'),
        ("result_2.txt", '"success"', '"aborted"'),
        (
            "result_3.txt",
            '"submission_division", "value": "open"',
            '"submission_division", "value": "closed"',
        ),
        ("result_4.txt", '"value": 0.000425', '"value": 0.5'),
        ("result_5.txt", '"seed", "value": 1025', '"seed", "value": 1016'),
    ):
        text = (results / name).read_text()
        assert old in text
        (results / name).write_text(text.replace(old, new))
    (results / "notes.txt").write_text("")
    findings = check(tree)
    official = [finding for finding in findings if not finding.check.startswith("own: ")]
    assert not failed(official)
    wrong = {finding.check for finding in findings if finding.outcome is Outcome.ERROR}
    assert wrong == {"own: status", "own: division", "own: same settings"}
    assert _by_check(findings)["own: seeds"].outcome is Outcome.WARN  # only closed asks for seeds
    assert "bert/notes.txt is unknown" in _by_check(findings)["own: layout"].words


def test_a_tree_that_the_official_tools_refuse(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", "closed", num_logs=9)
    system = tree / "systems" / "machine.json"
    changes = {"status": "onprem", "cooling": template({})["cooling"]}
    system.write_text(json.dumps(json.loads(system.read_text()) | changes))
    (tree / ".hidden").write_text("")
    (tree / "results" / "machine" / "unknown").mkdir()
    (tree / "results" / "empty").mkdir()
    (tree / "systems" / "notes.txt").write_text("")
    reported = _by_check(check(tree))
    assert "Field status contains a non valid value" in reported["system_desc_checker"].words
    assert "Incorrect number of files in dir" in reported["package_checker"].words
    assert "result_9.txt is missing" in reported["own: layout"].words
    layout = {complaint.text for complaint in reported["own: layout"].complaints}
    assert {"results/empty/bert is missing", "systems/notes.txt is not a .json"} < layout
    assert any(
        text.startswith("results/machine/unknown is not the benchmark bert") for text in layout
    )
    assert any(f"systems/machine.json still says {MARK} in cooling" in text for text in layout)
    outcomes = [
        reported[name].outcome for name in ("rcp_checker", "result_summarizer", "repo_checker")
    ]
    assert outcomes == [Outcome.SKIP, Outcome.ERROR, Outcome.ERROR]


def test_a_log_that_the_scoring_drops_costs_no_score(tmp_path: Path) -> None:
    """The summarizer prints a failed test of the dropped log, as it does of a result it refuses."""
    tree = write_tree(tmp_path / "tree", "closed")
    logs = sorted((tree / "results/machine/bert").glob("result_*.txt"))
    set_value(logs[2], "gradient_accumulation_steps", "0")
    scored = _by_check(check(tree))["result_summarizer"]
    assert scored.outcome is Outcome.PASS
    assert scored.words.endswith("minutes (closed)")
    set_value(logs[3], "gradient_accumulation_steps", "0")
    refused = _by_check(check(tree))["result_summarizer"]
    assert refused.outcome is Outcome.ERROR
    assert "Too many non-converging runs for SomeOrg" in refused.words


@pytest.mark.parametrize("path", ["", "results/machine", "results/machine/bert"])
def test_other_benchmarks_of_a_system_are_left_out(path: str, tmp_path: Path) -> None:
    """Ruleset 5.0.0 has no rules for ssd, which stops the official tools for all benchmarks."""
    tree = write_tree(tmp_path / "tree", "closed")
    results = tree / "results"
    shutil.copy(tree / "systems/machine.json", tree / "systems/other.json")
    for folder in (results / "machine/ssd", results / "other/ssd"):
        shutil.copytree(results / "machine/bert", folder)
        for log in folder.iterdir():
            set_value(log, "submission_benchmark", '"ssd"')
    reported = _by_check(check(tree / path))
    assert not failed(reported.values())
    assert reported["result_summarizer"].words.endswith("minutes (closed)")
    assert "results/machine/ssd contains results of ssd" in reported["own: layout"].words
    assert (results / "other/ssd/result_0.txt").is_file()


def test_a_checkout_is_judged_by_its_export_or_as_it_is_if_git_cannot_read_it(tmp_path) -> None:
    tree = write_tree(tmp_path / "tree", "open", num_logs=1)
    (tree / ".git").mkdir()
    reported = _by_check(check(tree))
    assert reported["own: export"].outcome is Outcome.ERROR
    assert reported["compliance_checker"].outcome is Outcome.PASS
    (tree / ".gitignore").write_text("junk\n")
    (tree / "junk").write_text("")
    run_git(tree, "init", "-q")
    assert _by_check(check(tree))["repo_checker"].outcome is Outcome.PASS


def test_a_folder_and_a_log(tmp_path: Path) -> None:
    for index in range(3):
        write_log(
            tmp_path / f"result_{index}.txt", seed=index, division="open", accuracies=(0.1, 0.25)
        )
    (tmp_path / "curve.png").write_bytes(b"")
    findings = check(tmp_path)
    assert not failed(findings)
    assert findings[-1].words.endswith("(olympic mean of 3 runs)")
    assert not failed(check(tmp_path / "result_1.txt", "open"))
    assert failed(check(tmp_path / "result_1.txt", "closed"))


@pytest.mark.parametrize(
    ("name", "make", "code"),
    [
        ("absent", lambda path: None, "file.missing"),
        ("empty", Path.mkdir, "log.missing"),
        ("log.txt", os.mkfifo, "file.wrong-kind"),
        ("log.txt", lambda path: path.write_text(":::MLLOG " + "x" * 60_000), "file.too-large"),
    ],
)
def test_input_that_cannot_be_judged(name: str, make, code: str, tmp_path: Path) -> None:
    make(tmp_path / name)
    with user_error(code, tmp_path / name):
        check(tmp_path / name)


def test_a_published_result_raises_no_error(tmp_path: Path) -> None:
    """Accepted by MLCommons; with the file names that other submitters use."""
    subprocess.run(["tar", "-xf", PUBLISHED, "-C", tmp_path], check=True)
    results = tmp_path / "results/2xXE9712x4GB200/bert"
    (results / "result_0.txt").rename(results / "result_10.txt")
    findings = check(tmp_path)
    assert not failed(findings)
    reported = _by_check(findings)
    assert reported["compliance_checker"].words.startswith(
        "the one of ten that the scoring drops: "
    )
    names = ("compliance_checker", "own: status", "own: program", "own: evaluations")
    outcomes = [Outcome.WARN, Outcome.WARN, Outcome.NOTE, Outcome.PASS]
    assert [reported[name].outcome for name in names] == outcomes
    assert (
        "note: results/2xXE9712x4GB200/bert contains result_10.txt, which the official"
        in reported["own: layout"].words
    )
    assert "warning: benchmarks/bert/implementations is missing" in reported["own: layout"].words

    (results / "result_3.txt").write_text(
        (results / "result_3.txt").read_text().replace('"success"', '"aborted"')
    )
    (tmp_path / "results" / "other").mkdir()
    # A system's folder: with its description, and without the other system.
    reported = _by_check(check(results))
    names = ("own: status", "rcp_checker", "system_desc_checker")
    assert [reported[name].outcome for name in names] == [
        Outcome.ERROR,
        Outcome.ERROR,
        Outcome.PASS,
    ]
    assert "other" not in reported["own: layout"].words


def test_everything_that_crashes_a_tool_is_reported_in_one_table(tmp_path: Path) -> None:
    """Nothing here hangs, stops the check, changes a file, or names the copy."""
    tree = write_tree(tmp_path / "my tree", "open")
    logs = tree / "results" / "machine" / "bert"
    # What is put in place of a log; a text is added to it.
    damages: list[tuple[Callable[[Path], object] | str, str]] = [
        (lambda path: path.write_text(""), "result_0.txt: has no line of an MLPerf log"),
        (
            lambda path: path.write_bytes(bytes(range(256)) * 40),
            "result_1.txt: has no line of an MLPerf log",
        ),
        (f":::MLLOG {'x' * 10_000_000}\n", "result_2.txt has 10000002 characters in line"),
        (DEEP_LINE, "RecursionError"),
        (':::MLLOG {"time_ms": NaN, "key": "x", "value": 1, "metadata": {}}\n', "time_ms is nan"),
        (os.mkfifo, "result_5.txt is neither a file nor a folder"),
        (Path.mkdir, "result_6.txt is a folder"),
        (lambda path: path.symlink_to("nowhere"), "result_7.txt is a link to nothing"),
        (lambda path: path.symlink_to("result_8.txt"), "result_8.txt is a link to itself"),
        (lambda path: path.symlink_to("/etc/passwd"), "result_9.txt is a link out of the tree"),
    ]
    for index, (damage, _) in enumerate(damages):
        log = logs / f"result_{index}.txt"
        if isinstance(damage, str):
            log.write_text(log.read_text() + damage)
        else:
            log.unlink()
            damage(log)
    (tree / "results" / "no system" / "bert").mkdir(parents=True)
    (tree / "systems" / "broken.json").write_text("{")
    (tree / "systems" / "deep.json").write_text(DEEP)
    Path(os.fsdecode(os.fsencode(tree / "results") + b"/\xff")).write_text("")
    findings = check(tree)
    complaints = [complaint.text for finding in findings for complaint in finding.complaints]
    for _, words in damages:
        assert any(words in text for text in complaints), words
    assert any("JSONDecodeError" in text for text in complaints)
    assert any(f"{tree}/results/no system" in text for text in complaints)
    assert not any("mlbert-check" in text for text in complaints)
    assert all(finding.words.isprintable() for finding in findings)


def test_a_tree_without_its_parts_gets_a_table(tmp_path: Path) -> None:
    (tmp_path / "tree" / "systems").mkdir(parents=True)
    reported = _by_check(check(tmp_path / "tree"))
    assert "results/ is missing" in reported["own: layout"].words
    assert reported["package_checker"].outcome is Outcome.ERROR


def test_a_path_may_be_a_link(tmp_path: Path) -> None:
    """Links are judged within a tree, where they would break when it is handed in."""
    (tmp_path / "elsewhere").mkdir()
    log = write_log(tmp_path / "elsewhere" / "run.txt", division="open")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "result_0.txt").symlink_to(log)
    (tmp_path / "latest").symlink_to(tmp_path / "logs")
    for path in (tmp_path / "logs" / "result_0.txt", tmp_path / "latest"):
        findings = check(path)
        assert not failed(findings)
        assert _by_check(findings)["compliance_checker"].outcome is Outcome.PASS
    place = Workplace(tmp_path / "latest", tmp_path / "copy", tmp_path / "scratch")
    (complaint,) = place.take([tmp_path / "latest"])
    assert complaint.text == "result_0.txt is a link out of the tree"


def test_the_command_prints_a_table_of_each_path_and_json_with_every_complaint(
    log: Path, tmp_path: Path
) -> None:
    printed = CliRunner().invoke(app, ["check", str(log), "--division", "closed", "--json", "-"])
    assert (printed.exit_code, json.loads(printed.stdout)["verdict"]) == (0, "passed")
    bad = tmp_path / "bad.txt"
    target = tmp_path / "found.json"
    bad.write_text(log.read_text().replace(', "metadata"', ', "data"'))
    done = CliRunner().invoke(app, ["check", str(log), str(bad), "--json", str(target)])
    assert done.exit_code == 1
    assert "no errors" in " ".join(done.stdout.split())
    assert re.search(r": \d+ of \d+ .*: cache_clear has no metadata", " ".join(done.stdout.split()))
    assert done.stdout.count(" result   check") == 2
    found = json.loads(target.read_text())
    assert found["verdict"] == "failed"
    assert found["versions"]["mlperf-logging"] == "4.1.68"
    lines = next(
        row for row in found["findings"] if (row["path"], row["check"]) == (str(bad), "own: lines")
    )
    assert len(lines["complaints"]) == len(bad.read_text().splitlines())
    assert {complaint["severity"] for complaint in lines["complaints"]} == {"ERROR"}
    num_kinds = len({complaint["text"].split(": ")[-1] for complaint in lines["complaints"]})
    assert lines["words"].endswith(f"; and {num_kinds - 6} more")


@pytest.mark.slow
def test_a_sealed_system_passes_the_official_tools_without_a_warning(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", "open")
    results = tree / "results" / "machine"
    for index in range(10):
        for name in NAMES:
            (results / f"run_{index}.{name}").write_text("{}")
    seal("machine", tree)
    reported = _by_check(check(results))
    names = ("own: seal", "own: layout", "result_summarizer")
    assert {name: reported[name].outcome for name in names} == dict.fromkeys(names, Outcome.PASS)
    with official.started(
        [official.package_checker(tree), official.repo_checker(tree)], tmp_path
    ) as answers:
        assert not any("WARNING" in answer.words for answer in answers(lambda step: None))


def test_findings_shared_by_ten_logs_are_reported_once() -> None:
    common = [
        Complaint(Outcome.ERROR, f"result_{i}.txt: line {i + 3}: no seed", "rule")
        for i in range(10)
    ]
    other = Complaint(Outcome.WARN, "result_2.txt: late")
    found = finding_of("own: x", ".", [other, *common], "")
    assert found.words == (
        "ERROR: result_0.txt: line 3: no seed (and in 9 more places) [rule]; "
        "warning: result_2.txt: late"
    )
    assert found.complaints == (*common, other)


def test_a_log_without_events_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "result_0.txt").write_text("nothing\n")
    rows = run_checks(ResultSet([read_log(tmp_path / "result_0.txt")]), ".")
    assert [(row.check, row.outcome) for row in rows] == [("own: lines", Outcome.ERROR)]
    assert "result_0.txt: has no line of an MLPerf log" in rows[0].words


@pytest.mark.slow
def test_a_killed_and_requeued_run_raises_no_error(tmp_path: Path) -> None:
    assert train(tmp_path, "run", signal.SIGKILL, STEP) == -signal.SIGKILL
    assert train(tmp_path, "run", signal.SIGUSR1, STEP, resume=1) == REQUEUED
    assert train(tmp_path, "run", resume=1) == 0
    logs = sorted((tmp_path / "run").glob("result_*"))
    assert [log.name for log in logs] == [
        "result_0.part1.txt",
        "result_0.part2.txt",
        "result_0.txt",
    ]
    findings = check(tmp_path / "run")
    assert [finding for finding in findings if finding.outcome is Outcome.ERROR] == []
    outcomes = {finding.check: (finding.outcome, finding.subject) for finding in findings}
    assert outcomes["own: speed"] == (Outcome.PASS, "result_0.txt")
    # With the samples of the first part the last one's rate would be many times as high;
    # a busy machine doubles it.
    rates = [samples_per_second(read_log(log)) for log in logs]
    assert rates[0] / 3 < rates[2] < 3 * rates[0]

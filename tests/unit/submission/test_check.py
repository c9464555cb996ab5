"""The whole check on trees, folders and single logs; and its command."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlbert.cli.submission import app
from mlbert.core.errors import UserError
from mlbert.submission.check import check
from mlbert.submission.findings import Finding, Outcome, failed

NewTree = Callable[..., Path]


def _by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def _snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_good_closed_tree_passes_everything_and_stays_as_it_is(tmp_path: Path, new_tree: NewTree) -> None:
    tree = new_tree(tmp_path / "tree", "closed")
    before = _snapshot(tree)
    steps: list[str] = []
    findings = check(tree, progress=steps.append)
    # The logger alone wrote these logs, without the events that name a recipe and its configuration.
    not_passed = [(finding.check, finding.outcome) for finding in findings if finding.outcome is not Outcome.PASS]
    assert not_passed == [("own: program", Outcome.NOTE)]
    assert _snapshot(tree) == before
    told = _by_check(findings)
    assert told["package_checker"].words == "PACKAGE CHECKER FOUND NO ERRORS, SUCCESS !"
    assert told["rcp_checker"].words == "RCP found, RCP test PASSED"
    assert told["result_summarizer"].words.endswith("minutes (closed)")
    assert told["repo_checker"].words == "ALL CHECKS PASSED"
    assert "package_checker" in steps


def test_a_tree_that_the_official_tools_let_pass(tmp_path: Path, new_tree: NewTree) -> None:
    """Everything wrong here is invisible to all official tools together."""
    tree = new_tree(tmp_path / "tree", "open")
    results = tree / "results" / "machine" / "bert"
    for name, old, new in (
        ("result_1.txt", '"success"', '"aborted"'),
        ("result_2.txt", '"success"', '"aborted"'),
        ("result_3.txt", '"submission_division", "value": "open"', '"submission_division", "value": "closed"'),
        ("result_4.txt", '"value": 0.000425', '"value": 0.5'),
        ("result_5.txt", '"seed", "value": 105', '"seed", "value": 104'),
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


def test_a_tree_that_the_official_tools_refuse(tmp_path: Path, new_tree: NewTree) -> None:
    tree = new_tree(tmp_path / "tree", "closed", num_logs=9)
    system = tree / "systems" / "machine.json"
    system.write_text(json.dumps(json.loads(system.read_text()) | {"status": "onprem"}))
    (tree / ".hidden").write_text("")
    (tree / "results" / "machine" / "unknown").mkdir()
    told = _by_check(check(tree))
    assert "Field status contains a non valid value" in told["system_desc_checker"].words
    assert "Incorrect number of files in dir" in told["package_checker"].words
    assert "result_9.txt is missing" in told["own: layout"].words
    assert "results/machine/unknown is not the benchmark bert" in told["own: layout"].words
    assert told["rcp_checker"].outcome is Outcome.SKIP
    assert told["result_summarizer"].outcome is Outcome.ERROR
    assert told["repo_checker"].outcome is Outcome.ERROR


def test_a_checkout_is_judged_by_its_export(tmp_path: Path, new_tree: NewTree) -> None:
    tree = new_tree(tmp_path / "tree", "open", num_logs=1)
    (tree / ".gitignore").write_text("junk\n")
    (tree / "junk").write_text("")
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    assert _by_check(check(tree))["repo_checker"].outcome is Outcome.PASS


def test_a_folder_and_a_log(tmp_path: Path, new_log: Callable[..., Path]) -> None:
    for index in range(3):
        new_log(tmp_path / f"result_{index}.txt", seed=index, division="open", accuracies=(0.1, 0.25))
    (tmp_path / "curve.png").write_bytes(b"")
    findings = check(tmp_path)
    assert not failed(findings)
    assert findings[-1].words.endswith("(olympic mean of 3 runs)")
    assert not failed(check(tmp_path / "result_1.txt", "open"))
    assert failed(check(tmp_path / "result_1.txt", "closed"))


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_bad_input(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=name):
        check(tmp_path / name)


def test_the_command_prints_one_table_and_exits_with_the_verdict(log: Path) -> None:
    runner = CliRunner()
    good = runner.invoke(app, ["check", str(log), "--division", "closed"])
    assert good.exit_code == 0
    assert "nothing FAILED" in good.stdout
    assert good.stdout.count("┏") == 1
    log.write_text(log.read_text().replace('"success"', '"aborted"'))
    bad = runner.invoke(app, ["check", str(log)])
    assert bad.exit_code == 1
    assert "1 of" in bad.stdout
    assert "status is 'aborted'" in bad.stdout


def test_bad_input_exits_with_2(tmp_path: Path) -> None:
    code = "from mlbert.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "submission", "check", str(tmp_path / "absent")], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "absent: does not exist" in done.stderr


PUBLISHED = Path(__file__).parents[2] / "assets/published_logs/2xXE9712x4GB200.tar.xz"


def test_a_published_result_raises_no_error(tmp_path: Path) -> None:
    """Accepted by MLCommons; with the file names that other submitters use."""
    with tarfile.open(PUBLISHED) as packed:
        packed.extractall(tmp_path, filter="data")
    results = tmp_path / "results/2xXE9712x4GB200/bert"
    (results / "result_0.txt").rename(results / "result_10.txt")
    findings = check(tmp_path)
    assert [finding for finding in findings if finding.outcome is Outcome.ERROR] == []
    told = _by_check(findings)
    assert told["compliance_checker"].outcome is Outcome.WARN
    assert told["compliance_checker"].words.startswith("the one of ten that the scoring drops: ")
    assert told["own: status"].outcome is Outcome.WARN
    assert told["own: program"].outcome is Outcome.NOTE
    assert told["own: evaluations"].outcome is Outcome.PASS
    assert "note: results/2xXE9712x4GB200/bert holds result_10.txt, which the official" in told["own: layout"].words
    assert "warning: benchmarks/bert/implementations is missing" in told["own: layout"].words

    (results / "result_3.txt").write_text((results / "result_3.txt").read_text().replace('"success"', '"aborted"'))
    told = _by_check(check(results.parent))  # a system's folder
    assert told["own: status"].outcome is Outcome.ERROR
    assert told["rcp_checker"].outcome is Outcome.ERROR


@pytest.mark.parametrize("is_checkout", [False, True])
def test_a_link_to_nothing_is_told_in_the_table(is_checkout: bool, tmp_path: Path, new_tree: NewTree) -> None:
    tree = new_tree(tmp_path / "tree", "open", num_logs=1)
    (tree / "results/machine/bert/result_1.txt").symlink_to("/nowhere/result_1.txt")
    if is_checkout:
        subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    told = _by_check(check(tree))
    assert told["own: layout"].outcome is Outcome.ERROR
    assert "results/machine/bert/result_1.txt is a link to nothing" in told["own: layout"].words
    if is_checkout:
        assert "result_1.txt: is a link to nothing" in told["own: export"].words
    assert "own: evaluations" in told

"""Results of other benchmarks than BERT: what refuses them, what checks them, what reports them.

The logs are made (see `other_benchmarks`); the official checker accepts each of them.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from audit import TREE, edit, set_value
from mlaudit.benchmarks import num_runs, official_command, rulesets_of, target_of
from mlaudit.check import check
from mlaudit.findings import Finding, Outcome, failed
from mlaudit.logs import read_log
from mlaudit.own_checks import CHECKS
from mlaudit.planner.cost import Prices
from mlaudit.registered_check import Scope
from mlaudit.report.page import report_page
from mlaudit.report.results import read_result
from mlaudit.report.runs import read_systems
from other_benchmarks import MADE, SYSTEM, write_log, write_logs, write_tree
from user_errors import user_error

HONEST_SETS = 20  # of each benchmark


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("made") / "SomeOrg")


def results_of(tree: Path, benchmark: str) -> Path:
    return tree / "results" / SYSTEM / benchmark


def complaints_of(findings: list[Finding]) -> dict[str, tuple[Outcome, str]]:
    return {
        finding.check.removeprefix("own: "): (finding.outcome, finding.words)
        for finding in findings
        if finding.outcome in (Outcome.WARN, Outcome.ERROR)
    }


@pytest.mark.parametrize("benchmark", MADE)
def test_the_official_checker_accepts_the_made_logs(benchmark: str, tree: Path) -> None:
    log = results_of(tree, benchmark) / "result_0.txt"
    made = MADE[benchmark]
    command = official_command(benchmark, log)
    newest = str(rulesets_of(benchmark)[-1])
    words = shlex.split(command.replace(newest, made.ruleset))
    done = subprocess.run([sys.executable, *words[1:]], cwd=tree.parent, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert num_runs(benchmark) == made.runs


@pytest.mark.parametrize("benchmark", MADE)
@pytest.mark.parametrize("what", ["log", "folder", "system"])
def test_without_general_one_line_names_the_benchmark_and_the_official_command(
    benchmark: str, what: str, tmp_path: Path
) -> None:
    folder = tmp_path / "results" / SYSTEM / benchmark
    log = write_logs(folder, benchmark)[0]
    path = {"log": log, "folder": folder, "system": folder.parent}[what]
    with user_error(
        "log.other-benchmark", path, wording=(what, benchmark) == ("log", "resnet")
    ) as caught:
        check(path)
    assert f"results of {benchmark};" in str(caught.value)
    assert official_command(benchmark, log) in str(caught.value)


def test_a_tree_with_a_result_of_bert_is_checked_as_before(tmp_path: Path) -> None:
    shutil.copytree(TREE, tmp_path / "tree")
    write_logs(tmp_path / "tree/results/cpu_demo/resnet", "resnet")
    assert any(finding.check == "own: evaluations" for finding in check(tmp_path / "tree"))


def test_a_path_without_logs(tmp_path: Path) -> None:
    with user_error("log.missing", tmp_path):
        check(tmp_path, general=True)


def test_honest_results_pass_the_checks_that_do_not_know_bert(tree: Path) -> None:
    findings = check(tree, general=True)
    assert complaints_of(findings) == {}
    general = {name for name, check in CHECKS.items() if check.scope is not Scope.BERT}
    for benchmark in MADE:
        subject = f"results/{SYSTEM}/{benchmark}"
        run = {found.check for found in findings if found.subject == subject}
        assert {f"own: {name}" for name in general} < run
        assert not {"own: accuracies", "own: evaluations", "own: values", "own: rules"} & run


@pytest.mark.parametrize("benchmark", MADE)
def test_no_honest_set_is_accused(benchmark: str, tmp_path: Path) -> None:
    runs = MADE[benchmark].runs
    for number in range(HONEST_SETS):
        folder = tmp_path / str(number)
        for run in range(runs):
            write_log(folder / f"result_{run}.txt", benchmark, runs * number + run)
        findings = check(folder, general=True)
        assert not failed(findings), complaints_of(findings)


def _swap_clock(folder: Path) -> None:
    edit(folder / "result_1.txt", "run_stop", r'"time_ms": \d+', '"time_ms": 1600000000000')


def _copy_curve(folder: Path) -> None:
    """Make a run a copy of another with its own seed, a day later."""
    first = folder / "result_0.txt"
    other = folder / "result_1.txt"
    seed = read_log(other).value("seed")
    text = re.sub(
        r'"time_ms": (\d+)',
        lambda match: f'"time_ms": {int(match[1]) + 86_400_000}',
        first.read_text(),
    )
    other.write_text(text)
    set_value(other, "seed", str(seed))


def _same_seed(folder: Path) -> None:
    set_value(folder / "result_1.txt", "seed", str(read_log(folder / "result_0.txt").value("seed")))


def _other_batch(folder: Path) -> None:
    set_value(folder / "result_1.txt", "global_batch_size", "77")


def _open_log(folder: Path) -> None:
    set_value(folder / "result_1.txt", "submission_division", '"open"')


def _aborted(folder: Path) -> None:
    for name in ("result_1.txt", "result_2.txt"):
        edit(folder / name, "run_stop", '"success"', '"aborted"')


def _seconds(folder: Path) -> None:
    edit(folder / "result_1.txt", "run_start", r'"time_ms": (\d+)\d{3}', r'"time_ms": \1')


def _no_metadata(folder: Path) -> None:
    edit(folder / "result_1.txt", "eval_samples", r', "metadata": \{[^}]*\}', "")


@pytest.mark.parametrize("benchmark", MADE)
@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (_swap_clock, "time stamps"),
        (_copy_curve, "copies"),
        (_same_seed, "seeds"),
        (_other_batch, "same settings"),
        (_open_log, "division"),
        (_aborted, "status"),
        (_seconds, "clock"),
        (_no_metadata, "lines"),
    ],
)
def test_faults_are_found_in_every_benchmark(
    benchmark: str, damage: Callable[[Path], None], where: str, tmp_path: Path
) -> None:
    write_logs(tmp_path, benchmark)
    damage(tmp_path)
    outcome, words = complaints_of(check(tmp_path, general=True))[where]
    assert outcome is Outcome.ERROR
    assert "result_1.txt" in words


def test_thresholds_measured_on_bert_only_warn_about_other_benchmarks(tmp_path: Path) -> None:
    """A run ten times as fast in one interval is an error for BERT."""
    assert CHECKS["speed"].scope is Scope.MEASURED_ON_BERT
    write_logs(tmp_path, "resnet")
    log = tmp_path / "result_1.txt"
    lines = log.read_text().splitlines(keepends=True)
    places = [number for number, line in enumerate(lines) if '"eval_start"' in line]
    earlier_ms = 95_000

    def move(match: re.Match[str]) -> str:
        return f'"time_ms": {int(match[1]) - earlier_ms}'

    for number in range(places[3], len(lines)):
        lines[number] = re.sub(r'"time_ms": (\d+)', move, lines[number])
    log.write_text("".join(lines))
    outcome, words = complaints_of(check(tmp_path, general=True))["speed"]
    assert outcome is Outcome.WARN
    assert "samples in" in words


def test_one_run_filed_under_two_systems(tree: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(tree, tmp_path / "tree")
    shutil.copytree(copied / "results" / SYSTEM, copied / "results" / "other")
    shutil.copy(copied / f"systems/{SYSTEM}.json", copied / "systems/other.json")
    found = [
        finding.subject
        for finding in check(copied, general=True)
        if finding.check == "own: copies between systems" and finding.outcome is Outcome.ERROR
    ]
    assert sorted(found) == sorted(MADE)


def test_logs_of_another_benchmark_in_a_folder_and_too_few_logs(tree: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(tree, tmp_path / "tree")
    shutil.move(results_of(copied, "resnet"), results_of(copied, "ssd"))
    (results_of(copied, "ssd") / "result_4.txt").unlink()
    _, words = complaints_of(check(copied, general=True))["files"]
    assert "the logs are of resnet, filed under ssd" in words
    assert "ssd contains 4 logs, not 5" in words


def test_the_report_draws_quality_over_time_for_all_of_them(tree: Path) -> None:
    results = [read_result(system) for system in read_systems([tree])]
    assert {result.benchmark for result in results} == set(MADE)
    for result in results:
        made = MADE[result.benchmark]
        assert result.target == made.target
        assert result.num_converged == made.runs
        assert result.olympic_seconds is not None
        assert result.reference is None
        page = report_page([result], Prices())
        assert "<figcaption>Quality over time</figcaption>" in page
        counts_samples = made.progress == "samples_count"
        assert (result.mean_samples is not None) == counts_samples
    assert "Quality over time" in report_page(results, Prices())


def test_targets_come_from_the_official_rules(tree: Path) -> None:
    found = {}
    for benchmark in MADE:
        target = target_of(read_log(results_of(tree, benchmark) / "result_0.txt"))
        assert target is not None
        found[benchmark] = (target.value, target.is_upper_limit)
    assert found == {
        "resnet": (0.759, False),
        "maskrcnn": (0.377, False),
        "llama2_70b_lora": (0.925, True),
        "stable_diffusion": (90.0, True),
    }


def test_the_command(run_mlbert, tree: Path, tmp_path: Path) -> None:
    code, _, err = run_mlbert("submission", "check", tree)
    assert code == 2
    assert "--general" in err
    written = tmp_path / "found.json"
    code, out, _ = run_mlbert("submission", "check", tree, "--general", "--json", written)
    assert code == 0
    assert "compliance_checker --usage" in out
    assert json.loads(written.read_text())["verdict"] == "passed"

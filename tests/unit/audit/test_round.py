"""One table for a round: published results, and an older round that is made from them."""

import csv
import json
import re
import shutil
import tarfile
from pathlib import Path

import pytest

from audit import edit
from mlaudit.findings import Outcome
from mlaudit.report.page import round_page
from mlaudit.report.results import read_result
from mlaudit.report.round_tables import CSV_COLUMNS, as_csv, page_table, terminal_table
from mlaudit.report.runs import read_systems
from mlaudit.round_table import AuditedRound, audit_round
from mlbert.host.progress import Progress
from other_benchmarks import MADE, write_tree
from user_errors import user_error

PUBLISHED = Path(__file__).parents[2] / "assets/published_logs/2xXE9712x4GB200.tar.xz"
SYSTEM = "2xXE9712x4GB200"
YEARS_MS = 3 * 365 * 86_400_000  # between round v5.0 and the older one
SILENT = Progress()


def write_round(folder: Path) -> Path:
    """Write a round of two submitters: a published result, and made ones of other benchmarks."""
    with tarfile.open(PUBLISHED) as archive:
        archive.extractall(folder / "Dell", filter="data")
    write_tree(folder / "SomeOrg")
    return folder


def write_older_round(folder: Path) -> Path:
    """Write the published result with the dates and words of round v2.0."""
    write_round(folder)
    results = folder / "Dell/results" / SYSTEM / "bert"
    for log in results.glob("result_*.txt"):
        text = re.sub(
            r'"time_ms": ?(\d+)',
            lambda match: f'"time_ms": {int(match[1]) - YEARS_MS}',
            log.read_text(),
        )
        log.write_text(text)
    description = folder / "Dell/systems" / f"{SYSTEM}.json"
    values = json.loads(description.read_text())
    values["status"] = "Available onprem"
    description.write_text(json.dumps(values, indent=2))
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_round(tmp_path_factory.mktemp("v5.0"))


@pytest.fixture(scope="module")
def audited(published: Path) -> AuditedRound:
    return audit_round([published], SILENT)


def test_a_row_has_the_numbers_of_the_report(published: Path, audited: AuditedRound) -> None:
    (row,) = audited.rows
    (system,) = read_systems([published / "Dell"])
    result = read_result(system)
    assert (row.submitter, row.system, row.division) == ("Dell", SYSTEM, "closed")
    assert row.round == "v5.0"
    assert row.runs == 10
    assert row.converged == 9
    assert row.accelerators == 8
    assert row.samples_to_target == result.mean_samples
    assert row.minutes == pytest.approx(result.olympic_seconds / 60)
    assert row.score_minutes == pytest.approx(row.minutes * result.scaling)
    assert row.samples_per_second == pytest.approx(result.training_speed / 8)
    assert row.grid == "150,000"
    assert row.counts[Outcome.ERROR] == 0
    assert audited.others == dict.fromkeys(MADE, 1)
    assert not audited.has_failed


def test_an_older_round(tmp_path: Path, audited: AuditedRound) -> None:
    """The numbers depend on times and samples, not on the date."""
    (row,) = audited.rows
    (older,) = audit_round([write_older_round(tmp_path)], SILENT).rows
    assert older.minutes == pytest.approx(row.minutes)
    assert older.round == "v2.0"
    assert older.grid == row.grid
    assert older.counts[Outcome.ERROR] == 0


def test_two_rounds_in_one_table_show_a_run_filed_twice(published: Path, tmp_path: Path) -> None:
    again = write_older_round(tmp_path)
    both = audit_round([published, again], SILENT)
    assert len(both.rows) == 2
    (copies,) = both.copies
    assert copies.outcome is Outcome.ERROR
    assert both.has_failed


def test_every_benchmark(published: Path) -> None:
    found = audit_round([published], SILENT, general=True)
    assert sorted(row.benchmark for row in found.rows) == sorted(["bert", *MADE])
    made = {row.benchmark: row for row in found.rows if row.benchmark in MADE}
    for name, row in made.items():
        assert row.minutes == row.score_minutes
        assert row.converged == MADE[name].runs
        assert row.grid == ""
    assert "benchmark" in page_table(found).columns
    assert any("resnet" in str(row[0]) for row in terminal_table(found).rows)


def test_faults_and_an_evaluation_grid_that_is_not_the_rules(tmp_path: Path) -> None:
    write_round(tmp_path)
    results = tmp_path / "Dell/results" / SYSTEM / "bert"
    for log in results.glob("result_*.txt"):
        edit(
            log,
            "eval_accuracy",
            r'"epoch_num": ?(\d+)',
            lambda match: f'"epoch_num": {2 * int(match[1])}',
        )
    (row,) = audit_round([tmp_path / "Dell"], SILENT).rows
    assert re.fullmatch(r"(299|300),\d{3}, rules 150,000", row.grid)
    assert "ERROR" in row.findings_in_words


def test_a_log_that_cannot_be_read_is_an_error_of_its_row(tmp_path: Path) -> None:
    write_round(tmp_path)
    log = tmp_path / "Dell/results" / SYSTEM / "bert/result_3.txt"
    log.write_text(":::MLLOG " + "x" * 60_000)
    (row,) = audit_round([tmp_path], SILENT).rows
    assert row.counts[Outcome.ERROR] == 1
    assert "result_3.txt" in row.findings[0].words
    assert row.runs == 10


def test_csv_json_and_page(audited: AuditedRound) -> None:
    (line,) = csv.DictReader(as_csv(audited).splitlines())
    assert line.keys() == {*CSV_COLUMNS, "findings"}
    assert float(line["score_minutes"]) == audited.rows[0].score_minutes
    assert "own: status" in line["findings"]
    assert list(page_table(audited).columns)[:3] == ["system", "submitter", "accelerator"]
    page = round_page(audited, "a round")
    assert "<strong>1 result</strong>" in page
    assert "run_stop status is &#39;aborted&#39;" in page


def test_wrong_paths(tmp_path: Path) -> None:
    with user_error("file.missing", "absent"):
        audit_round([tmp_path / "absent"], SILENT)
    with user_error("log.missing", tmp_path):
        audit_round([tmp_path], SILENT)
    write_tree(tmp_path / "SomeOrg")
    with user_error("log.other-benchmark", "SomeOrg"):
        audit_round([tmp_path / "SomeOrg"], SILENT)


def test_the_command_with_the_official_tools(run_mlaudit, published: Path, tmp_path: Path) -> None:
    folder = tmp_path / "written"
    folder.mkdir()
    shutil.copytree(published / "Dell", tmp_path / "round/Dell")
    words = ["--official", "--csv", folder / "t.csv", "--json", folder / "t.json"]
    code, out, err = run_mlaudit("round", tmp_path / "round", *words, "--html", folder / "t.html")
    found = json.loads((folder / "t.json").read_text())
    checks = {finding["check"] for finding in found["results"][0]["findings"]}
    assert {"package_checker", "result_summarizer", "own: copies"} < checks
    assert code == (1 if found["results"][0]["errors"] else 0)
    table, _, _ = out.partition("page: ")
    assert max(map(len, table.splitlines())) <= 80
    assert SYSTEM in (folder / "t.csv").read_text()
    assert "1 result" in (folder / "t.html").read_text()
    assert "auditing: 1 result" in err

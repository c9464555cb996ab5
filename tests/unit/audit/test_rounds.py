"""The round of logs, and that they are judged by its rules: ours and the official tools'."""

import itertools
import json
import re
from collections.abc import Sequence
from datetime import date
from importlib import resources
from pathlib import Path

import pytest
from typer.testing import CliRunner

from audit import edit, set_value
from earlier_rounds import tree_of
from logger_logs import write_log
from mlaudit import rules
from mlaudit.check import check
from mlaudit.checks.run_identity import check_whose
from mlaudit.checks.system_file import check_description
from mlaudit.cli.submission import app
from mlaudit.findings import Finding, Outcome
from mlaudit.logs import read_log
from mlaudit.own_checks import run_checks
from mlaudit.result_set import ResultSet
from mlaudit.round_rules import Round
from mlaudit.rounds import LATEST, ROUNDS, earlier_status, judge, round_of_ruleset
from mlbert.host.errors import UserError

RULESETS = [one.ruleset for one in ROUNDS]


@pytest.mark.parametrize("ruleset", RULESETS[1:])
def test_reference_points_are_those_of_the_official_checker(ruleset: str) -> None:
    from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

    official = RCP_Checker("training", ruleset, rules.BENCHMARK, False)
    records = {record["BS"]: (name, record) for name, record in official.rcp_data.items()}
    points = rules.reference_points(ruleset)
    assert sorted(records) == [point.global_batch_size for point in points]
    for point in points:
        name, record = records[point.global_batch_size]
        assert point.mean_samples == pytest.approx(record["RCP Mean"], abs=0.01)
        assert point.stdev_samples == pytest.approx(record["RCP Stdev"], abs=0.01)
        assert point.min_mean_samples == pytest.approx(record["Min Epochs"], abs=0.5)
        assert point.pruned == (name in official.pruned_rcp_data)
    used = [point.global_batch_size for point in points if point.pruned]
    for low, high in itertools.pairwise(used):
        batch = (low + high) // 2
        below = official._find_top_min_rcp(batch, "pruned_rcps")
        above = official._find_bottom_max_rcp(batch, "pruned_rcps")
        _, record = official._create_interp_rcp(batch, below, above)
        point = rules.reference_point(batch, ruleset)
        assert point is not None
        assert point.mean_samples == pytest.approx(record["RCP Mean"], abs=0.01)
        assert point.min_mean_samples == pytest.approx(record["Min Epochs"], abs=0.5)


def test_the_ends_of_the_reference_tables() -> None:
    assert rules.reference_points("0.7.0") == ()
    assert rules.reference_point(448, "0.7.0") is None
    smallest = rules.reference_point(64, "1.0.0")
    assert smallest is not None
    assert smallest.global_batch_size == 256
    assert rules.reference_point(16384, "1.1.0") is None


@pytest.mark.parametrize("one", ROUNDS, ids=RULESETS)
def test_targets_are_those_of_the_official_rulesets(one: Round) -> None:
    name = f"compliance_checker/training_{one.ruleset}/closed_bert.yaml"
    text = resources.files("mlperf_logging").joinpath(name).read_text()
    (line,) = [line for line in text.splitlines() if "ATLEAST_ONE_CHECK" in line]
    targets = {float(number) for number in re.findall(r">= (0\.\d+)", line)}
    assert targets == {one.target(8191), one.target(8192)}


@pytest.mark.parametrize(
    ("day", "version"),
    [
        (date(2020, 7, 9), "v0.7"),
        (date(2021, 5, 17), "v1.0"),
        (date(2021, 10, 29), "v1.1"),
        (date(2022, 6, 29), "v2.0"),
        (date(2022, 10, 7), "v2.1"),
        (date(2023, 5, 20), "v3.0"),
        (date(2023, 10, 1), "v3.1"),
        (date(2024, 5, 1), "v4.0"),
        (date(2024, 10, 1), "v4.1"),
        (date(2025, 4, 30), "v5.0"),
        (date(2026, 11, 28), "v5.0"),
    ],
)
def test_a_round_follows_from_dates(day: date, version: str, tmp_path: Path) -> None:
    judged = judge([read_log(_log_of(tmp_path, day))])
    assert judged.round.name == version
    assert judged.sentence.startswith(f"logs of {day:%B %Y}: ")
    assert judged.sentence.endswith(
        "v5.0, the last with BERT" if day.year == 2026 else f"round {version}"
    )


def test_the_folder_of_a_round_decides_between_two(tmp_path: Path) -> None:
    """A run of June 2022 may be of the round that was published then, or of the next one."""
    log = read_log(_log_of(tmp_path, date(2022, 6, 20)))
    assert judge([log], Path("/somewhere/results")).round.name == "v2.0"
    assert judge([log], Path("/data/training_results_v2.1/Vendor")).round.name == "v2.1"
    assert judge([log], Path("/data/v2.1_some/Vendor")).round.name == "v2.1"
    later = judge([log], Path("/data/training_results_v5.0/Vendor"))
    assert later.sentence == "logs of June 2022: round v5.0, as their folder says"
    # No run is of a round that was over.
    assert judge([log], Path("/data/training_results_v1.1/Vendor")).round.name == "v2.0"


def test_most_logs_decide(tmp_path: Path) -> None:
    days = [date(2023, 9, 28), date(2023, 10, 2), date(2024, 6, 1)]
    logs = []
    for index, day in enumerate(days):
        folder = tmp_path / str(index)
        folder.mkdir()
        logs.append(read_log(_log_of(folder, day)))
    judged = judge(logs)
    assert judged.sentence == "logs of September 2023 to June 2024: round v3.1"


def test_words_decide_for_logs_without_dates(tmp_path: Path) -> None:
    log = _log_of(tmp_path, date(1970, 1, 2))
    assert judge([read_log(log)]).sentence == (
        "logs without dates: judged as round v4.0 by their words"
    )
    edit(log, "submission_status", ".*\n", "")
    assert judge([read_log(log)]).round is LATEST
    assert judge([read_log(log)], system={"status": "onprem"}).round.name == "v4.0"
    edit(log, "opt_lamb_epsilon", ".*\n", "")
    assert judge([read_log(log)]).round.name == "v2.1"


def test_a_ruleset_overrides(tmp_path: Path) -> None:
    log = read_log(_log_of(tmp_path, date(2025, 4, 1)))
    judged = judge([log], ruleset="2.1.0")
    assert judged.sentence == "logs of April 2025: judged as round v2.1, as --ruleset asks"
    assert [round_of_ruleset(name) for name in RULESETS] == list(ROUNDS)
    with pytest.raises(UserError, match="which has no BERT"):
        round_of_ruleset("5.1.0")


@pytest.mark.parametrize(
    ("version", "day", "note"),
    [
        ("0.7", "2020-07-09", ""),
        ("1.0", "2021-05-17", ""),
        ("1.1", "2021-10-29", "got its list of weights_initialization after its round"),
        ("2.1", "2022-10-07", "calls opt_epsilon opt_lamb_epsilon since its round and rejects 10"),
        ("4.0", "2024-05-02", "asks for the status words of v4.1 since its round and rejects 1"),
        ("4.1", "2024-10-02", ""),
    ],
)
def test_logs_of_a_round_are_judged_by_it(
    version: str, day: str, note: str, tmp_path: Path
) -> None:
    tree = tree_of(tmp_path / "tree", version, day)
    findings = check(tree)
    assert findings[0].words.endswith(f"round v{version} (ruleset {version}.0)")
    assert [finding for finding in findings if finding.outcome is Outcome.ERROR] == []
    (scored,) = [finding for finding in findings if finding.check == "result_summarizer"]
    assert scored.words.endswith("minutes (closed)")
    notes = [finding.words for finding in findings if finding.check == "ruleset"]
    assert len(notes) == bool(note)
    assert note in "".join(notes)


def test_the_given_files_keep_the_words_of_their_round(tmp_path: Path) -> None:
    tree = tree_of(tmp_path / "tree", "2.1", "2022-10-07")
    log = tree / "results/machine/bert/result_0.txt"
    before = log.read_bytes()
    check(tree)
    assert log.read_bytes() == before


@pytest.mark.parametrize(
    ("version", "day", "name", "words"),
    [
        ("0.7", "2020-07-09", "accuracies", "success, but the last accuracy 0.7125 is below 0.72"),
        ("1.0", "2021-05-17", "plain numbers", "not a count of samples"),
        ("1.1", "2021-10-29", "rules", "names 397 tensors, not 398"),
        ("1.1", "2021-10-29", "evaluations", "epoch_num"),
        ("3.1", "2023-10-01", "seeds", "logs no seed"),
    ],
)
def test_later_rounds_refuse_what_earlier_ones_allowed(
    version: str, day: str, name: str, words: str, tmp_path: Path
) -> None:
    """Each rule that is milder for an earlier round still fires in the rounds that have it."""
    tree = tree_of(tmp_path / "tree", version, day)
    logs = sorted((tree / "results/machine/bert").glob("result_*.txt"))
    own = judge([read_log(log) for log in logs]).round
    assert own.name == f"v{version}"
    assert _own(logs, own)[f"own: {name}"].outcome is not Outcome.ERROR
    later = _own(logs, LATEST)[f"own: {name}"]
    assert later.outcome is Outcome.ERROR
    assert words in later.words


def test_statuses_of_descriptions_by_round(tmp_path: Path) -> None:
    log = write_log(tmp_path / "result_0.txt")
    set_value(log, "submission_status", '"onprem"')
    logs = [read_log(log)]
    for version, is_fine in (("4.0.0", True), ("4.1.0", False)):
        results = ResultSet(logs, {"status": "onprem"}, round=round_of_ruleset(version))
        texts = [found.text for found in (*check_description(results), *check_whose(results))]
        assert any("status is 'onprem', none of the four" in text for text in texts) is not is_fine
        assert any("submission_status is 'onprem'" in text for text in texts) is not is_fine
    assert earlier_status("Available on-premise") == "Available on-premise"
    assert earlier_status("available") == "Available on-premise"
    assert earlier_status("nonsense") is None


def test_the_command_says_the_round_first_and_judges_by_the_ruleset_that_is_asked_for(
    tmp_path: Path,
) -> None:
    log = _log_of(tmp_path, date(2022, 10, 7))
    edit(log, "opt_lamb_epsilon", ".*\n", "")
    done = CliRunner().invoke(app, ["check", str(log), "--json", str(tmp_path / "found.json")])
    assert done.stdout.splitlines()[0] == "logs of October 2022: round v2.1 (ruleset 2.1.0)"
    assert json.loads((tmp_path / "found.json").read_text())["versions"]["ruleset"] == "2.1.0"
    done = CliRunner().invoke(app, ["check", str(log), "--ruleset", "2.0.0"])
    first = "logs of October 2022: judged as round v2.0, as --ruleset asks (ruleset 2.0.0)"
    assert done.stdout.splitlines()[0] == first
    done = CliRunner().invoke(app, ["check", str(log), "--ruleset", "6.0.0"])
    assert isinstance(done.exception, UserError)


def test_equal_complaints_of_ten_logs_are_one_row(tmp_path: Path) -> None:
    for index in range(10):
        log = write_log(tmp_path / f"result_{index}.txt", seed=index)
        edit(log, "opt_lamb_beta_2", ".*\n", "")
        edit(log, "gradient_accumulation_steps", '"value": 1', '"value": 0')
        if index % 2:  # the failing line is another one
            edit(log, "cache_clear", "(.*\n)", r"\1\1")
    rows = [row for row in check(tmp_path) if row.check == "compliance_checker"]
    assert [row.subject for row in rows] == ["result_0.txt and 9 more"]
    assert "'opt_lamb_beta_2' but found 0" in rows[0].words


def _log_of(folder: Path, day: date) -> Path:
    """Write a log whose run began on a day."""
    log = write_log(folder / "result_0.txt")
    first = read_log(log).events[0].time_ms
    begin = (day - date(1970, 1, 1)).days * 86_400_000
    text = re.sub(
        r'"time_ms": (\d+)',
        lambda found: f'"time_ms": {int(found[1]) - int(first) + begin}',
        log.read_text(),
    )
    log.write_text(text)
    return log


def _own(logs: Sequence[Path], judged: Round) -> dict[str, Finding]:
    results = ResultSet([read_log(log) for log in logs], round=judged)
    return {row.check: row for row in run_checks(results, ".")}

"""The official tools of mlperf-logging, really run, on logs that our logger wrote."""

import os
import select
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlperf_logging.compliance_checker.mlp_parser import ruleset_500

from logger_logs import write_log, write_tree
from mlaudit import official
from mlaudit.findings import Outcome
from mlaudit.tools_worker import text_from_token

ROOT = Path(__file__).resolve().parents[3]


def test_tools_run_side_by_side_answer_as_they_do_alone(tmp_path, monkeypatch):
    """On good and bad input, with crashes and wrong arguments among them."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # their messages come in the order of sets
    good = write_tree(tmp_path / "good", "open")
    bad = write_tree(tmp_path / "bad", "closed", num_logs=3)
    logs = bad / "results/machine/bert"
    (logs / "result_1.txt").write_text(
        ':::MLLOG {\n:::MLLOG {"time_ms": 1, "key": "seed", "value": 1}\n'
    )
    (logs / "result_2.txt").write_bytes(bytes(range(256)) * 9)
    (bad / "systems/machine.json").write_text("{}")
    calls = [
        official.package_checker(good),
        official.rcp_checker(logs, "x"),
        official.repo_checker(bad / "absent"),
    ]
    calls += [official.compliance_checker(logs / f"result_{index}.txt", "x") for index in (1, 2)]
    calls.append(replace(calls[-1], arguments=["--wrong"]))
    calls.append(official.system_desc_checker(bad / "systems/machine.json", "x"))
    (tmp_path / "workers").mkdir()
    with official.started(calls, tmp_path / "workers") as answers:
        side_by_side = answers(lambda step: None)
    for call, answer in zip(calls, side_by_side, strict=True):
        # As its manual says.
        command = [sys.executable, "-m", f"mlperf_logging.{call.tool}", *call.arguments]
        done = subprocess.run(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert answer.status == done.returncode, call
        assert _lines(answer.words) == _lines(done.stdout), call


def _lines(words: str) -> list[str]:
    return [
        line for line in words.splitlines() if not line.startswith(("  ", "Process ForkProcess"))
    ]


@given(
    st.lists(
        st.lists(
            st.sampled_from([":::MLLOG ", ":::MLLOG", ":::", " ", "a", "\r", "\x85", "\\"])
        ).map("".join)
    )
)
def test_our_token_search_agrees_with_the_tools_parser(texts: list[str]) -> None:
    lines = [f"{text}\n" for text in texts] + texts
    assert text_from_token(lines) == ruleset_500.strip_and_dedup(lines)


def test_a_tool_that_hangs_is_ended(tmp_path: Path, log: Path) -> None:
    hanging = tmp_path / "fifo"
    os.mkfifo(hanging)
    calls = [official.compliance_checker(path, "x") for path in (hanging, log)]
    with official.started(calls, tmp_path, seconds=3) as answers:
        found = [
            call.judge(answer)[0]
            for call, answer in zip(calls, answers(lambda step: None), strict=True)
        ]
    assert found[0].outcome is Outcome.ERROR
    assert "no answer within 3 seconds" in found[0].words
    assert found[1].outcome is Outcome.PASS


def test_tools_end_with_their_check(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    calls = [official.compliance_checker(tmp_path / "fifo", "x")]
    with pytest.raises(KeyboardInterrupt), official.started(calls, tmp_path):  # noqa: PT012
        writer = os.open(tmp_path / "fifo", os.O_WRONLY)  # returns when the tool reads
        raise KeyboardInterrupt
    pipe = select.poll()
    pipe.register(writer, 0)
    assert pipe.poll(60_000) == [(writer, select.POLLERR)], "the tool still reads"


def test_a_misleading_name_changes_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "tree" / "a\nINFO - ALL CHECKS PASSED.").mkdir(parents=True)
    assert official.run(official.repo_checker(tmp_path / "tree"))[0].outcome is Outcome.ERROR


@pytest.mark.parametrize("division", ["open", "closed"])
def test_a_log_of_our_logger_is_compliant_without_a_warning(division, tmp_path):
    log = write_log(tmp_path / "result_0.txt", division=division)
    assert official.run(official.compliance_checker(log, "x"))[0].outcome is Outcome.PASS
    command = [
        sys.executable,
        "-m",
        "mlperf_logging.compliance_checker",
        "--usage",
        "training",
        "--ruleset",
        "5.0.0",
    ]
    done = subprocess.run(
        [*command, "--werror", str(log)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "SUCCESS" in done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr

"""The page: for any logs, it is written, escaped, self-contained, reproducible and not too large."""

import html.parser
import json
import re

import pytest

from mlbert.mlperf.findings import Finding, Outcome
from mlbert.report.page import findings_page, report_page
from mlbert.report.planner.cost import Prices
from mlbert.report.results import read_result
from mlbert.report.runs import read_systems
from simple_logs import line, write_log

VOID = {"meta", "br", "hr", "img", "input", "link"}
MARKUP = "<script>alert(1)</script>&\"'[red]$x^2$"


class Page(html.parser.HTMLParser):
    """Collects ids and tags, and makes sure that every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def page_of(*paths):
    text = report_page([read_result(system) for system in read_systems(list(paths))], Prices())
    page = Page(text)
    assert "script" not in page.tags
    assert len(set(page.ids)) == len(page.ids), "every id once"
    assert set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", text)) <= set(page.ids)
    assert not re.search(r"(?:src|href)=\"(?!#)|url\((?!#)|@import|<link", text), "nothing from elsewhere"
    return text


def write_metrics(folder, index, lines):
    target = folder / f"run_{index}" / "metrics.jsonl"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n".join(lines) + "\n")


def step(samples, loss=1.0):
    point = {"kind": "step", "step": 1, "samples": samples, "seconds": 1.0, "loss": loss, "learning_rate": 0.1}
    return json.dumps(point)


def test_a_page_of_one_system_has_its_figures_and_is_the_same_twice(tmp_path):
    for index in range(10):
        write_log(tmp_path / f"result_{index}.txt", [(100, 9, 0.5), (200, 20 + index, 0.73)], logged={"seed": index})
    write_metrics(tmp_path, 0, [step(10), step(20)])
    text = page_of(tmp_path)
    assert text == page_of(tmp_path)
    assert text.count("<svg") == 8
    assert "<?xml" not in text
    assert "24.50 s" in text
    assert not re.search(r"#0000(?!00)[01][0-9a-f]", text), "every placeholder has its variable"


def test_systems_side_by_side(tmp_path):
    for name, seconds in (("one", 100.0), ("two", 50.0)):
        for index in range(3):
            log = tmp_path / "results" / name / "bert" / f"result_{index}.txt"
            write_log(log, [(100, seconds + index, 0.73)], logged={"seed": index})
    text = page_of(tmp_path)
    assert "Side by side" in text
    assert "0.505 x" in text


def test_markup_in_any_value_is_text(tmp_path):
    name = MARKUP.replace("/", "")
    keys = ("submission_org", "submission_platform", "submission_division", "opt_name", "commit", "recipe", "seed")
    values = {**dict.fromkeys(keys, MARKUP), "packages": {MARKUP: MARKUP}, "config_file": f"{MARKUP}.sh"}
    values["configuration"] = {MARKUP: {"value": MARKUP, "origin": "environment X"}}
    folder = tmp_path / "results" / name / "bert"
    write_log(folder / "result_0.txt", logged=values)
    write_log(folder / f"result_{name}.txt", logged=values, status=MARKUP)
    (tmp_path / "systems").mkdir()
    (tmp_path / "systems" / f"{name}.json").write_text(json.dumps({MARKUP: MARKUP, "division": MARKUP}))
    text = page_of(tmp_path)
    assert "<script" not in text
    assert "[red]" in text
    controls = "".join(map(chr, [*range(9), 11, 27, 127, 155, 0x202E, 0xD800])) + MARKUP
    text = findings_page([Finding(controls, controls, Outcome.ERROR, controls)], controls)
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert "script" not in Page(text).tags


TEXTS = {
    "empty": "",
    "text": "no log",
    "cut": ":::MLLOG {",
    "begun": line("run_start", 0),
    "no start": line("run_stop", 0, status="success"),
    "backwards": f"{line('run_start', 10)}\n{line('run_stop', 0, status='success')}",
    "no samples": f"{line('run_start', 0)}\n{line('eval_accuracy', 1, 0.5)}\n{line('eval_stop', 1)}",
    "endless": f"{line('run_start', 0)}\n{line('run_stop', 1e306, status='success')}",
    "odd values": f"{line('configuration', 0, 5)}\n{line('packages', 0, [[1]])}\n{line('run_start', 0)}",
}
LACKING = {
    "one evaluation": {"evaluations": [(100, 10.0, 0.73)]},
    "no evaluation": {"evaluations": []},
    "no eval_start": {"eval_seconds": None},
    "aborted": {"status": "aborted"},
    "no status": {"status": None},
    **{f"batch {size}": {"logged": {"global_batch_size": size}} for size in (None, 0, 10**30)},
    "no target": {"logged": {"configuration": {"TARGET_MLM_ACCURACY": {"value": None}}}},
    "no sample": {"evaluations": [(0, 1.0, 0.0), (0, 2.0, 1.0)]},
}


def write_odd(folder, name):
    """Write a log of `TEXTS`, or a run of `LACKING` with metrics that are none."""
    folder.mkdir()
    if name in TEXTS:
        (folder / "result_0.txt").write_text(TEXTS[name])
    else:
        write_log(folder / "result_0.txt", **LACKING[name])
        write_metrics(folder, 0, ["{", "[1]", "5", step(None), step(10, float("nan")), step(5, True)])
    return folder


@pytest.mark.parametrize("name", [*TEXTS, *LACKING])
def test_any_log_gives_a_page(tmp_path, name):
    assert "No result" in page_of(write_odd(tmp_path / "one", name)) or name != "empty"


@pytest.mark.parametrize("names", [TEXTS, LACKING], ids=["texts", "lacking"])
def test_such_logs_give_a_page_with_another_one(tmp_path, names):
    write_log(tmp_path / "other" / "result_0.txt", [(5, 1e5, 0.73)])
    page_of(tmp_path / "other", *(write_odd(tmp_path / name, name) for name in names))


@pytest.mark.slow
def test_many_runs_and_evaluations_give_a_page_of_bearable_size(tmp_path):
    for index in range(150):
        evaluations = [(100 * k, 2.0 * k, 0.0007 * k) for k in range(1, 5)]
        write_log(tmp_path / "many" / f"result_{index}.txt", evaluations, logged={"seed": index})
    evaluations = [(100 * k, 2.0 * k, k / 6800) for k in range(1, 5001)]
    write_log(tmp_path / "long" / "result_0.txt", evaluations)
    write_metrics(tmp_path / "long", 0, [step(10 * k, 1 + k % 7) for k in range(1, 20_000)])
    assert len(page_of(tmp_path / "many")) < 4e6
    assert len(page_of(tmp_path / "long")) < 4e6

"""A report's numbers against known logs; its page of any log:
escaped, self-contained, reproducible, not too large.
"""

import html.parser
import itertools
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlaudit.findings import Finding, Outcome
from mlaudit.planner.cost import Prices
from mlaudit.report.page import findings_page, report_page
from mlaudit.report.results import (
    FASTEST,
    MISSED,
    SLOWEST,
    nearest_hyperparameters,
    read_result,
    scaling,
)
from mlaudit.report.runs import read_run, read_systems, thin
from mlbert.mlperf.rules import reference_point
from programs import write_files
from simple_logs import line, write_log, write_runs

VOID = {"meta", "br", "hr", "img", "input", "link"}
MARKUP = "<script>alert(1)</script>&\"'[red]$x^2$"

TEXTS = {
    "empty": "",
    "text": "no log",
    "cut": ":::MLLOG {",
    "begun": line("run_start", 0),
    "no start": line("run_stop", 0, status="success"),
    "backwards": f"{line('run_start', 10)}\n{line('run_stop', 0, status='success')}",
    "no samples": (
        f"{line('run_start', 0)}\n{line('eval_accuracy', 1, 0.5)}\n{line('eval_stop', 1)}"
    ),
    "endless": f"{line('run_start', 0)}\n{line('run_stop', 1e306, status='success')}",
    "odd values": (
        f"{line('configuration', 0, 5)}\n{line('packages', 0, [[1]])}\n{line('run_start', 0)}"
    ),
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


def result_of(folder):
    (system,) = read_systems([folder])
    return read_result(system)


def write_summary(folder, rate):
    write_files(
        folder, {"run_0/summary.json": json.dumps({"samples": 100, "samples_per_second": rate})}
    )


@pytest.mark.parametrize(
    ("seconds", "missed", "mean", "marks"),
    [
        ([10, 20, 30, 40], (), 25.0, {"0": FASTEST, "3": SLOWEST}),
        ([10, 20, 30, 40], (1,), 35.0, {"0": FASTEST, "1": MISSED}),
        ([10, 20, 30, 40], (1, 2), math.inf, {"0": FASTEST, "1": MISSED, "2": MISSED}),
        ([10, 20], (), None, {}),
    ],
)
def test_olympic_mean_and_what_it_leaves_out(tmp_path, seconds, missed, mean, marks):
    write_runs(tmp_path, seconds, missed)
    result = result_of(tmp_path)
    assert result.olympic_seconds == mean
    assert result.marks == marks


def test_speeds_and_times_leave_evaluations_out(tmp_path):
    write_log(tmp_path / "result_0.txt", [(100, 11.5, 0.5), (300, 22.5, 0.72)], seconds=23.0)
    (run,) = result_of(tmp_path).runs
    # Training: 0.5 (block_start) to 10.5, then 11.5 to 21.5; each evaluation takes 1 s.
    assert run.speeds == [(100, 10.0), (300, 20.0)]
    assert (run.times.untimed, run.times.start, run.times.evaluation, run.times.other) == (
        5.0,
        0.5,
        2.0,
        None,
    )
    assert run.times.training == pytest.approx(20.5)
    write_log(tmp_path / "result_0.txt", [(100, 10.5, 0.5), (300, 20.5, 0.72)], eval_seconds=None)
    (run,) = result_of(tmp_path).runs
    assert (run.speeds, run.times.evaluation) == ([(100, 10.0), (300, 20.0)], None), (
        "there is no eval_start"
    )
    write_log(tmp_path / "result_0.txt", [(100, 11.5, 0.72)])
    write_summary(tmp_path, rate=12.5)
    (run,) = result_of(tmp_path).runs
    assert (run.times.training, run.times.other) == (8.0, 2.0), "pauses between steps"


@given(
    gaps=st.lists(st.floats(1.0, 1e4), min_size=1, max_size=8),
    rest=st.floats(0, 100),
    eval_seconds=st.one_of(st.none(), st.floats(0.001, 0.9)),
    rate=st.one_of(st.none(), st.floats(1e-3, 1e6)),
)
def test_times_add_up_to_the_time_to_train(tmp_path_factory, gaps, rest, eval_seconds, rate):
    ends = list(itertools.accumulate(gaps))
    evaluations = [(100 * index, end, 0.1) for index, end in enumerate(ends, start=1)]
    folder = tmp_path_factory.mktemp("times")
    write_log(
        folder / "result_0.txt", evaluations, eval_seconds=eval_seconds, seconds=ends[-1] + rest
    )
    if rate is not None:
        write_summary(folder, rate)
    (run,) = result_of(folder).runs
    parts = (run.times.start, run.times.training, run.times.evaluation or 0, run.times.other or 0)
    assert math.fsum(parts) == pytest.approx(run.seconds, abs=1e-6)
    assert min(parts) >= -1e-6


def test_reference_and_score_factor_are_the_official_ones(tmp_path):
    """The factor is that of Dell's published scaling.json for 2 x XE9712 in v5.0:
    batch 768, 2361776.125 samples.
    """
    point = reference_point(768)
    assert scaling(2361776.125, point) == pytest.approx(1.0347862833364607, rel=1e-8)
    assert scaling(point.mean_samples + 1, point) == 1.0
    assert scaling(point.min_mean_samples - 1, point) is None
    write_runs(tmp_path, [10.0] * 10, missed=(9,), samples=range(2_400_000, 2_400_010))
    result = result_of(tmp_path)
    assert result.reference.global_batch_size == 448
    # Of ten runs the fewest samples and the one that missed the target are left out.
    assert result.mean_samples == 2_400_004.5
    assert result.scaling == pytest.approx(result.reference.mean_samples / 2_400_004.5)


def test_hyperparameters_that_differ_are_reported(tmp_path):
    batch, values = nearest_hyperparameters(460)
    assert (batch, values["opt_base_learning_rate"]) == (448, 0.000425)
    for index, rate in enumerate((0.000425, 0.0005)):
        logged = {"opt_base_learning_rate": rate, "opt_lamb_beta_1": 0.9, "seed": index}
        write_log(tmp_path / f"result_{index}.txt", logged=logged)
    values = result_of(tmp_path).hyperparameters
    assert values["opt_base_learning_rate"].text == "0.000425, 0.0005"
    assert values["opt_base_learning_rate"].differs
    assert not values["opt_lamb_beta_1"].differs
    assert result_of(tmp_path).reference_hyperparameters[0] == 448


def test_share_of_a_published_peak(tmp_path):
    """According to v4.1, 996 samples/s are 50.2 % of the dense 16-bit peak of an H200."""
    samples = 996 * 8 * 300
    write_log(tmp_path / "results" / "x" / "bert" / "result_0.txt", [(samples, 300.0, 0.72)])
    facts = {
        "number_of_nodes": "1",
        "accelerators_per_node": "8",
        "accelerator_model_name": "NVIDIA H200-SXM5",
    }
    write_files(tmp_path, {"systems/x.json": json.dumps(facts)})
    (share,) = result_of(tmp_path).peak_shares.values()
    assert share == pytest.approx(0.502, abs=5e-4)


def test_systems_of_the_same_name_are_distinguished(tmp_path):
    for folder in ("a/results/x/bert", "a/results/y/bert", "b/results/x/bert"):
        write_log(tmp_path / folder / "result_0.txt")
    tree = tmp_path / "a"
    other = tmp_path / "b" / "results" / "x" / "bert"
    assert [system.name for system in read_systems([tree, tree])] == ["x", "y"]
    names = [system.name for system in read_systems([tree, other])]
    assert len(set(names)) == 3
    assert all(name.endswith(("/x", "/y")) for name in names)


def test_thin_keeps_both_ends():
    points = [(index, index) for index in range(5000)]
    found = thin(points, 10)
    assert (len(found), found[0], found[-1]) == (10, points[0], points[-1])
    assert thin(points[:3], 10) == points[:3]


@pytest.mark.parametrize("value", [True, "x", None, [1], float("nan"), float("inf"), 10**400])
def test_a_run_with_non_numeric_values_has_no_numbers(tmp_path, value):
    log = write_log(
        tmp_path / "result_0.txt", [(value, 10.0, value)], logged={"global_batch_size": value}
    )
    result = result_of(log)
    assert result.batch is None
    assert result.runs[0].evaluations == []
    assert read_run(result.runs[0].source).samples is None


class Page(html.parser.HTMLParser):
    """Collects ids and tags, and makes sure that every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.tags = []
        self.ids = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag in VOID or self.open.pop() == tag


def page_of(*paths):
    text = report_page([read_result(system) for system in read_systems(list(paths))], Prices())
    page = Page(text)
    assert "script" not in page.tags
    assert len(set(page.ids)) == len(page.ids), "every id once"
    assert set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", text)) <= set(page.ids)
    assert not re.search(r"(?:src|href)=\"(?!#)|url\((?!#)|@import|<link", text), (
        "nothing from elsewhere"
    )
    return text


def write_metrics(folder, lines):
    write_files(folder, {"run_0/metrics.jsonl": "\n".join([*lines, ""])})


def step(samples, loss=1.0):
    point = {
        "kind": "step",
        "step": 1,
        "samples": samples,
        "seconds": 1.0,
        "loss": loss,
        "learning_rate": 0.1,
    }
    return json.dumps(point)


def test_a_page_of_one_system_has_its_figures_and_is_the_same_twice(tmp_path):
    for index in range(10):
        write_log(
            tmp_path / f"result_{index}.txt",
            [(100, 9, 0.5), (200, 20 + index, 0.73)],
            logged={"seed": index},
        )
    write_metrics(tmp_path, [step(10), step(20)])
    text = page_of(tmp_path)
    assert text == page_of(tmp_path)
    assert text.count("<svg") == 8
    assert "<?xml" not in text
    assert "24.50 s" in text
    assert not re.search(r"#0000(?!00)[01][0-9a-f]", text), "every placeholder has its variable"


def test_bars_next_to_each_other_differ_in_their_patterns(tmp_path):
    for index in range(10):
        write_log(tmp_path / f"result_{index}.txt", [(100, 9, 0.5), (200, 20 + index, 0.73)])
    text = page_of(tmp_path)
    found = re.findall(r'<i class="swatch (bar[ a-z]*)"[^>]*></i>([^<]+)', text)
    assert ("bar", "training") in found
    assert ("bar stripes", "evaluation") in found
    assert ("bar", "counted") in found
    assert ("bar stripes", "fastest or slowest: not counted") in found
    assert text.count("<pattern") >= 2


def test_systems_side_by_side(tmp_path):
    for name, seconds in (("one", [100, 101, 102]), ("two", [50, 51, 52])):
        write_runs(tmp_path / "results" / name / "bert", seconds)
    text = page_of(tmp_path)
    assert "Side by side" in text
    assert "0.505 x" in text


def test_markup_in_any_value_is_text(tmp_path):
    name = MARKUP.replace("/", "")
    keys = (
        "submission_org",
        "submission_platform",
        "submission_division",
        "opt_name",
        "commit",
        "recipe",
        "seed",
    )
    values = {
        **dict.fromkeys(keys, MARKUP),
        "packages": {MARKUP: MARKUP},
        "config_file": f"{MARKUP}.sh",
    }
    values["configuration"] = {MARKUP: {"value": MARKUP, "origin": "environment X"}}
    folder = tmp_path / "results" / name / "bert"
    write_log(folder / "result_0.txt", logged=values)
    write_log(folder / f"result_{name}.txt", logged=values, status=MARKUP)
    write_files(
        tmp_path, {f"systems/{name}.json": json.dumps({MARKUP: MARKUP, "division": MARKUP})}
    )
    text = page_of(tmp_path)
    assert "<script" not in text
    assert "[red]" in text
    controls = "".join(map(chr, [*range(9), 11, 27, 127, 155, 0x202E, 0xD800])) + MARKUP
    text = findings_page([Finding(controls, controls, Outcome.ERROR, controls)], controls)
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert "script" not in Page(text).tags


def test_any_log_gives_a_page_alone_and_with_others(tmp_path):
    write_files(tmp_path, {f"{name}/result_0.txt": text for name, text in TEXTS.items()})
    for name, options in LACKING.items():
        write_log(tmp_path / name / "result_0.txt", **options)
        write_metrics(
            tmp_path / name, ["{", "[1]", "5", step(None), step(10, float("nan")), step(5, True)]
        )
    pages = {name: page_of(tmp_path / name) for name in (*TEXTS, *LACKING)}
    assert "No result" in pages["empty"]
    other = write_log(tmp_path / "other" / "result_0.txt", [(5, 1e5, 0.73)])
    page_of(other.parent, *(tmp_path / name for name in pages))


@pytest.mark.slow
def test_many_runs_and_evaluations_give_a_page_of_bearable_size(tmp_path):
    for index in range(150):
        evaluations = [(100 * k, 2.0 * k, 0.0007 * k) for k in range(1, 5)]
        write_log(tmp_path / "many" / f"result_{index}.txt", evaluations, logged={"seed": index})
    evaluations = [(100 * k, 2.0 * k, k / 6800) for k in range(1, 5001)]
    write_log(tmp_path / "long" / "result_0.txt", evaluations)
    write_metrics(tmp_path / "long", [step(10 * k, 1 + k % 7) for k in range(1, 20_000)])
    assert len(page_of(tmp_path / "many")) < 4e6
    assert len(page_of(tmp_path / "long")) < 4e6

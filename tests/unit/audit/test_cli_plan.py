"""``mlbert plan``: words and JSON, configurations, mistakes in one line, calibration by logs."""

import json
from pathlib import Path

import pytest

import simple_logs
from mlaudit.planner.timing import held_out
from mlbert.mlperf.rules import UNVERIFIED
from programs import exports_of


def test_words_and_json(run_mlbert, as_json):
    words = [
        "--model",
        "large",
        "--gpus",
        64,
        "--gpu",
        "h100",
        "--nodes",
        8,
        "--network",
        "400Gb",
        "--batch",
        4608,
    ]
    code, text, _ = run_mlbert("plan", *words, "--price-per-gpu-hour", 3, "--watts-per-gpu", 1000)
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    for part in (
        "samples to the target",
        "time to train",
        "90 % interval",
        "memory",
        "limit  ",
        "dollars",
    ):
        assert part in text
    found = as_json(*words)
    assert found["job"]["network_gbps"] == 3200
    assert found["step_ms"] == pytest.approx(sum(found["step"].values()))
    slower = as_json(*words, "--precision", "bf16", "--imbalance", 1.1)
    assert slower["step"]["imbalance"] == pytest.approx(0.1 * slower["step"]["compute"])
    assert slower["seconds"] > found["seconds"]
    assert as_json("--gpus", 8, "--batch-per-gpu", 96, "--efficiency", 0.5)["job"]["batch"] == 768


def test_sweep_table_page_and_budget(run_mlbert, as_json, tmp_path):
    page = tmp_path / "sweep.html"
    words = ["--html", page, "--price-per-gpu-hour", 3]
    code, text, _ = run_mlbert("plan", "--sweep", *words, "--budget", 10)
    assert code == 0
    assert "4096" in text
    assert "fastest within the budget" in text
    cheapest, fastest = text.split("cheapest: ")[1].splitlines()[:2]
    html = page.read_text()
    assert html.count('<svg class="plot"') == 1
    assert html.count('<th scope="row">4096</th>') == 1
    assert f"cheapest: {cheapest}" in html
    # The choice for the budget is the headline.
    assert f"<strong>{fastest.split(', ')[2]}</strong>" in html
    found = as_json("--sweep", "--gpu", "gb200", "--price-per-gpu-hour", 3, "--budget", 10)
    assert len(found["sweep"]) == 13
    assert found["fastest"]["dollars"] <= 10


def test_the_page_of_one_estimate(run_mlbert, as_json, tmp_path):
    """It has what limits the job, both bands, energy, the errors of held-out results,
    and MLCommons' sentence.
    """
    page = tmp_path / "plan.html"
    words = ["--gpus", 64, "--watts-per-gpu", 1000]
    found = as_json(*words)
    code, text, _ = run_mlbert("plan", *words, "--html", page)
    assert (code, text.splitlines()[-1]) == (0, f"page: {page}")
    html = page.read_text()
    assert "<svg" not in html
    for part in (f"<dd>{found['limit']}</dd>", "90 % interval of one run", "kWh a run", UNVERIFIED):
        assert part.lower() in html.lower(), part
    for name, error in held_out().items():
        row = html.split(f">{name}</th>")[1].split("</tr>")[0]
        assert [f"{100 * error[key]:.1f} %" in row for key in error] == [True] * 4


@pytest.mark.parametrize(
    ("words", "code", "subject"),
    [
        (["--gpu", "v100"], "config.choice", "--gpu"),
        (["--gpu", "v100", "--factor", 2], "config.missing", "--factor"),
        (["--gpu", "h100", "--like", "a100"], "config.conflict", "--like"),
        (["--gpu", "v100", "--like", "v100"], "config.choice", "--like"),
        (
            ["--gpu", "v100", "--like", "a100", "--factor", 2, "--calibrate", __file__],
            "config.conflict",
            "--factor",
        ),
        (["--gpus", "12", "--nodes", "5"], "config.conflict", "--nodes"),
        (["--batch", "20000"], "config.conflict", "--batch"),
        (["--batch", "64", "--batch-per-gpu", "8"], "config.conflict", "--batch-per-gpu"),
        (["--network", "fast"], "config.value", "--network"),
        (["--network", "99999Gb"], "config.value", "--network"),
        (["--precision", "int4"], "config.choice", "--precision"),
        (["--gpu", "a100", "--precision", "fp8"], "config.choice", "--precision"),
        (["--budget", "5"], "config.conflict", "--budget"),
        (["--sweep", "--gpus", "8"], "config.conflict", "--sweep"),
        (["--sweep", "--budget", "5"], "config.missing", "--budget"),
        (["--config", "config_x.sh"], "config.file", "config_x.sh"),
        (["--model", "base"], "plan.impossible", "--samples"),
        (["--calibrate", "/nowhere"], "file.unreadable", "/nowhere"),
        (["--gpus", "5"], "config.missing", "--batch"),
    ],
)
def test_mistakes_are_one_line(assert_fails, words, code, subject):
    assert_fails(["plan", *words], code, subject)


def test_sourced_exports(tree_root, as_json, monkeypatch):
    config = min(
        (tree_root / "benchmarks/bert/implementations/dgxh100_n8").glob("config_*pack*.sh")
    )
    for name, value in exports_of(config).items():
        monkeypatch.setenv(name, value)
    found = as_json("--gpu", "h100")
    assert (found["job"]["gpus"], found["job"]["nodes"], found["job"]["batch"]) == (64, 8, 4608)
    assert not found["job"]["fp8"]


def write_log(path: Path, status: str = "success") -> Path:
    """Write a log of 8 GPUs at 9,000 sequences/s: ten evaluations every 10,000 sequences,
    1 s each.
    """
    evaluations = [(10_000 * n, n * (10_000 / 9000 + 1), 0.5) for n in range(1, 11)]
    return simple_logs.write_log(
        path, evaluations, logged={"ranks": 8, "global_batch_size": 768}, status=status
    )


def test_calibration_by_a_log_of_gpus(as_json, assert_fails, tmp_path):
    log = write_log(tmp_path / "log.txt", status="aborted")
    words = ["--gpu", "h200", "--gpus", 8, "--batch", 768, "--calibrate", log]
    found = as_json(*words)
    assert found["sequences_per_second"] == pytest.approx(9000)
    assert found["evaluation_seconds"] == pytest.approx(1)
    reached = write_log(tmp_path / "reached.txt")
    more = [
        as_json(*words[:4], "--batch", 1536, *extra)["samples"]
        for extra in ((), ("--calibrate", reached))
    ]
    here = [
        as_json(*words[:4], "--batch", 768, *extra)["samples"]
        for extra in ((), ("--calibrate", reached))
    ]
    assert here[1] == pytest.approx(100_000)
    assert more[1] / more[0] == pytest.approx(here[1] / here[0])
    assert_fails(["plan", *words, "--efficiency", 0.5], "config.conflict", "--efficiency")
    (tmp_path / "no.txt").write_text("nothing")
    assert_fails(
        ["plan", "--calibrate", tmp_path / "no.txt"], "log.incomplete", tmp_path / "no.txt"
    )


def test_power_comes_from_the_summaries_of_the_logs(run_mlbert, as_json, tmp_path):
    log = write_log(tmp_path / "result_0.txt")
    (tmp_path / "run_0").mkdir()
    words = [
        "--gpu",
        "h200",
        "--gpus",
        16,
        "--batch",
        768,
        "--calibrate",
        log,
        "--co2-per-kwh",
        0.5,
    ]
    for summary, watts in (
        ({}, None),
        ({"average_watts": 8000.0}, 1000),
        ({"average_watts": "8000"}, None),
    ):
        (tmp_path / "run_0" / "summary.json").write_text(json.dumps(summary))
        found = as_json(*words)
        hours = 16 * found["seconds"] / 3600
        assert found["kilowatt_hours"] == (None if watts is None else pytest.approx(hours))
        assert found["co2_kg"] == (None if watts is None else pytest.approx(hours / 2))
    assert as_json(*words, "--watts-per-gpu", 500)["kilowatt_hours"] == pytest.approx(hours / 2)
    assert "CO2: " in " ".join(
        run_mlbert("plan", *words, "--watts-per-gpu", 500)[1].replace("CO2 ", "CO2: ").split()
    )


def test_another_gpu_like_a_known_one(run_mlbert, as_json):
    """The parts of a step that the GPU computes scale with its speed, the network does not."""

    def plan(*gpu):
        return as_json("--gpu", *gpu, "--gpus", 64, "--nodes", 8, "--batch", 4608)

    known = plan("h200")
    other = plan("b300", "--like", "h200", "--factor", 2)
    assert other["step"]["compute"] == pytest.approx(known["step"]["compute"] / 2)
    assert other["evaluation_seconds"] == pytest.approx(known["evaluation_seconds"] / 2)
    assert other["step"]["network"] == known["step"]["network"]
    assert other["samples"] == known["samples"]
    # Nothing was measured of it, so its band is that of unseen GPUs.
    spans = [found["score_band"][1] / found["score_band"][0] for found in (known, other)]
    assert spans[0] < spans[1]
    code, text, _ = run_mlbert("plan", "--gpu", "b300", "--like", "h200", "--factor", 2)
    assert code == 0
    assert "8 b300 on 1 node" in text
    assert "Expect it to be off by 15 %" in text
    _, text, _ = run_mlbert("plan", "--gpu", "h200")
    assert "Expect it to be off by 5 % on one node" in text


def test_another_gpu_calibrated_by_a_log_of_it(as_json, tmp_path):
    log = write_log(tmp_path / "log.txt")
    gpu = as_json(
        "--gpu", "b300", "--like", "h200", "--gpus", 8, "--batch", 768, "--calibrate", log
    )
    assert gpu["job"]["name"] == "b300"
    assert gpu["sequences_per_second"] == pytest.approx(9000)

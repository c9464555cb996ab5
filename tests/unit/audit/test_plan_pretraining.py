"""``mlbert plan --recipe``: hours, cost, energy and disk of pre-training on a number of tokens."""

import pytest

from mlaudit.planner.pretraining import flops_a_token
from mlbert.config import presets

BASE = ("--recipe", "modernbert-base", "--tokens", "30e9", "--gpu", "h100", "--gpus", 1)
HOUR = 3600.0


def test_words(run_mlbert):
    code, text, err = run_mlbert("plan", *BASE, "--dollars-per-hour", 2)
    assert code == 0, err
    assert max(map(len, text.splitlines())) <= 80
    assert "27.1 h" in text
    assert "308,000 tokens/s published for modernbert-base on an H100" in text
    assert "has not trained this model at this size" in text


def test_published_training_takes_the_published_time(as_json):
    """1.719 T tokens in 194 hours on 8 H100 (arXiv 2412.13663)."""
    found = as_json("--recipe", "modernbert-base", "--tokens", "1.719e12", "--gpus", 8)
    assert found["seconds"] / HOUR == pytest.approx(194, rel=0.005)


def test_parts(as_json):
    found = as_json(*BASE, "--dollars-per-hour", 2, "--watts-per-gpu", 600)
    assert found["seconds"] == pytest.approx(30e9 / 308_000)
    assert found["dollars"] == pytest.approx(2 * found["seconds"] / HOUR)
    assert found["joules"] == pytest.approx(600 * found["seconds"])
    assert found["steps"] * found["step_tokens"] >= 30e9 > (found["steps"] - 1) * 4608 * 1024
    assert found["token_bytes"] == 60e9
    low, high = found["seconds_band"]
    assert low < found["seconds"] < high
    assert as_json(*BASE)["watts_is_limit"]
    assert as_json(*BASE)["dollars"] is None

    measured = as_json(*BASE, "--tokens-per-second", 154_000)
    assert measured["seconds"] == pytest.approx(2 * found["seconds"])
    assert measured["seconds_band"] == [measured["seconds"], measured["seconds"]]


def test_other_gpus_lengths_and_sizes(as_json):
    one = as_json(*BASE)
    assert as_json(*BASE, "--gpus", 8)["seconds"] == pytest.approx(one["seconds"] / 8)
    nodes = as_json(*BASE, "--gpus", 64)
    assert nodes["network_seconds"] > 0
    assert nodes["seconds"] > one["seconds"] / 64
    long = as_json(*BASE, "--length", 8192)
    assert 1.2 < one["rate"] / long["rate"] < 2.5
    a100 = as_json(*BASE, "--gpu", "a100")
    assert 2 < one["rate"] / a100["rate"] < 4
    assert spread(a100) > spread(one)
    like = as_json(*BASE, "--gpu", "x1", "--like", "h100", "--factor", 2)
    assert like["rate"] == pytest.approx(2 * one["rate"])
    assert like["watts"] is None
    rates = [as_json(*BASE, "--recipe", name)["rate"] for name in ("ettin-17m", "ettin-1b")]
    assert rates[0] > one["rate"] > rates[1]


def spread(found: dict) -> float:
    low, high = found["seconds_band"]
    return high / low


def test_flops_of_a_token():
    """By hand, ModernBERT-base at 1,024: 110 M weights, the head at 30 %, 8 global layers and 14
    of 129 keys.
    """
    weights = 22 * (4 * 768**2 + 3 * 768 * 1152)
    head = 0.3 * (768**2 + 768 * 50368)
    attention = 12 * 768 * (8 * 1024 + 14 * 129)
    by_hand = 6 * (weights + head) + attention
    shape = presets.find("modernbert-base", "--recipe").shape
    assert flops_a_token(shape, 1024) == pytest.approx(by_hand, rel=0.04)
    assert by_hand == pytest.approx(0.82e9, rel=0.03)


def test_what_is_refused(assert_fails):
    def refused(code, subject, *words):
        assert_fails(["plan", *words], code, subject)

    refused("config.choice", "--recipe modernbert-bas", *BASE, "--recipe", "modernbert-bas")
    refused("config.missing", "--recipe", "--recipe", "modernbert-base")
    refused("config.missing", "--tokens", "--tokens", "1e9")
    refused("config.conflict", "--recipe", *BASE, "--model", "large")
    refused("config.missing", "--length", "--length", 8192)
    for option, value in (("--budget", 5), ("--imbalance", 1.5), ("--co2-per-kwh", 0.4)):
        refused("config.conflict", "--recipe", *BASE, option, value)
    refused("config.choice", "--gpu", *BASE, "--gpu", "v100")

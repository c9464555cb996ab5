"""The preparation benchmark writes a complete and consistent record."""

import json
import shutil
from pathlib import Path

import pytest

import bench_prepare as prepare
from mlbert.data.formats.wordpiece import load_vocabulary

ASSETS = Path(__file__).resolve().parents[1] / "assets" / "instances"
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc on PATH: nothing to compare with")


@pytest.fixture(scope="module")
def record() -> dict:
    return prepare.run(ASSETS / "text.txt", ASSETS / "vocab.txt", rounds=2, num_lengths=20_000)


def test_records_are_consistent(record):
    generator = record["generator"]
    assert generator["instances"] == 217
    assert len(generator["pair_ratios"]) == generator["rounds"] == 2
    assert min(generator["pair_ratios"]) <= generator["ratio"] <= max(generator["pair_ratios"])
    for side in (generator["native"], generator["plain"]):
        assert side["instances_per_second"] * side["median_seconds"] == pytest.approx(217)
        assert side["median_seconds"] >= side["median_tokenizer_seconds"] > 0
    imported, loader, packing = record["tfrecord_to_hdf5"], record["loader"], record["packing"]
    assert imported["bytes"] > 217 * 1024
    assert loader["set_sequences"] >= prepare.LOADED_SEQUENCES
    assert min(loader["sequences"]) >= prepare.PACKS_PER_STEP * prepare.LOADER_STEPS
    assert packing["lengths"] == 20_000
    assert 20_000 / 3 <= packing["packs"] < 20_000
    assert 0.9 < packing["filled"] <= 1


def test_command_prints_and_writes_the_record(monkeypatch, record, tmp_path, capsys):
    monkeypatch.setattr(prepare, "run", lambda *_: record)
    assert prepare.main(["--json", str(tmp_path / "record.json")]) == 0
    assert "ratio (median of 2 pairs)" in capsys.readouterr().out
    assert json.loads((tmp_path / "record.json").read_text()) == json.loads(json.dumps(record))


def test_default_input_is_generated(tmp_path):
    part, vocab = prepare.default_input(tmp_path, num_bytes=30_000, vocab_size=400)
    assert 30_000 < part.stat().st_size < 200_000
    assert "\n\n" in part.read_text()
    assert len(load_vocabulary(vocab)) <= 400


def test_input_without_a_vocabulary_is_an_error(capsys):
    assert prepare.main(["--input", str(ASSETS / "text.txt")]) == 2
    assert "only one of them is given" in capsys.readouterr().err

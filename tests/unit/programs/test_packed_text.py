"""main.py with packed sequences and a batch-size warm-up in tokens, as ModernBERT's YAML has them."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mlbert.config.batch_growth import BatchGrowth
from mosaic_texts import BASE, make_texts
from mosaic_yaml.commands.main_yaml import app
from mosaic_yaml.durations import Durations
from training_settings import read_metrics, read_summary
from user_errors import user_error

ROW = 24  # tokens, of BASE
GROWTH = (
    "train_loader.sequence_packing=true",
    "train_loader.batch_size_warmup_min_size=2",
    f"train_loader.batch_size_warmup_tokens={5 * (2 + 5) // 2 * ROW * 4}tok",
    "count_padding_tokens=false",
    "global_train_batch_size=6",
    "device_train_microbatch_size=2",
)
LENGTHS = ("max_duration=24ba", "eval_interval=8ba", "save_interval=8ba")
WORDS = (*BASE, "save_folder=out", "model.name=mosaic_bert", "console_log_interval=1ba", *GROWTH)


@pytest.fixture
def work(tmp_path: Path, tree_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_texts(tmp_path, tree_root)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pretrain(*words: str) -> None:
    """Run main.py in this process."""
    assert app(["main.yaml", *WORDS, *words], standalone_mode=False) == 0


def test_a_packed_run_fills_its_rows_and_resumes_in_the_warm_up(work: Path) -> None:
    pretrain(*LENGTHS)
    out = work / "out"
    assert "BATCHSIZE_WARMUP_STEPS=20 " in (out / "run_0/settings.txt").read_text()
    growth = BatchGrowth(2, 6, 20)
    summary = read_summary(out)
    rows = growth.before(24)
    assert summary["steps"] == 24
    assert rows * ROW * 0.6 < summary["tokens"] <= rows * ROW
    assert summary["samples"] > rows
    assert summary["sequences_per_pack"] == pytest.approx(summary["samples"] / rows, abs=1e-4)
    points = [json.loads(line) for line in (out / "run_0/metrics.jsonl").read_text().splitlines()]
    assert [point["step"] for point in points if point["kind"] == "evaluation"] == [8, 16, 24]
    whole = load_file(out / "run_0/weights/model.safetensors")
    losses = {line["step"]: line["loss"] for line in read_metrics(out)}
    # The same run again from its first checkpoint, in the middle of the warm-up.
    for step in (16, 24):
        shutil.rmtree(out / f"run_0/checkpoints/step_{step:08}")
    (out / "run_0/summary.json").unlink()
    pretrain(*LENGTHS)
    again = load_file(out / "run_0/weights/model.safetensors")
    assert all(bool((again[name] == whole[name]).all()) for name in whole)
    assert {line["step"]: line["loss"] for line in read_metrics(out)} == losses


def test_what_is_refused(work: Path) -> None:
    with user_error("config.unsupported", "argument train_loader.sequence_packing="):
        pretrain("max_duration=1ep")
    with user_error("config.unsupported", "max_duration=100tok"):
        pretrain("max_duration=100tok", "train_loader.sequence_packing=false")
    with user_error("config.range", "argument train_loader.batch_size_warmup_min_size="):
        pretrain("max_duration=4ba", "train_loader.batch_size_warmup_min_size=7")
    assert not (work / "out").exists()


@pytest.mark.parametrize("unit", ["tok", "sp", "dur"])
def test_durations_while_the_batch_grows(unit: str) -> None:
    """Of a batch of 2 to 10 rows on each of 3 ranks, of 50 tokens a row."""
    growth = BatchGrowth(2, 10, 40)
    known = Durations(30, 50, lambda: 1, max_steps=100, growth=growth, is_packed=True)
    total = growth.before(100)
    for step in range(1, 101):
        rows = growth.before(step)
        text = {"tok": f"{rows * 3 * 50}tok", "sp": f"{rows * 3}sp", "dur": f"{rows / total}dur"}
        assert known.steps("t_warmup", text[unit], least=0) == step
        last = growth.before(100) - growth.before(100 - step)
        text = {"tok": f"{last * 3 * 50}tok", "sp": f"{last * 3}sp", "dur": f"{last / total}dur"}
        assert known.last_steps("t_decay", text[unit]) == step
    assert known.steps("t_warmup", "7ba") == known.last_steps("t_decay", "7ba") == 7
    assert known.interval("eval_interval", "60sp") == 2
    assert known.share("1dur") == 1
    assert known.share("0.5dur") is None

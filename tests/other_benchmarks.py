"""Made logs of other MLPerf benchmarks than BERT.

No published logs of them are at hand. Keys, order and metadata are those that the official
compliance checker of a round requires; values, times and qualities are made, and vary with the seed
as those of honest runs do.
"""

import json
import random
from collections.abc import Mapping
from pathlib import Path

from made_benchmark import MadeBenchmark
from mlbert.host.system_description import describe_system, write_description

TREE_OF = "SomeOrg"
SYSTEM = "machine"
_BEGIN_MS = 1_700_000_000_000
_BETWEEN_RUNS_MS = 20_000_000
TREE_OF = "SomeOrg"
SYSTEM = "machine"


MADE: Mapping[str, MadeBenchmark] = {
    "resnet": MadeBenchmark(
        ruleset="4.0.0",
        runs=5,
        progress="epoch_num",
        every=4,
        first=0.2,
        target=0.759,
        keys={
            "global_batch_size": 3264,
            "opt_name": "lars",
            "lars_opt_base_learning_rate": 10.5,
            "lars_opt_end_learning_rate": 0.0001,
            "lars_opt_learning_rate_decay_poly_power": 2,
            "lars_opt_learning_rate_decay_steps": 13698,
            "lars_epsilon": 0.0,
            "lars_opt_learning_rate_warmup_epochs": 2,
            "lars_opt_momentum": 0.9,
            "lars_opt_weight_decay": 5e-05 * 2,
        },
    ),
    "maskrcnn": MadeBenchmark(
        ruleset="3.1.0",
        runs=5,
        progress="epoch_num",
        every=1,
        first=0.1,
        target=0.377,
        keys={
            "global_batch_size": 96,
            "opt_base_learning_rate": 0.12,
            "opt_learning_rate_warmup_steps": 625,
            "opt_learning_rate_warmup_factor": 0.000192,
            "num_image_candidates": 6000,
            "opt_learning_rate_decay_factor": 0.1,
            "opt_learning_rate_decay_steps": [12000, 16000],
            "min_image_size": 800,
            "max_image_size": 1333,
        },
    ),
    "llama2_70b_lora": MadeBenchmark(
        ruleset="5.0.0",
        runs=10,
        progress="samples_count",
        every=384,
        first=1.4,
        target=0.925,
        keys={
            "global_batch_size": 8,
            "opt_base_learning_rate": 0.0004,
            "opt_learning_rate_training_steps": 1024,
            "opt_gradient_clip_norm": 0.3,
            "opt_adamw_weight_decay": 0.0001,
            "lora_alpha": 32,
            "lora_rank": 16,
        },
    ),
    "stable_diffusion": MadeBenchmark(
        ruleset="5.0.0",
        runs=10,
        progress="samples_count",
        every=512_000,
        first=300.0,
        target=90.0,
        keys={
            "global_batch_size": 1024,
            "opt_name": "adamw",
            "opt_adamw_beta_1": 0.9,
            "opt_adamw_beta_2": 0.999,
            "opt_adamw_epsilon": 1e-08,
            "opt_adamw_weight_decay": 0.01,
            "opt_base_learning_rate": 0.000128,
            "opt_learning_rate_warmup_steps": 1000,
        },
    ),
}


def write_log(path: Path, benchmark: str, seed: int, division: str = "closed") -> Path:
    """Write one run of a benchmark."""
    made = MADE[benchmark]
    chance = random.Random(f"{benchmark} {seed}")
    now = _BEGIN_MS + seed * _BETWEEN_RUNS_MS
    lines = []

    def log(key: str, value: object = None, after: float = 1, **metadata: object) -> None:
        nonlocal now
        now += round(after)
        kind = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}.get(key.rpartition("_")[2])
        event = {
            "namespace": "",
            "time_ms": now,
            "event_type": kind or "POINT_IN_TIME",
            "key": key,
            "value": value,
            "metadata": {"file": "/workspace/train.py", "lineno": len(key), **metadata},
        }
        lines.append(f":::MLLOG {json.dumps(event)}\n")

    log("cache_clear", True)
    log("init_start", None)
    log("submission_benchmark", benchmark)
    log("submission_org", TREE_OF)
    log("submission_division", division)
    log("submission_status", "research")
    log("submission_platform", SYSTEM)
    log("seed", chance.randrange(2**31))
    log("gradient_accumulation_steps", 1)
    for key, value in made.keys.items():
        log(key, value)
    log("train_samples", 1_281_167)
    log("eval_samples", 50_000)
    log("init_stop", None, 30_000)
    log("run_start", None)
    log("block_start", None, first_epoch_num=0, epoch_count=1, samples_count=0)
    quality = made.first
    done = 0
    while not _is_reached(made, quality) or done < 3 * made.every:
        done += made.every
        step = chance.uniform(0.2, 0.4) * (made.target - quality)
        quality = quality + step + (made.target - made.first) * chance.uniform(0.002, 0.004)
        at = {made.progress: done}
        log("eval_start", None, chance.uniform(95_000, 105_000), **at)
        log("eval_stop", None, chance.uniform(4000, 5000), **at)
        for value, metadata in _logged_qualities(benchmark, quality, chance):
            log("eval_accuracy", value, **at, **metadata)
    log("block_stop", None, first_epoch_num=0, samples_count=done)
    log("run_stop", None, status="success")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))
    return path


def _is_reached(made: MadeBenchmark, quality: float) -> bool:
    if made.first > made.target:
        return quality <= made.target
    return quality >= made.target


def _logged_qualities(
    benchmark: str, quality: float, chance: random.Random
) -> list[tuple[object, dict[str, str]]]:
    """Return what a benchmark logs at one evaluation: values and further metadata."""
    if benchmark == "maskrcnn":
        return [({"BBOX": quality, "SEGM": quality * 0.9}, {})]
    if benchmark == "stable_diffusion":
        clip = 0.16 - quality * chance.uniform(9e-5, 1e-4)
        return [(quality, {"metric": "FID"}), (clip + 0.01, {"metric": "CLIP"})]
    return [(quality, {})]


def write_logs(folder: Path, benchmark: str) -> list[Path]:
    """Write all runs of a result."""
    runs = range(MADE[benchmark].runs)
    return [write_log(folder / f"result_{run}.txt", benchmark, 1 + run) for run in runs]


def write_tree(tree: Path) -> Path:
    """Write a submitter's tree in which one system has a result of every made benchmark."""
    for benchmark in MADE:
        write_logs(tree / "results" / SYSTEM / benchmark, benchmark)
    described = describe_system(TREE_OF, "closed") | {"system_name": SYSTEM}
    write_description(tree / "systems" / f"{SYSTEM}.json", described)
    return tree

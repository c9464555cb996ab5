"""Logs and trees that our own logger wrote, for the official tools to judge."""

import random
import re
from collections.abc import Sequence
from pathlib import Path

from mlbert.host.system_description import describe_system, write_description
from mlbert.mlperf.mllog import MLPerfLogger, constants
from mlbert.mlperf.rules import eval_interval

ROOT = Path(__file__).resolve().parents[1]
GLOBAL_BATCH_SIZE = 448
# What another program than this code logs of its method: the reference's at 448 sequences a step.
METHOD = {
    "global_batch_size": GLOBAL_BATCH_SIZE,
    "gradient_accumulation_steps": 1,
    "opt_base_learning_rate": 4.25e-4,
    "opt_lamb_epsilon": 1e-6,
    "opt_epsilon": 1e-6,
    "opt_lamb_beta_1": 0.9,
    "opt_lamb_beta_2": 0.999,
    "opt_lamb_weight_decay_rate": 0.01,
    "opt_learning_rate_training_steps": 6700,
    "opt_learning_rate_warmup_steps": 0,
    "num_warmup_steps": 0,
    "start_warmup_step": 0,
}


def write_log(
    path: Path, *, seed: int = 1, division: str = "closed", accuracies: Sequence[float] = ()
) -> Path:
    """One run's log in the order of the rules, with evaluations on the closed division's grid.

    Accuracies (unless given), samples and times vary with the seed, as those of packed runs do.
    """
    chance = random.Random(seed)
    accuracies = accuracies or [
        *(0.5 + 0.01 * n + chance.uniform(0, 0.005) for n in range(15)),
        0.721,
    ]
    log = MLPerfLogger(path, 0, ROOT)
    log.event(constants.CACHE_CLEAR, True)
    log.start(constants.INIT_START)
    submission = {"benchmark": "bert", "org": "SomeOrg", "division": division, "status": "research"}
    for name, value in {**submission, "platform": "some machine"}.items():
        log.event(f"submission_{name}", value)
    for key, value in {"seed": seed, **METHOD}.items():
        log.event(key, value)
    log.end(constants.INIT_STOP)
    log.start(constants.RUN_START)
    log.start(constants.EPOCH_START, metadata={"epoch_num": 0})
    samples = 0
    for accuracy in accuracies:
        samples += eval_interval(GLOBAL_BATCH_SIZE) + chance.randrange(-20, 20)
        log.start(constants.EVAL_START, metadata={"epoch_num": samples})
        log.end(constants.EVAL_STOP, metadata={"epoch_num": samples})
        log.event(constants.EVAL_ACCURACY, accuracy, {"epoch_num": samples})
    log.end(constants.EPOCH_STOP, metadata={"epoch_num": samples})
    log.event(constants.TRAIN_SAMPLES, samples)
    log.event(constants.EVAL_SAMPLES, 10_000)
    log.run_stop("success")
    log.close()
    _set_times(path, seed, chance)
    return path


def _set_times(path: Path, seed: int, chance: random.Random) -> None:
    """Set times of consecutive runs in 2025: a minute for a training interval,
    a second for an evaluation.
    """
    now = 1_750_000_000_000 + seed * 10_000_000
    lines = []
    for line in path.read_text().splitlines(keepends=True):
        now += 1
        now += round(chance.uniform(55_000, 65_000)) if '"eval_start"' in line else 0
        now += round(chance.uniform(900, 1100)) if '"eval_stop"' in line else 0
        lines.append(re.sub(r'"time_ms": \d+', f'"time_ms": {now}', line))
    path.write_text("".join(lines))


def write_tree(tree: Path, division: str, num_logs: int = 10) -> Path:
    """Write a submission: system file and ten logs."""
    results = tree / "results" / "machine" / "bert"
    for index in range(num_logs):
        write_log(results / f"result_{index}.txt", seed=1000 + index**2, division=division)
    write_description(tree / "systems" / "machine.json", describe_system("SomeOrg", division))
    for folder in ("results", "systems"):
        (tree / folder / "README.md").write_text("what is here\n")
    (tree / "benchmarks/bert/implementations").mkdir(parents=True)
    return tree

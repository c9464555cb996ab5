"""The plan of a run: what --print-config prints besides the settings."""

import pytest

from mlbert.cli.bench import CONFIGS
from mlbert.config.shell import planned_world_size
from mlbert.programs.run_plan import make_plan, walltime_minutes
from simple_recipe import simple_configuration
from user_errors import user_error

JOB = {"DGXNNODES": "1", "DGXNGPU": "8", "NEXP": "10", "WALLTIME": "85"}
CLOSED = {
    "train_batch_size": 48,
    "gradient_accumulation_steps": 1,
    "warmup_steps": 0,
    "max_steps": 3680,
}
CLOSED |= {
    "num_eval_examples": 10_000,
    "eval_iter_start_samples": 150_000,
    "eval_iter_samples": 150_000,
}
CLOSED |= {
    "max_samples_termination": 4_500_000,
    "init_checkpoint": "a.safetensors",
    "submission_division": "closed",
}
# Single sequences, 16 on each of 1,024 ranks; the schedule ends before the training does.
LARGE_BATCH = CLOSED | {
    "train_batch_size": 16,
    "average_packing_rate": 1.0,
    "max_sequences_per_pack": 1,
}
LARGE_BATCH |= {
    "schedule": "linear",
    "lr_decay_end": 179,
    "max_steps": 299,
    "max_samples_termination": 5_000_000,
}
LARGE_BATCH |= {
    "eval_iter_start_samples": 325_000,
    "eval_iter_samples": 325_000,
    "submission_division": "open",
}
OWN_TARGET = CLOSED | {"target_mlm_accuracy": 0.3, "submission_division": "open"}
FREE = {
    "submission_division": "open",
    "init_checkpoint": None,
    "num_eval_examples": 10,
    "eval_iter_samples": 100_000,
}
LARGE_MODEL = LARGE_BATCH | {"bert_config_file": CONFIGS / "large.json"}
SHARDED = LARGE_MODEL | {"sharded_optimizer": "node", "weights_allgather": "bf16"}
SENT = "each rank sends and receives {} GB per step for 336,232,258 parameters"
NAME_DIFFERS = "but the settings are 1x8x48x1"


@pytest.mark.parametrize(
    ("settings", "ranks", "speed", "words"),
    [
        (CLOSED, 8, None, "global_batch_size 768 = BATCHSIZE 48 x 8 ranks x PACKING_FACTOR 2"),
        (
            CLOSED,
            8,
            None,
            "3680 steps of about 768 samples, no warm-up; training ends after 2,826,240 samples",
        ),
        (
            CLOSED,
            8,
            None,
            "between batch 448 and 4608: 2,443,934 samples on average, at least 2,306,738",
        ),
        (CLOSED, 8, None, "expected samples: 2,550,000, at evaluation 17"),
        (CLOSED, 8, None, "expected time: unknown"),
        (CLOSED, 1, None, "that of batch 448, the smallest"),
        (CLOSED, 48, None, "recorded at batch 4608"),
        (CLOSED, 400, None, "none at batch 38400"),
        (CLOSED, 8, 8500.0, "about 300 s per run at 8500 samples/s, 10 runs 50.0 minutes"),
        (OWN_TARGET, 8, None, "expected samples: unknown"),
        (OWN_TARGET, 8, 1000.0, "at most 2,826 s per run"),
        (
            LARGE_BATCH,
            1024,
            None,
            "schedule's end: 179 steps / 9 evaluations / about 2.93 M samples (2,932,736)",
        ),
        (
            LARGE_BATCH,
            1024,
            None,
            "expected samples: 2,925,000, at evaluation 9, the last before the schedule's end",
        ),
        (LARGE_BATCH, 1024, 131_000.0, "about 22 s per run"),
        (LARGE_BATCH | {"train_batch_size": 17}, 1024, None, "none at batch 17408"),
        (
            LARGE_BATCH | {"train_batch_size": 17},
            1024,
            None,
            "expected samples: 2,925,000, at evaluation 9",
        ),
        (LARGE_BATCH | {"lr_decay_end": 3}, 1068, None, "schedule's end: 3 steps / 0 evaluations"),
        (LARGE_BATCH | {"lr_decay_end": 3}, 1068, None, "expected samples: unknown"),
        (LARGE_MODEL, 1024, None, SENT.format("2.687")),
        # Of 1.345 GB: 7/8 scattered, 2 * 127/128 of an eighth summed, 7/8 of a half gathered.
        (SHARDED, 1024, None, SENT.format("2.099")),
        # 1023/1024 of it scattered, and of a quarter gathered.
        (
            SHARDED | {"sharded_optimizer": "all", "weights_allgather": "e5m2"},
            1024,
            None,
            SENT.format("1.680"),
        ),
        (LARGE_MODEL, 1, None, "communication: none, one rank"),
        (LARGE_BATCH, 1024, None, "communication: unknown; bert_config.json cannot be read"),
    ],
)
def test_lines(settings, ranks, speed, words):
    assert words in "\n".join(make_plan(simple_configuration(**settings), ranks, JOB, speed).lines)


@pytest.mark.parametrize(
    "changes",
    [
        {"lr_decay_end": None},
        {"lr_decay_end": 299},
        {"schedule": "constant"},
        {"lr_decay_end": 10_000},
    ],
)
def test_schedule_that_ends_with_the_training_or_never(changes):
    lines = make_plan(simple_configuration(**LARGE_BATCH | changes), 1024, JOB, None).lines
    assert "schedule's end" not in "\n".join(lines)


@pytest.mark.parametrize(
    ("changes", "ranks", "speed", "config", "words"),
    [
        ({}, 8, None, "x_y_1x8x48x1_pack", None),
        ({}, 8, 8500.0, "", None),
        (FREE, 8, None, "", None),
        (
            {},
            8,
            5000.0,
            "",
            "WALLTIME 85 (85 minutes) is too short: 10 runs of about 510 s take 85.0 minutes",
        ),
        ({"max_seconds": 600.0}, 8, None, "", "10 runs of MAX_SECONDS 600 take 100.0 minutes"),
        ({"start_warmup_step": -5}, 8, None, "", "START_WARMUP_STEP -5 has no effect"),
        ({"max_steps": 100}, 8, None, "", "before the first evaluation"),
        ({"max_steps": 2000}, 8, None, "", "the reference needs 2,443,934 on average"),
        ({"eval_iter_samples": 100_000}, 8, None, "", "EVAL_ITER_SAMPLES = 150000"),
        ({"num_eval_examples": 1000}, 8, None, "", "NUM_EVAL_EXAMPLES=10000"),
        ({"init_checkpoint": None}, 8, None, "", "reference checkpoint"),
        ({"synthetic_data": True}, 8, None, "", "SYNTH_DATA"),
        ({"eval_iter_samples": 500}, 8, None, "", "more than between two evaluations"),
        ({}, 400, None, "", "beyond the reference points"),
        ({}, 4, None, "", "the launcher started 4 ranks, DGXNNODES x DGXNGPU is 8"),
        ({}, 8, None, "x_1x8x56x1", NAME_DIFFERS),
        ({}, 8, None, "x_1x4x48x1_pack", NAME_DIFFERS),
    ],
)
def test_warnings(changes, ranks, speed, config, words):
    exports = JOB | ({"CONFIG_FILE": f"/a/config_{config}.sh"} if config else {})
    found = make_plan(simple_configuration(**CLOSED | changes), ranks, exports, speed).warnings
    assert not found if words is None else words in "\n".join(found)


def test_every_form_of_a_time_limit():
    limits = {
        "85": 85,
        "1:30": 1.5,
        "2:00:30": 120.5,
        "1-2": 1560,
        "1-2:3": 1563,
        "1-2:3:30": 1563.5,
    }
    assert {text: walltime_minutes(text) for text in limits} == limits
    for wrong in ("", "soon", "1:2:3:4", "-5", "1.5"):
        with user_error("config.value", "WALLTIME"):
            walltime_minutes(wrong)


@pytest.mark.parametrize("exports", [{}, {"DGXNNODES": "2"}, {"DGXNNODES": "two", "DGXNGPU": "8"}])
def test_no_config_no_planned_ranks(exports):
    assert planned_world_size(exports) is None

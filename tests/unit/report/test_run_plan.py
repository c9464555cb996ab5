"""The plan of a run: what --print-config prints besides the settings."""

import pytest

from mlbert.config.sections import Configuration
from mlbert.report.run_plan import bytes_a_step, make_plan, planned_world_size, walltime_minutes
from simple_recipe import simple_configuration
from user_errors import user_error

JOB = {"DGXNNODES": "1", "DGXNGPU": "8", "NEXP": "10", "WALLTIME": "85"}
CLOSED = {"train_batch_size": 48, "gradient_accumulation_steps": 1, "warmup_steps": 0, "max_steps": 3680}
CLOSED |= {"num_eval_examples": 10_000, "eval_iter_start_samples": 150_000, "eval_iter_samples": 150_000}
CLOSED |= {"max_samples_termination": 4_500_000, "init_checkpoint": "a.safetensors", "submission_division": "closed"}
# Single sequences, 16 on each of 1,024 ranks; the schedule ends before the training does.
LARGE_BATCH = CLOSED | {"train_batch_size": 16, "average_packing_rate": 1.0, "max_sequences_per_pack": 1}
LARGE_BATCH |= {"schedule": "linear", "lr_decay_end": 179, "max_steps": 299, "max_samples_termination": 5_000_000}
LARGE_BATCH |= {"eval_iter_start_samples": 325_000, "eval_iter_samples": 325_000, "submission_division": "open"}


def closed(**changes: object) -> Configuration:
    return simple_configuration(**{**CLOSED, **changes})


def large_batch(**changes: object) -> Configuration:
    return simple_configuration(**{**LARGE_BATCH, **changes})


def found(config: Configuration, ranks: int = 8, speed: float | None = None) -> str:
    return "\n".join(make_plan(config, ranks, JOB, speed).lines)


def warned(config: Configuration, ranks: int = 8, speed: float | None = None, **exports: str) -> str:
    return "\n".join(make_plan(config, ranks, JOB | exports, speed).warnings)


def test_numbers_of_the_published_single_node_config():
    text = found(closed())
    assert "global_batch_size 768 = BATCHSIZE 48 x 8 ranks x PACKING_FACTOR 2" in text
    assert "3680 steps of about 768 samples, no warm-up; training ends after 2,826,240 samples" in text
    assert "between batch 448 and 4608: 2,443,934 samples on average, at least 2,306,738" in text
    assert "expected samples: 2,550,000, at evaluation 17" in text
    assert "expected time: unknown" in text
    assert warned(closed()) == ""


@pytest.mark.parametrize(
    ("ranks", "words"),
    [(1, "that of batch 448, the smallest"), (48, "recorded at batch 4608"), (400, "none at batch 38400")],
)
def test_which_reference_point(ranks, words):
    assert words in found(closed(), ranks)


def test_time_only_where_a_speed_is_given():
    text = found(closed(), speed=8500.0)
    assert "about 300 s per run at 8500 samples/s, 10 runs 50.0 minutes" in text
    assert warned(closed(), speed=8500.0) == ""
    too_short = "WALLTIME 85 (85 minutes) is too short: 10 runs of about 510 s take 85.0 minutes"
    assert too_short in warned(closed(), speed=5000.0)
    own_target = closed(target_mlm_accuracy=0.3, submission_division="open")
    assert "expected samples: unknown" in found(own_target)
    assert "at most 2,826 s per run" in found(own_target, speed=1000.0)
    assert "10 runs of MAX_SECONDS 600 take 100.0 minutes" in warned(closed(max_seconds=600.0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"start_warmup_step": -5}, "START_WARMUP_STEP -5 has no effect"),
        ({"max_steps": 100}, "before the first evaluation"),
        ({"max_steps": 2000}, "the reference needs 2,443,934 on average"),
        ({"eval_iter_samples": 100_000}, "EVAL_ITER_SAMPLES = 150000"),
        ({"num_eval_examples": 1000}, "NUM_EVAL_EXAMPLES=10000"),
        ({"init_checkpoint": None}, "reference checkpoint"),
        ({"synthetic_data": True}, "SYNTH_DATA"),
        ({"eval_iter_samples": 500}, "more than between two evaluations"),
    ],
)
def test_warnings_about_settings(changes, words):
    assert words in warned(closed(**changes))


def test_warnings_about_ranks_and_the_name_of_the_config_and_none_in_the_open_division():
    assert "beyond the reference points" in warned(closed(), ranks=400)
    assert "the launcher started 4 ranks, DGXNNODES x DGXNGPU is 8" in warned(closed(), ranks=4)
    for name in ("1x8x56x1", "1x4x48x1_pack"):
        assert "but the settings are 1x8x48x1" in warned(closed(), CONFIG_FILE=f"/a/config_x_{name}.sh")
    assert warned(closed(), CONFIG_FILE="/a/config_x_y_1x8x48x1_pack.sh") == ""
    own = closed(submission_division="open", init_checkpoint=None, num_eval_examples=10, eval_iter_samples=100_000)
    assert warned(own) == ""


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("85", 85), ("1:30", 1.5), ("2:00:30", 120.5), ("1-2", 1560), ("1-2:3", 1563), ("1-2:3:30", 1563.5)],
)
def test_every_form_of_a_time_limit(text, minutes):
    assert walltime_minutes(text) == minutes


@pytest.mark.parametrize("text", ["", "soon", "1:2:3:4", "-5", "1.5"])
def test_no_time_limit(text):
    with user_error("config.value", "WALLTIME"):
        walltime_minutes(text)


@pytest.mark.parametrize("exports", [{}, {"DGXNNODES": "2"}, {"DGXNNODES": "two", "DGXNGPU": "8"}])
def test_no_config_no_planned_ranks(exports):
    assert planned_world_size(exports) is None


def test_schedule_that_ends_before_the_training():
    text = found(large_batch(), ranks=1024)
    assert "schedule's end: 179 steps / 9 evaluations / about 2.93 M samples (2,932,736)" in text
    assert "expected samples: 2,925,000, at evaluation 9, the last before the schedule's end" in text
    assert "about 22 s per run" in found(large_batch(), ranks=1024, speed=131_000.0)
    beyond = found(large_batch(train_batch_size=17), ranks=1024)
    assert "none at batch 17408" in beyond
    assert "expected samples: 2,925,000, at evaluation 9" in beyond
    before_any = found(large_batch(lr_decay_end=3), ranks=1068)
    assert "schedule's end: 3 steps / 0 evaluations" in before_any
    assert "expected samples: unknown" in before_any


@pytest.mark.parametrize(
    "changes", [{"lr_decay_end": None}, {"lr_decay_end": 299}, {"schedule": "constant"}, {"lr_decay_end": 10_000}]
)
def test_schedule_that_ends_with_the_training_or_never(changes):
    assert "schedule's end" not in found(large_batch(**changes), ranks=1024)


def moved(ranks: int, elements: int, sharers: int, itemsize: int) -> int:
    """Bytes that one rank sends when rings of ranks pass on a piece at a time, counted piece by piece."""

    def ring(size: int, length: int, times: int, of: int) -> int:
        return sum(length // size * of for _ in range(times) for _ in range(size - 1))

    scattered, gathered = ring(sharers, elements, 1, 4), ring(sharers, elements, 1, itemsize)
    return scattered + ring(ranks // sharers, elements // sharers, 2, 4) + gathered


@pytest.mark.parametrize(("ranks", "sharers"), [(2, 1), (16, 1), (16, 4), (16, 16), (12, 3)])
@pytest.mark.parametrize("itemsize", [4, 2, 1])
def test_bytes_are_those_of_rings(ranks, sharers, itemsize):
    elements = 240 * ranks
    assert bytes_a_step(elements, ranks, sharers, itemsize) == pytest.approx(moved(ranks, elements, sharers, itemsize))


def test_communication_is_reported(tree_root):
    shape = tree_root / "benchmarks/bert/implementations/pytorch/configs/large.json"
    config = large_batch(bert_config_file=shape)
    words = "each rank sends and receives {} GB per step for 336,232,258 parameters"
    assert words.format("2.687") in found(config, ranks=1024)
    sharded = large_batch(bert_config_file=shape, sharded_optimizer="node", weights_allgather="bf16")
    # Of 1.345 GB: 7/8 scattered, 2 * 127/128 of an eighth summed, 7/8 of a half gathered.
    assert words.format("2.099") in found(sharded, ranks=1024)
    assert "communication: none, one rank" in found(config, ranks=1)
    assert "communication: unknown; bert_config.json cannot be read" in found(large_batch(), ranks=1024)

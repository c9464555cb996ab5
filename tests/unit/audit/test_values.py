"""Values that a run cannot have had, or that the closed division does not allow:
each found, at its line.
"""

import json
from pathlib import Path

import pytest

from audit import ROOT, add_line, copy_of_ours, edit, expect, report, set_value
from logger_logs import write_log
from mlaudit.findings import Outcome
from mlaudit.logs import read_log
from mlaudit.result_set import ResultSet
from mlaudit.run_files import check_metrics
from mlbert.host.registry import Choice
from mlbert.optim.config import SCHEDULES
from programs import words_as_dict

# In any division: key, value, check, what it must say.
IMPOSSIBLE = [
    ("opt_base_learning_rate", "0", "values", "above 0"),
    ("opt_base_learning_rate", "17.5", "values", "at most 1"),
    ("opt_base_learning_rate", "NaN", "plain numbers", "nan is not a plain number"),
    ("opt_lamb_beta_1", "1", "values", "below 1"),
    ("opt_lamb_beta_2", "-0.1", "values", "at least 0"),
    ("opt_lamb_weight_decay_rate", "1.5", "values", "below 1"),
    ("opt_lamb_epsilon", "0", "values", "above 0"),
    ("opt_lamb_epsilon", "0.5", "values", "at most 0.001"),
    ("opt_epsilon", "1e-08", "values", "but opt_lamb_epsilon 1e-06"),
    ("global_batch_size", "0", "values", "at least 1"),
    ("global_batch_size", "448.5", "values", "not a whole number"),
    ("global_batch_size", "true", "plain numbers", "True is not a plain number"),
    ("global_batch_size", "4480000", "values", "at most 1e+06"),
    ("gradient_accumulation_steps", "0", "values", "at least 1"),
    ("opt_learning_rate_training_steps", "-1", "values", "at least 1"),
    ("opt_learning_rate_warmup_steps", "-5", "values", "at least 0"),
    (
        "num_warmup_steps",
        "50",
        "values",
        "num_warmup_steps is 50, but opt_learning_rate_warmup_steps",
    ),
    ("start_warmup_step", "10", "values", "the rate is negative before it"),
    ("start_warmup_step", "-1e12", "values", "further back than"),
    ("start_warmup_step", "-0.5", "values", "not a whole number"),
    ("start_warmup_step", '"zero"', "plain numbers", "'zero' is not a plain number"),
    ("train_samples", "0", "values", "at least 1"),
    ("submission_benchmark", '"resnet"', "rules", "is 'resnet', not 'bert'"),
]


# In the closed division, too.
CLOSED = [
    ("gradient_accumulation_steps", "3", "values", "cannot be 3 equal parts"),
    ("opt_learning_rate_training_steps", "670", "values", "but training went on to 2"),
    ("eval_samples", "20000", "rules", "closed requires 10000"),
    ("cache_clear", "false", "rules", "cache_clear is false"),
    ("cache_clear", '"False"', "rules", "cache_clear is false"),
    ("cache_clear", "0", "rules", "cache_clear is 0"),
    ("opt_base_learning_rate", "1e-11", "values", "below 1e-07 nothing is learned"),
    ("opt_base_learning_rate", "0.96", "rules", "nothing is learned above 0.1"),
]
METHOD = [
    ("opt_name", '"adamw"', "closed requires LAMB"),
    ("opt_adamw_beta_1", "0.9", "which LAMB does not have"),
    ("opt_gradient_clip_norm", "2.0", "closed requires 1"),
    ("opt_learning_rate_decay_schedule", '"cosine"', "closed requires polynomial decay"),
    ("opt_learning_rate_decay_schedule", '"invented"', "closed requires polynomial decay"),
    ("opt_muon_momentum", "0.9", "which LAMB does not have"),
    ("target_accuracy", "0.5", "closed requires 0.72"),
    ("num_hidden_layers", "12", "closed requires 24"),
    ("precision", '"nvfp4"', "a number format that v5.0 does not approve"),
    ("starting_weights", '"none"', "closed starts from the reference's checkpoint"),
]

# Keys of this code's log that must have the value of one setting, and that setting.
SETTING_OF = words_as_dict("""
    opt_base_learning_rate=LR
    opt_lamb_beta_1=OPT_LAMB_BETA_1
    opt_lamb_weight_decay_rate=WEIGHT_DECAY_RATE
    opt_gradient_clip_norm=MAX_GRAD_NORM
    opt_name=OPTIMIZER
    opt_learning_rate_decay_schedule=SCHEDULE
    opt_learning_rate_training_steps=MAX_STEPS
    opt_lamb_learning_rate_decay_poly_power=LR_POLY_POWER
    gradient_accumulation_steps=GRADIENT_STEPS
    max_steps=MAX_STEPS
    target_accuracy=TARGET_MLM_ACCURACY
    evaluation_size=NUM_EVAL_EXAMPLES
    evaluation_interval_samples=EVAL_ITER_SAMPLES
    experiment=EXPERIMENT
    submission_org=MLPERF_SUBMISSION_ORG
    submission_platform=MLPERF_SUBMISSION_PLATFORM
    submission_division=MLPERF_DIVISION
""")
# Key, value, what it must say.
NOT_AS_SET = [
    *(
        (key, '"other"', f"{key} is 'other', its configuration says {env} = ")
        for key, env in SETTING_OF.items()
    ),
    ("global_batch_size", "68", "BATCHSIZE 32 x 1 ranks x PACKING_FACTOR 1.05 is 34"),
    ("recipe", '"ddp_adam"', "RECIPE = 'packed_lamb'"),
    (
        "model_shape",
        '"benchmarks/bert/implementations/pytorch/configs/base.json"',
        "BERT_CONFIG = ",
    ),
    ("eval_samples", "10000", "NUM_EVAL_EXAMPLES = 2000"),
    ("cache_clear", "false", "CACHES_CLEARED = True"),
    ("ranks", "2", "config_cpu_1x1x32x1_demo.sh is for 1 x 1"),
    ("ranks", '"1"', "is '1', not a count"),
    ("num_warmup_steps", "50", "WARMUP_STEPS = 100"),
    ("opt_learning_rate_warmup_steps", "50", "WARMUP_STEPS = 100"),
    ("train_data", '"synthetic"', "SYNTH_DATA = False"),
    ("steps", "5000", "MAX_STEPS = 4300"),
    ("steps", "100", "100 steps of 32 packs of 1 to 3 sequences cannot be 100016 train_samples"),
]


@pytest.mark.parametrize("program", ["log", "ours"])
@pytest.mark.parametrize(
    ("key", "value", "check", "words"), IMPOSSIBLE, ids=lambda part: str(part)[:40]
)
def test_impossible_values_are_found_at_their_line(
    program, key, value, check, words, request
) -> None:
    path = request.getfixturevalue(program)
    number = set_value(path, key, value)
    expect(report([path]), check, Outcome.ERROR, f"result_0.txt: line {number}: {key}", words)


@pytest.mark.parametrize(
    ("key", "value", "check", "words"), CLOSED, ids=[case[0] for case in CLOSED]
)
def test_the_closed_division_limits_values(key, value, check, words, log) -> None:
    number = set_value(log, key, value)
    expect(report([log]), check, Outcome.ERROR, f"result_0.txt: line {number}: ", words)


@pytest.mark.parametrize(("key", "value", "words"), METHOD, ids=[case[0] for case in METHOD])
def test_another_method_is_for_the_open_division(key, value, words, log) -> None:
    number = add_line(log, "opt_lamb_beta_2", key, value)
    expect(report([log]), "rules", Outcome.ERROR, f"result_0.txt: line {number}: {key} is", words)
    assert "rules" not in report([log], division="open")


def test_closed_allows_only_what_its_rules_name(ours: Path, monkeypatch) -> None:
    """A new or unknown schedule is refused too."""
    monkeypatch.setitem(SCHEDULES, "new", Choice("mlbert.optim.schedules:Schedule"))
    key = "opt_learning_rate_decay_schedule"
    assert "rules" not in report([ours], division="closed")
    others = [name for name in (*SCHEDULES, "invented") if name != "polynomial"]
    assert "new" in others
    for name in others:
        number = set_value(ours, key, f'"{name}"')
        words = f"line {number}: {key} is '{name}', closed requires polynomial decay"
        expect(report([ours], division="closed"), "rules", Outcome.ERROR, words)


def test_the_closed_method_may_be_logged(log: Path) -> None:
    for key, value in (
        ("opt_name", '"LAMB"'),
        ("opt_gradient_clip_norm", "1"),
        ("max_sequence_length", "512"),
    ):
        add_line(log, "opt_lamb_beta_2", key, value)
    assert "rules" not in report([log])


def test_a_ramp_longer_than_the_training(log: Path) -> None:
    for key in ("num_warmup_steps", "opt_learning_rate_warmup_steps"):
        number = set_value(log, key, "7000")
    words = f"line {number}: opt_learning_rate_warmup_steps is 7000, longer than the 6700 steps"
    assert words in report([log])["values"][1]
    set_value(log, "start_warmup_step", "-200000.0")  # as NVIDIA logs it, in samples
    assert "values" not in report([log])


def test_caches_are_cleared_before_the_run(log: Path, ours: Path) -> None:
    line = next(line for line in log.read_text().splitlines() if '"cache_clear"' in line)
    edit(log, "cache_clear", ".*\n", "")
    number = edit(log, "run_start", "(.*\n)", rf"\1{line}\n") + 1
    assert (
        f"result_0.txt: line {number}: cache_clear comes after run_start"
        in report([log])["rules"][1]
    )
    edit(ours, "cache_clear", ".*\n", "")
    assert report([ours])["rules"][0] is Outcome.ERROR
    assert "result_0.txt: cache_clear is missing" in report([ours])["rules"][1]


def test_whole_steps_may_be_floats_and_numbers_text(log: Path) -> None:
    for key, value in (
        ("opt_learning_rate_training_steps", "6700.0"),
        ("start_warmup_step", "0.0"),
    ):
        set_value(log, key, value)
    assert "values" not in report([log])
    number = set_value(log, "opt_lamb_weight_decay_rate", '"0.01"')
    words = f"result_0.txt: line {number}: opt_lamb_weight_decay_rate '0.01' is not a plain number"
    expect(report([log]), "plain numbers", Outcome.WARN, words)


@pytest.mark.parametrize(
    ("key", "line"), [("cache_clear", "value"), ("run_stop", "status"), ("seed", "key")]
)
def test_a_name_twice_in_a_line(key: str, line: str, log: Path) -> None:
    number = edit(log, key, f'"{line}": ', f'"{line}": "x", "{line}": ')
    words = f"result_0.txt: line {number}: ValueError the name '{line}' is given twice"
    expect(report([log]), "lines", Outcome.ERROR, words)


def move(path: Path, key: str, milliseconds: int) -> int:
    return edit(
        path, key, r'"time_ms": (\d+)', lambda report: f'"time_ms": {int(report[1]) + milliseconds}'
    )


@pytest.mark.parametrize("is_own", [True, False], ids=["ours", "others"])
def test_caches_fill_again(is_own: bool, tmp_path: Path) -> None:
    logs = (
        copy_of_ours(tmp_path, 3)
        if is_own
        else [write_log(tmp_path / f"result_{n}.txt", seed=n) for n in range(3)]
    )
    assert "rules" not in report(logs)
    outcome = Outcome.ERROR if is_own else Outcome.WARN
    line = f"result_1.txt: line {move(logs[1], 'cache_clear', -700_000)}: cache_clear comes"
    expect(report(logs[1:2]), "rules", outcome, f"{line} 700")
    move(logs[1], "cache_clear", -(10**10))
    expect(report(logs[:2]), "rules", outcome, f"{line} before the run_stop of result_0.txt (line ")


def test_caches_of_one_run_left_open(tmp_path: Path) -> None:
    logs = [write_log(tmp_path / f"result_{n}.txt", seed=n) for n in range(3)]
    number = set_value(logs[1], "cache_clear", "null")
    expect(
        report(logs),
        "rules",
        Outcome.WARN,
        f"result_1.txt: line {number}: cache_clear is null, in other logs true",
    )


def test_a_key_logged_twice(log: Path, ours: Path) -> None:
    number = add_line(log, "opt_lamb_beta_2", "opt_lamb_beta_2", "")
    words = f"result_0.txt: line {number}: opt_lamb_beta_2 0.999 is said again, line {number - 1}"
    expect(report([log]), "single lines", Outcome.NOTE, words)
    lines = log.read_text().splitlines(keepends=True)
    lines[number - 1] = lines[number - 1].replace("0.999", "0.99")
    log.write_text("".join(lines))
    assert report([log])["single lines"][0] is Outcome.ERROR
    add_line(ours, "opt_lamb_beta_2", "opt_lamb_beta_2", "")
    assert report([ours])["single lines"][0] is Outcome.ERROR


@pytest.mark.parametrize(
    ("name", "value", "outcome", "words"),
    [
        (
            "WARMUP_PROPORTION",
            "0.1",
            Outcome.ERROR,
            "says WARMUP_PROPORTION = 0.1 of MAX_STEPS = 4300",
        ),
        ("BATCHSIZE", "64", Outcome.ERROR, "BATCHSIZE is 64, but benchmarks/"),
        ("GRADIENT_STEPS", "3", Outcome.ERROR, "BATCHSIZE 32 cannot be 3 equal micro-batches"),
        (
            "RESUME",
            "true",
            Outcome.NOTE,
            "its configuration says RESUME = True, but no checkpoint was found: started at step 0",
        ),
    ],
)
def test_a_setting_is_that_of_its_keys(
    name: str, value: str, outcome: Outcome, words: str, ours: Path
) -> None:
    edit(ours, "configuration", rf'("{name}": {{"value": )[^,]*', rf"\g<1>{value}")
    expect(report([ours]), "configuration", outcome, "result_0.txt: line ", words)


@pytest.mark.parametrize(("key", "value", "words"), NOT_AS_SET, ids=lambda part: str(part)[:40])
def test_a_value_is_that_of_its_setting(key: str, value: str, words: str, ours: Path) -> None:
    is_logged = f'"key": "{key}"' in ours.read_text()
    number = (
        set_value(ours, key, value) if is_logged else add_line(ours, "eval_samples", key, value)
    )
    expect(report([ours]), "configuration", Outcome.ERROR, f"result_0.txt: line {number}: ", words)


def test_a_synthetic_set_may_be_smaller_than_asked_for(ours: Path) -> None:
    set_value(ours, "eval_samples", "8")
    words = "eval_samples is 8, its configuration says NUM_EVAL_EXAMPLES = 2000"
    expect(report([ours]), "configuration", Outcome.ERROR, words)
    set_value(ours, "eval_data", json.dumps(read_log(ours).value("train_data")))
    expect(
        report([ours]),
        "configuration",
        Outcome.ERROR,
        "eval_data is train_data, so nothing was held out",
    )
    for key in ("train_data", "eval_data"):
        set_value(ours, key, '"synthetic"')
    edit(ours, "configuration", '("SYNTH_DATA": {"value": )false', r"\g<1>true")
    assert "configuration" not in report([ours])


def test_the_last_batch_of_a_classifiers_epoch_may_be_smaller(ours: Path) -> None:
    add_line(ours, "eval_samples", "steps", "4000")
    expect(
        report([ours]), "configuration", Outcome.ERROR, "4000 steps of 32 packs of 1 to 3 sequences"
    )
    for key in ("recipe", "configuration"):
        edit(ours, key, '"packed_lamb"', '"classification"')
    assert "configuration" not in report([ours])


def test_tokens_are_those_of_the_sequences(ours: Path) -> None:
    for key, value in (("steps", "3000"), ("max_sequence_length", "64")):
        add_line(ours, "eval_samples", key, value)
    assert "configuration" not in report([ours])
    add_line(ours, "eval_samples", "tokens", "100015")
    add_line(ours, "eval_samples", "skipped_steps", "5000")
    expect(
        report([ours]),
        "configuration",
        Outcome.ERROR,
        "tokens is 100015, of 100016 sequences of at most 64",
        "skipped_steps is 5000, of 3000 steps",
    )


def test_a_closed_target_and_a_configuration_of_another_form(ours: Path) -> None:
    assert "closed requires 0.72" in report([ours], division="closed")["accuracies"][1]
    edit(ours, "configuration", r'"value": \{.*\}, "metadata"', '"value": {"LR": 1}, "metadata"')
    assert "not a mapping of settings" in report([ours])["configuration"][1]


def test_all_committed_results_agree_with_themselves() -> None:
    for folder in sorted(ROOT.glob("results/*/bert")):
        paths = sorted(folder.glob("result_*.txt"))
        assert {check: said for check, said in report(paths).items() if said[0] == "ERROR"} == {}, (
            folder
        )
        metrics = check_metrics(ResultSet([read_log(path) for path in paths]))
        assert [found for found in metrics if found.outcome is Outcome.ERROR] == []

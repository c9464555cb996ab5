"""The published flags: both commands of the published README, their settings here,
and invalid values.
"""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("absl", reason="TensorFlow is not installed (the tf extra)")

from absl import app as _  # noqa: F401 - defines --verbosity
from absl import flags as absl_flags
from absl.testing import flagsaver

from mlbert.config.resolution import Resolved
from mlbert.recipes.sections import settings_by_key
from programs import words_as_dict
from tf2_bert import flags
from tf2_bert.main import exit_status
from user_errors import user_error

GPU = """
--all_reduce_alg=nccl --bert_config_file=/data/bert_config.json --beta_1=0.91063 --beta_2=0.96497
--device_warmup --do_eval --dtype=fp16 --eval_batch_size=48 --init_checkpoint=/data/model.ckpt-28252
--input_files=/data/parts/part-* --learning_rate=0.00035221 --loss_scale=dynamic
--max_predictions_per_seq=76 --max_seq_length=512 --model_dir=/output/benchmark_8_gpu
--num_accumulation_steps=19 --num_gpus=8 --num_steps_per_epoch=8000 --num_train_epochs=1
--optimizer_type=lamb --scale_loss --steps_before_eval_start=3948 --steps_between_eval=658
--steps_per_loop=658 --stop_steps=8000 --train_batch_size=760 --verbosity=0 --warmup_steps=420
"""
TPU = """
--bert_config_file=/data/bert_config.json --beta_1=0.9 --beta_2=0.93721 --device_warmup
--distribution_strategy=tpu --do_eval --dtype=bf16 --eval_batch_size=768
--init_checkpoint=/data/model.ckpt-28252 --input_files=/data/parts/part-* --learning_rate=0.00047430
--max_predictions_per_seq=76 --max_seq_length=512 --model_dir=/output/benchmark_4x4_tpu
--num_steps_per_epoch=5210 --num_train_epochs=1 --optimizer_type=lamb --scale_loss
--steps_before_eval_start=3907 --steps_between_eval=652 --steps_per_loop=652 --stop_steps=5210
--tpu=perfzero-tpu --train_batch_size=768 --verbosity=0 --weight_decay_rate=0.0049573
--warmup_steps=108
"""
MINIMAL = "--bert_config_file=/data/bert_config.json --input_files=/data/part-* --model_dir=/output"
PACKED = "--max_sequences_per_pack=3 --average_packing_rate=2 --train_batch_size=16 --stop_steps=20"
Resolve = Callable[..., Resolved]
# Replicas, command line, and settings that follow.
SETTINGS = {
    "published GPU command": (
        8,
        GPU,
        # The first evaluation is at the first multiple of 658 that is not before 3948:
        # step 3948 itself.
        f"""train_batch_size=95 gradient_accumulation_steps=19 eval_batch_size=6 max_steps=8000
        lr_decay_end=8000 warmup_steps=420 eval_iter_start_samples={3948 * 760}
        eval_iter_samples={658 * 760} optimizer=lamb precision=fp16 loss_scale=32768.0
        loss_scale_fixed=False opt_lamb_beta_1=0.91063 opt_lamb_beta_2=0.96497
        target_mlm_accuracy=0.712 input_files=/data/parts/part-* input_dir=/data/parts""",
    ),
    "published TPU command": (
        32,
        TPU,
        # Step 3907 is not a multiple of 652.
        f"""train_batch_size=24 eval_batch_size=24 tpu=perfzero-tpu distribution_strategy=tpu
        precision=bf16 eval_iter_start_samples={6 * 652 * 768} eval_iter_samples={652 * 768}
        weight_decay_rate=0.0049573""",
    ),
    "published defaults": (
        1,
        MINIMAL,
        # Without evaluation, reaching the limit is a success.
        """train_batch_size=32 learning_rate=5e-05 warmup_steps=10000 max_steps=3000 optimizer=adamw
        opt_epsilon=1e-06 max_seq_length=128 do_eval=False target_mlm_accuracy=None
        save_checkpoint_steps=0 tensorboard_dir=None""",
    ),
    "packed steps count sequences": (
        2,
        f"{MINIMAL} {PACKED} --steps_between_eval=4",
        # Packs that are fuller than the nominal rate do not end the run early.
        f"eval_iter_start_samples={4 * 32} eval_iter_samples={4 * 32} "
        f"max_samples_termination={2 * 20 * 32}",
    ),
    "MLPerf's evaluation schedule": (
        8,
        f"{GPU} --eval_schedule=mlperf".replace("760", "440").replace("=19", "=11"),
        "eval_iter_start_samples=150000 eval_iter_samples=150000",
    ),
    "fixed loss scale": (
        1,
        f"{MINIMAL} --dtype=fp16 --loss_scale=128",
        "loss_scale=128.0 loss_scale_fixed=True",
    ),
    "checkpoints and summaries": (
        1,
        f"{MINIMAL} --enable_checkpoint_and_summary --steps_per_loop=50",
        "save_checkpoint_steps=50 tensorboard_dir=/output/summaries",
    ),
}


def values(resolved: Resolved, *keys: str) -> tuple[object, ...]:
    return tuple(resolved.config.get(settings_by_key()[key]) for key in keys)


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """Return a function that resolves a command line for a number of replicas,
    with only these exports.
    """
    flags.define_flags()

    def of(line: str, replicas: int = 1, **exports: str) -> Resolved:
        for name in ("CONFIG_FILE", "LOGDIR", "DGXNGPU"):
            monkeypatch.delenv(name, raising=False)
        for name, value in exports.items():
            monkeypatch.setenv(name, value)
        with flagsaver.flagsaver():
            absl_flags.FLAGS.unparse_flags()
            absl_flags.FLAGS(["run_pretraining.py", *line.split()])
            return flags.resolve_flags(replicas)

    return of


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_follow_from_the_command_line(resolved: Resolve, case: str) -> None:
    replicas, line, settings = SETTINGS[case]
    found = resolved(line, replicas)
    expected = words_as_dict(settings)
    assert dict(zip(expected, map(str, values(found, *expected)), strict=True)) == expected
    assert found.origin["learning_rate"].endswith("--learning_rate")


def test_sourced_config_replaces_defaults_and_flags_override_it(resolved: Resolve) -> None:
    exports = {
        "CONFIG_FILE": "/system/config_x.sh",
        "BATCHSIZE": "8",
        "LR": "0.5",
        "MAX_STEPS": "77",
    }
    exports |= {
        "MAX_SAMPLES_TERMINATION": "1000",
        "EVAL_ITER_START_SAMPLES": "100",
        "EVAL_ITER_SAMPLES": "50",
    }
    found = resolved(f"{MINIMAL} --train_batch_size=64", replicas=4, **exports)
    assert values(found, "train_batch_size", "learning_rate", "max_steps") == (16, 0.5, 77)
    assert found.origin["train_batch_size"] == "flag --train_batch_size"
    assert values(found, "optimizer", "target_mlm_accuracy") == ("adamw", 0.712)


def test_our_settings_override_published_defaults(resolved: Resolve) -> None:
    found = resolved(
        f"{MINIMAL} --max_steps=7",
        EVAL_ITER_SAMPLES="50",
        MAX_SAMPLES_TERMINATION="99",
        BATCHSIZE="6",
    )
    assert values(found, "max_steps", "eval_iter_samples", "max_samples_termination") == (7, 50, 99)
    assert values(found, "train_batch_size", "lr_decay_end") == (6, 3000)
    found = resolved(f"{MINIMAL} --num_train_epochs=2", MAX_STEPS="7")
    assert (*values(found, "max_steps"), found.origin["max_steps"]) == (
        2000,
        "flag --num_train_epochs",
    )


@pytest.mark.parametrize("name", ["BATCHSIZE", "STEPS_PER_LOOP"])
def test_non_numeric_export_is_an_error(resolved: Resolve, name: str) -> None:
    exports = {name: "many"}
    with user_error("config.value", name):
        resolved(f"{MINIMAL} --enable_checkpoint_and_summary", **exports)


@pytest.mark.parametrize(
    ("words", "code", "subject"),
    [
        ("--train_batch_size=33", "config.conflict", "--train_batch_size"),  # over 2 replicas
        ("--train_batch_size=0", "config.conflict", "--train_batch_size"),
        ("--train_batch_size=1000000000000", "config.range", "--train_batch_size"),
        ("--num_accumulation_steps=3", "config.conflict", "GRADIENT_STEPS"),
        ("--use_keras_compile_fit", "config.unsupported", "--use_keras_compile_fit=True"),
        ("--model_type=albert", "config.unsupported", "--model_type=albert"),
        ("--stop_steps=4000", "config.range", "--stop_steps"),
        ("--steps_between_eval=0", "config.range", "--steps_between_eval"),
        ("--learning_rate=-1", "config.range", "LR (flag --learning_rate)"),
        ("--beta_1=1.5", "config.range", "OPT_LAMB_BETA_1 (flag --beta_1)"),
        ("--dtype=fp64", "config.choice", "PRECISION (flag --dtype)"),
        (
            "--distribution_strategy=x",
            "config.choice",
            "DISTRIBUTION_STRATEGY (flag --distribution_strategy)",
        ),
        ("--loss_scale=big", "config.value", "LOSS_SCALE (flag --loss_scale)"),
        ("--warmup_steps=0.5", "config.value", "WARMUP_STEPS (flag --warmup_steps)"),
        ("--warmup_steps=inf", "config.value", "WARMUP_STEPS (flag --warmup_steps)"),
        ("--num_steps_per_epoch=-1", "config.range", "--num_steps_per_epoch"),
        ("--steps_before_eval_start=-5", "config.range", "--steps_before_eval_start"),
        ("--max_seq_length=100000", "config.range", "MAX_SEQ_LENGTH (flag --max_seq_length)"),
    ],
)
def test_invalid_flag_is_an_error(resolved: Resolve, words: str, code: str, subject: str) -> None:
    with user_error(code, subject):
        resolved(f"{MINIMAL} {words}", replicas=2)


def test_full_disk_is_a_one_line_error(capsys: pytest.CaptureFixture) -> None:
    def work() -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "/results/curve.png")

    assert exit_status(work) == 2
    problem = (
        "cannot be written (No space left on device). Free space or change LOGDIR. "
        "[file.unwritable]"
    )
    assert capsys.readouterr().err == f"mlbert: error: /results/curve.png: {problem}\n"


def test_config_with_a_setting_of_the_other_framework_is_an_error(
    resolved: Resolve, tmp_path: Path
) -> None:
    config = tmp_path / "config_x.sh"
    for name, value in {"SHARDED_OPTIMIZER": "node", "TASK": "mnli"}.items():
        config.write_text(f"export {name}={value}\n")
        exports = {"CONFIG_FILE": str(config), name: value}
        with user_error("config.not-read", f"{name} ({config}:1)"):
            resolved(MINIMAL, **exports)


def test_exported_setting_of_the_other_framework_is_a_warning(resolved: Resolve) -> None:
    found = resolved(
        MINIMAL, SHARDED_OPTIMIZER="node", TASK="mnli", OPS="auto", OPTIMIZER_IMPLEMENTATION="ops"
    )
    unread = [
        warning for warning in found.warnings if "is not read by RECIPE=tensorflow2" in warning
    ]
    assert [warning.split()[0] for warning in unread] == ["SHARDED_OPTIMIZER", "TASK"]
    assert values(found, "sharded_optimizer", "task", "optimizer_implementation") == (
        "off",
        None,
        "plain",
    )
    for flag in ("sharded_optimizer", "task", "ops"):
        assert flag not in absl_flags.FLAGS

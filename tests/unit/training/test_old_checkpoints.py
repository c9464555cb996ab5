"""Resume a checkpoint of the code that had one flat class of settings."""

import shutil
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file

from mlbert.config.resolution import Resolved, resolve
from mlbert.distributed.world import World
from mlbert.recipes import packed_lamb
from mlbert.training.experiment import run_experiment
from programs import words_as_dict
from user_errors import user_error

ASSET = Path(__file__).resolve().parents[2] / "assets/checkpoints/flat_settings"
# Of the run that wrote the checkpoint at step 4 of 8; its commit is c7c9f6d.
SETTINGS = words_as_dict(f"""
    BERT_CONFIG={ASSET / "shape.json"} DATADIR_PHASE2=/none EVALDIR=/none SYNTH_DATA=1
    BATCHSIZE=4 PACKING_FACTOR=1 LR=0.01 MAX_STEPS=8 MAX_SAMPLES_TERMINATION=10000
    OPT_LAMB_BETA_1=0.9 OPT_LAMB_BETA_2=0.98 WEIGHT_DECAY_RATE=0.01
    EVAL_ITER_START_SAMPLES=8 EVAL_ITER_SAMPLES=1000 NUM_EVAL_EXAMPLES=4 EVAL_BATCH_SIZE=4 TARGET_MLM_ACCURACY=none
    MLPERF_SUBMISSION_ORG=x MLPERF_SUBMISSION_PLATFORM=x MLPERF_DIVISION=open
    SEED=3 OPS=plain PRECISION=fp32 CPU_THREADS=1
""")


def settings(folder: Path, **changes: str) -> Resolved:
    return resolve(packed_lamb.RECIPE, {**SETTINGS, "LOGDIR": str(folder), **changes})


def test_the_resumed_run_ends_as_the_whole_one_and_has_its_settings(tmp_path):
    """Within rounding: the first four steps ran on another processor."""
    console = Console(quiet=True)
    whole, resumed = tmp_path / "whole", tmp_path
    shutil.copytree(ASSET / "step_00000004", resumed / "run_0/checkpoints/step_00000004")
    with user_error("run.other-settings", "step_00000004"):
        run_experiment(settings(resumed, RESUME="1", OPT_LAMB_BETA_1="0.8"), World(), console)
    assert run_experiment(settings(whole), World(), console).state.step == 8
    assert run_experiment(settings(resumed, RESUME="1"), World(), console).state.step == 8
    expected, found = (load_file(folder / "run_0/weights/model.safetensors") for folder in (whole, resumed))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.numpy() == pytest.approx(expected[name].numpy(), abs=1e-5), name
    assert '"resumed_from_step", "value": 4' in (resumed / "result_0.txt").read_text()

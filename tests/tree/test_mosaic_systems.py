"""MosaicML's systems: the published commands, run on a tiny model, and the published numbers."""

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mlaudit import official
from mlaudit.findings import Outcome
from mlaudit.logs import read_log
from mlbert.config.arguments import CommandLine
from mlbert.optim import schedules
from mlbert.optim.config import ScheduleConfig
from mlbert.recipes import masked_lm_stored
from mlbert.recipes.sections import resolve
from programs import assert_refused, run_script, words_as_dict, write_program
from published_systems import HOME, System, write_inputs
from same_weights import assert_same_tensors

# System -> implementation of the model.
CONFIGS = {"baseline": "huggingface", "methods": "mlbert"}
# Exports of a run that takes seconds.
MOSAIC = words_as_dict("""
    LR=0.1 MAX_SEQ_LENGTH=32 BATCHSIZE=8 MAX_STEPS=12 WARMUP_STEPS=0 LR_MILESTONES=8,10
    TARGET_MLM_ACCURACY=0.9 NUM_EVAL_EXAMPLES=64 EVAL_ITER_START_SAMPLES=32 EVAL_ITER_SAMPLES=32
    EVAL_BATCH_SIZE=8 PRECISION=fp32 CPU_THREADS=1 LOG_FREQ=1 CLEAR_CACHES=0 NEXP=1
""")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published inputs")
    write_inputs(folder)
    return folder


@pytest.fixture
def tree(tmp_path: Path, tree_root: Path, inputs: Path) -> System:
    system = System(
        tmp_path, tree_root, "composer", *(f"8xA100_80GB-{config}" for config in CONFIGS)
    )
    system.exports |= {
        "DATADIR_PHASE2": inputs / "mds/train",
        "EVALDIR": inputs / "mds/eval",
        "BERT_CONFIG": inputs / "own/bert_config.json",
        "PYTHON": sys.executable,
    }
    return system


@pytest.mark.parametrize("config", CONFIGS)
def test_mosaic_schedules_have_the_published_rates(config: str, tree_root: Path) -> None:
    path = tree_root / HOME / f"8xA100_80GB-{config}/config.yaml"
    site = {
        "DATADIR_PHASE2": "/x",
        "EVALDIR": "/y",
        "LOGDIR": "/z",
        "MLPERF_SUBMISSION_ORG": "o",
        "BERT_CONFIG": "b",
    }
    found = resolve(masked_lm_stored.RECIPE, site, CommandLine(yaml_files=[path])).config
    schedule = schedules.make(found[ScheduleConfig])
    assert [schedule(n) for n in (0, 1, 2, 41, 81)] == pytest.approx(
        [0, 0, 1e-4 / 80, 1e-4 / 2, 1e-4]
    )
    assert [schedule(n) for n in (400, 401, 601)] == pytest.approx([1e-4, 0.9e-4, 0.81e-4])
    assert schedule(1601) == schedule(5999) == pytest.approx(1e-4 * 0.9**20)


@pytest.mark.parametrize("name", CONFIGS)
def test_converted_weights_equal_the_checkpoint(name, tree_root, inputs, tmp_path, capsys) -> None:
    script = tree_root / HOME / f"composer/scripts/convert_ckpt_{name}.py"
    checkpoint = inputs / "phase1/model.ckpt-28252.pt"
    made = tmp_path / "made"
    assert run_script(script, "--pt_checkpoint", checkpoint, "--save_checkpoint", made) == 0
    expected = load_file(inputs / "own/model.safetensors")
    assert_same_tensors(load_file(made / "model.safetensors"), expected)
    capsys.readouterr()
    assert run_script(script) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("config", "ranks", "runs"), [("methods", 1, 2), ("baseline", 2, 1)])
def test_runs_are_collected_as_results(
    config, ranks, runs, tree: System, inputs, quickstart_python
) -> None:
    command = ["./run_and_time.sh", "--config", config, "-o", tree.root / "out dir", "-s", 70, "-t"]
    exports = {
        **MOSAIC,
        "INIT_CHECKPOINT": inputs / "own",
        "DGXNGPU": ranks,
        "NEXP": runs,
        "BATCHSIZE": 8 // ranks,
    }
    if config == "methods":  # baseline needs transformers
        exports["PYTHON"] = quickstart_python
    done = tree.run(*command, "T1", **exports)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    folder = tree.root / f"out dir/results/8xA100_80GB-{config}/bert"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"result_{i}.txt" for i in range(runs)
    ]
    logs = [read_log(folder / f"result_{i}.txt") for i in range(runs)]
    for index, log in enumerate(logs):
        (compliance, *_) = official.run(official.compliance_checker(log.path, log.path.name))
        assert compliance.outcome is Outcome.PASS
        assert log.status == "success"
        assert log.value("seed") == 70 + index
        assert log.value("ranks") == ranks
        assert log.value("global_batch_size") == 8
        assert log.value("config_file").endswith(f"8xA100_80GB-{config}/config.yaml")
        assert log.value("submission_platform") == f"8xA100_80GB-{config}"
        logged = {name: entry["value"] for name, entry in log.value("configuration").items()}
        assert logged["MODEL_IMPLEMENTATION"] == CONFIGS[config]
        assert logged["DECAY_ALL"] is True
        assert logged["LR"] == 0.1
        assert logged["RUN_NAME"] == f"bert-{config}-T1-{index}"
    assert f"warning: {ranks} ranks, but the published batch of 448 is 8 ranks x 56" in done.stdout
    again = tree.run(*command, "T1", **exports)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    assert "run 0 is already finished" in again.stdout
    other = tree.run(*command, "T2", **exports)
    assert other.returncode == 2
    assert len(other.stderr.splitlines()) == 1
    assert "already exists and is not overwritten" in other.stderr


@pytest.mark.slow
def test_missed_target_fails_and_keeps_the_log(tree: System, inputs: Path) -> None:
    command = ["./run_and_time.sh", "-c", "methods", "-o", tree.root / "out"]
    command += ["--skip_data_setup", "--skip_env_setup"]
    exports = MOSAIC | {"INIT_CHECKPOINT": inputs / "own", "LR": 1e-9, "MAX_STEPS": 4}
    assert tree.run(*command, **exports).returncode == 1
    log = read_log(tree.root / "out/results/8xA100_80GB-methods/bert/result_0.txt")
    assert log.status == "aborted"


def test_wrong_arguments_and_missing_files_are_one_line_errors(tree: System) -> None:
    for words, reason in {
        "": "--config is missing",
        "-c": "-c needs a value",
        "-c method": "there is no config method",
        "-c ../composer": "there is no config ../composer",
        "-c methods --train_dataset.remote x": "--train_dataset.remote is unknown",
        "-c methods baseline": "baseline is unknown",
        "-c methods -s x": "--seed x is not a whole number",
        "-c methods -t a/b": "--timestamp a/b is not allowed in a file name",
        "-c methods": "INIT_CHECKPOINT=/data/bert/bert_large_methods does not exist",
    }.items():
        assert_refused(tree.run("./run_and_time.sh", *words.split()), reason)
        assert not (tree.root / "a tree/runs").exists()


def test_timestamp_names_the_runs_and_wandb_flag_sets_the_project(
    tree: System, inputs: Path
) -> None:
    """Replace Python with a script that records its environment and arguments."""
    text = '#!/bin/sh\necho "$RUN_NAME $WANDB_PROJECT $SEED $*" >>"$NOTES"\nexit 5\n'
    program = write_program(tree.root / "python", text)
    exports = {"PYTHON": program, "INIT_CHECKPOINT": inputs / "own", "CLEAR_CACHES": 0}
    done = tree.run(
        "./run_and_time.sh", "-c", "methods", "-t", "noon", "--wandb", "--seed", 5, **exports
    )
    assert done.returncode == 5
    name, project, seed, *words = tree.notes.read_text().splitlines()[0].split(" ")
    assert (name, project, seed) == ("bert-methods-noon-0", "mlperf", "5")
    assert words[:6] == ["-m", "mlbert", "launch", "local", "-n", "1"]
    assert (tree.root / "a tree/runs/composer/runs/bert-methods-noon").is_dir()
    assert json.dumps(words).count("8xA100_80GB-methods/config.yaml") == 1

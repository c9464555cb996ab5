"""MosaicML's two MLPerf Training v2.1 systems: the published numbers, and the commands run on a tiny model."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from mds_samples import write_mds
from mlbert.config.bert_config import BertConfig
from mlbert.config.resolution import CommandLine, resolve
from mlbert.config.sections import settings_by_key
from mlbert.mlperf import official
from mlbert.mlperf.config import SubmissionConfig
from mlbert.mlperf.findings import Outcome
from mlbert.mlperf.logs import read_log
from mlbert.models.config import ModelConfig
from mlbert.optim import schedules
from mlbert.optim.config import ScheduleConfig
from mlbert.recipes import masked_lm_stored
from programs import assert_refused, run_quietly, run_script, user_environ, words_as_dict, write_program
from same_weights import assert_same_tensors
from stored_sets import VOCAB_SIZE, make_rows, random_lengths
from tiny_bert import write_tiny_bert

HOME = Path("benchmarks/bert/implementations")
CONFIGS = {"baseline": "huggingface", "methods": "mlbert"}
MILESTONES = (400, 600, 650, 800, 850, 900, 950, 1000, 1100, 1150, 1200, 1225, 1250, 1275, 1300, 1325, 1350, 1375, 1400)
PUBLISHED = words_as_dict("""
    recipe=masked_lm precision=fp16 optimizer=decoupled_adamw learning_rate=1e-4 warmup_steps=80 lr_gamma=0.9
    opt_lamb_beta_1=0.9 opt_lamb_beta_2=0.98 opt_epsilon=1e-6 weight_decay_rate=1e-5 decay_all=yes max_grad_norm=none
    gradient_accumulation_steps=1 train_batch_size=56 eval_batch_size=56 max_steps=6000 eval_iter_start_samples=24640
    eval_iter_samples=24640 num_eval_examples=10000 target_mlm_accuracy=0.72 submission_division=open
""")  # 448 = 8 x 56
TINY = words_as_dict("""
    LR=0.1 MAX_SEQ_LENGTH=32 BATCHSIZE=8 MAX_STEPS=12 WARMUP_STEPS=0 LR_MILESTONES=8,10 TARGET_MLM_ACCURACY=0.9
    NUM_EVAL_EXAMPLES=64 EVAL_ITER_START_SAMPLES=32 EVAL_ITER_SAMPLES=32 EVAL_BATCH_SIZE=8 PRECISION=fp32
    CPU_THREADS=1 LOG_FREQ=1 CLEAR_CACHES=0 NEXP=1
""")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create MDS sets train/ and eval/ (two labels, 19 to 1), and weights with their shape in phase1/ and own/."""
    folder = tmp_path_factory.mktemp("inputs")
    for name, count in (("train", 400), ("eval", 64)):
        rows = make_rows(random_lengths(count))
        labels = np.where(np.arange(len(rows.masked_labels)) % 20, 7, 8).astype(np.uint16)
        write_mds(folder / name, dataclasses.replace(rows, masked_labels=labels))
    write_tiny_bert(folder, VOCAB_SIZE)
    shutil.copy2(folder / "own/bert_config.json", folder / "phase1")
    return folder


class Tree:
    """The folders of both systems in a tree with a space in its path."""

    def __init__(self, root: Path, tree_root: Path, inputs: Path) -> None:
        self.home, self.root = root / "a tree" / HOME, root
        for name in ("composer", *(f"8xA100_80GB-{config}" for config in CONFIGS)):
            shutil.copytree(tree_root / HOME / name, self.home / name)
        (self.home / "pytorch").symlink_to(tree_root / HOME / "pytorch")
        data = {"DATADIR_PHASE2": inputs / "train", "EVALDIR": inputs / "eval"}
        self.exports = data | {"BERT_CONFIG": inputs / "own/bert_config.json", "PYTHON": sys.executable}

    def run(self, *words: object, cwd: str = "composer", **exports: object) -> subprocess.CompletedProcess[str]:
        environ = user_environ(PYTHONPATH=self.home / "pytorch", **{**self.exports, **exports})
        return run_quietly(*words, cwd=self.home / cwd, env=environ)


@pytest.fixture
def tree(tmp_path: Path, tree_root: Path, inputs: Path) -> Tree:
    return Tree(tmp_path, tree_root, inputs)


@pytest.mark.parametrize("config", CONFIGS)
def test_configs_have_the_published_values(config: str, tree_root: Path) -> None:
    path = tree_root / HOME / f"8xA100_80GB-{config}/config.yaml"
    site = {"DATADIR_PHASE2": "/x", "EVALDIR": "/y", "LOGDIR": "/z", "MLPERF_SUBMISSION_ORG": "o", "BERT_CONFIG": "b"}
    found = resolve(masked_lm_stored.RECIPE, site, CommandLine(yaml_files=[path])).config
    published = {settings_by_key()[key]: value for key, value in PUBLISHED.items()}
    assert {row.key: found.get(row) for row in published} == {row.key: row.parse(v) for row, v in published.items()}
    model, schedule_settings = found[ModelConfig], found[ScheduleConfig]
    assert model.model_implementation == CONFIGS[config]
    assert found[SubmissionConfig].submission_platform == f"8xA100_80GB-{config}"
    shape = BertConfig.from_json(tree_root / HOME / "pytorch/configs/large.json").with_options(model.model_options)
    assert (shape.hidden_dropout_prob, shape.attention_probs_dropout_prob, shape.num_hidden_layers) == (0.0, 0.0, 24)
    schedule = schedules.make(schedule_settings)
    assert [schedule(n) for n in (0, 1, 2, 41, 81)] == pytest.approx([0, 0, 1e-4 / 80, 1e-4 / 2, 1e-4])
    assert [schedule(n) for n in (400, 401, 601)] == pytest.approx([1e-4, 0.9e-4, 0.81e-4])
    assert schedule(1601) == schedule(5999) == pytest.approx(1e-4 * 0.9**20)
    assert schedule_settings.milestones == (*MILESTONES, 1600)


@pytest.mark.parametrize("name", CONFIGS)
def test_converted_weights_equal_the_checkpoint(name, tree_root, inputs, tmp_path, capsys) -> None:
    script = tree_root / HOME / f"composer/scripts/convert_ckpt_{name}.py"
    flags = ("--pt_checkpoint", inputs / "phase1/model.ckpt-28252.pt", "--save_checkpoint", tmp_path / "made")
    assert run_script(script, *flags) == 0
    assert_same_tensors(*(load_file(folder / "model.safetensors") for folder in (tmp_path / "made", inputs / "own")))
    capsys.readouterr()
    assert (run_script(script), capsys.readouterr().err.count("\n")) == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "ranks", "runs"), [("methods", 1, 2), ("baseline", 2, 1)])
def test_runs_are_collected_as_results(config, ranks, runs, tree: Tree, inputs: Path, quickstart_python: Path) -> None:
    words = ("./run_and_time.sh", "--config", config, "-o", tree.root / "out dir", "-s", 70, "-t", "T1")
    exports = {**TINY, "INIT_CHECKPOINT": inputs / "own", "DGXNGPU": ranks, "NEXP": runs, "BATCHSIZE": 8 // ranks}
    if config == "methods":  # baseline needs transformers
        exports["PYTHON"] = quickstart_python
    done = tree.run(*words, **exports)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    folder = tree.root / f"out dir/results/8xA100_80GB-{config}/bert"
    assert sorted(path.name for path in folder.iterdir()) == [f"result_{i}.txt" for i in range(runs)]
    logs = [read_log(folder / f"result_{i}.txt") for i in range(runs)]
    for index, log in enumerate(logs):
        (compliance, *_) = official.run(official.compliance_checker(log.path, log.path.name))
        assert compliance.outcome is Outcome.PASS
        assert (log.status, log.value("seed"), log.value("ranks")) == ("success", 70 + index, ranks)
        assert log.value("global_batch_size") == 8
        assert log.value("config_file").endswith(f"8xA100_80GB-{config}/config.yaml")
        assert log.value("submission_platform") == f"8xA100_80GB-{config}"
        logged = {name: entry["value"] for name, entry in log.value("configuration").items()}
        assert (logged["MODEL_IMPLEMENTATION"], logged["DECAY_ALL"], logged["LR"]) == (CONFIGS[config], True, 0.1)
        assert logged["RUN_NAME"] == f"bert-{config}-T1-{index}"
    assert f"warning: {ranks} ranks, and the published batch of 448 is 8 ranks x 56" in done.stdout
    again = tree.run(*words, **exports)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    assert "run 0 is already finished" in again.stdout
    other = tree.run(*words[:-1], "T2", **exports)
    assert (other.returncode, len(other.stderr.splitlines())) == (2, 1)
    assert "already exists and is not overwritten" in other.stderr


@pytest.mark.slow
def test_missed_target_fails_and_keeps_the_log(tree: Tree, inputs: Path) -> None:
    words = ("./run_and_time.sh", "-c", "methods", "-o", tree.root / "out", "--skip_data_setup", "--skip_env_setup")
    exports = {**TINY, "INIT_CHECKPOINT": inputs / "own", "LR": 1e-9, "MAX_STEPS": 4}
    assert tree.run(*words, **exports).returncode == 1
    assert read_log(tree.root / "out/results/8xA100_80GB-methods/bert/result_0.txt").status == "aborted"


def test_wrong_arguments_and_missing_files_are_one_line_errors(tree: Tree) -> None:
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


def test_timestamp_names_the_runs_and_wandb_flag_sets_the_project(tree: Tree, inputs: Path) -> None:
    """Replace Python with a script that records its environment and arguments."""
    text = '#!/bin/sh\necho "$RUN_NAME $WANDB_PROJECT $SEED $*" >>"$NOTES"\nexit 5\n'
    program = write_program(tree.root / "python", text)
    exports = {"PYTHON": program, "NOTES": tree.root / "notes", "INIT_CHECKPOINT": inputs / "own", "CLEAR_CACHES": 0}
    done = tree.run("./run_and_time.sh", "-c", "methods", "-t", "noon", "--wandb", "--seed", 5, **exports)
    assert done.returncode == 5
    name, project, seed, *words = (tree.root / "notes").read_text().splitlines()[0].split(" ")
    assert (name, project, seed) == ("bert-methods-noon-0", "mlperf", "5")
    assert words[:6] == ["-m", "mlbert", "launch", "local", "-n", "1"]
    assert (tree.root / "a tree/runs/composer/runs/bert-methods-noon").is_dir()
    assert json.dumps(words).count("8xA100_80GB-methods/config.yaml") == 1

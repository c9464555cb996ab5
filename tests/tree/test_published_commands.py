"""Samsung's and MosaicML's systems: the published commands, run on a tiny model, and the published numbers."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mds_samples import write_mds
from mlbert.config.bert_config import BertConfig
from mlbert.config.resolution import CommandLine, resolve
from mlbert.data.formats.open import open_store
from mlbert.data.prepare.split_bins import make_hdf5_bins
from mlbert.data.prepare.tfrecords import hdf5_to_tfrecords
from mlbert.mlperf import official
from mlbert.mlperf.findings import Outcome
from mlbert.mlperf.logs import read_log
from mlbert.models.bert import BertForPreTraining
from mlbert.models.weights.checkpoint_names import VOCABULARY, tf1_names
from mlbert.models.weights.checkpoint_state import Report
from mlbert.models.weights.convert import ReadCheckpoint, torch_to_nvidia, write_own
from mlbert.models.weights.load import load_weights
from mlbert.optim import schedules
from mlbert.optim.config import ScheduleConfig
from mlbert.recipes import ddp_adam, masked_lm_stored
from mlbert.report.run_plan import make_plan, planned_world_size
from nvidia_shards import PREDICTIONS, bert_rows, write_fixed
from programs import (
    assert_refused,
    exports_of,
    run_quietly,
    run_script,
    user_environ,
    words_as_dict,
    write_program,
)
from same_weights import assert_same_tensors
from stored_sets import VOCAB_SIZE, make_rows, random_lengths, same_sequences, write_set

HOME = Path("benchmarks/bert/implementations")


def tiny_bert(vocab_size: int) -> tuple[BertConfig, dict[str, torch.Tensor]]:
    """Return a tiny shape and its float32 parameters without the vocabulary padding."""
    shape = BertConfig(vocab_size, 16, 1, 2, 32, max_position_embeddings=32)
    model = BertForPreTraining(shape)
    model.initialize(5)
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return shape, {
        name: value[:vocab_size] if name in VOCABULARY else value for name, value in state.items()
    }


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create HDF5 sets train/, eval/ and bins/, MDS sets in mds/, and the initial weights in own/ and phase1/.

    Masked labels are two, 19 to 1, in MDS and all equal in HDF5, so that two steps are enough to learn them.
    """
    folder = tmp_path_factory.mktemp("published inputs")
    for name, count in (("train", 400), ("eval", 64)):
        rows = make_rows(random_lengths(count))
        labels = np.where(np.arange(len(rows.masked_labels)) % 20, 7, 8).astype(np.uint16)
        write_mds(folder / "mds" / name, dataclasses.replace(rows, masked_labels=labels))
        write_set(
            folder / name,
            dataclasses.replace(rows, masked_labels=np.full_like(rows.masked_labels, 7)),
        )
    make_hdf5_bins(folder / "train", folder / "bins", edges=(8, 16, 24, 32))
    write_own(ReadCheckpoint(*tiny_bert(VOCAB_SIZE), Report(), folder), folder / "own")
    torch_to_nvidia(folder / "own", folder / "phase1/model.ckpt-28252.pt")
    shutil.copy2(folder / "own/bert_config.json", folder / "phase1")
    return folder


# Nodes, sequences per GPU, million samples.
SYSTEMS = {
    "samsung_dgxa100_n128": ("128", "16", "2.93"),
    "samsung_dgxa100_n171": ("171", "12", "2.94"),
}
STUBS = (
    "convert_tf_checkpoint.py",
    "run_trans_tfrecord_to_hdf5.sh",
    "run_multinode.sh",
    "download_code.sh",
)
STUBS += ("cleanup_scripts/run_split_and_chop_hdf5_files.py",)
TINY = words_as_dict("""
    DGXNNODES=2 DGXNGPU=2 NEXP=2 RECIPE=ddp_adam BATCHSIZE=8 PACKING_FACTOR=1 EXCHANGE_PADDING=group LR=0.1
    OPT_LAMB_BETA_1=0.9 OPT_LAMB_BETA_2=0.98 WEIGHT_DECAY_RATE=0.01 MAX_STEPS=4 MAX_SAMPLES_TERMINATION=1000
    TARGET_MLM_ACCURACY=0.9 NUM_EVAL_EXAMPLES=64 EVAL_ITER_START_SAMPLES=64 EVAL_ITER_SAMPLES=64 CLEAR_CACHES=0
    CHECK_COMPLIANCE=0
""") | {"BIN_COUNTS": "1 1 1 5"}
# Runs the remote command on this machine and records the host name.
SSH = 'echo "${*: -2:1}" >>"$NOTES"\nexec bash -c "${!#}"'
MPIRUN = 'printf "%s\\n" "$@" >"$NOTES"\nexit 3'


class System:
    """Copies of systems' folders in a tree with a space in its path, a Python, and stand-ins first in PATH."""

    def __init__(
        self, root: Path, tree_root: Path, *names: str, python: str | Path = sys.executable
    ) -> None:
        home = root / "a tree" / HOME
        for name in names:
            shutil.copytree(tree_root / HOME / name, home / name)
        (home / "pytorch").symlink_to(tree_root / HOME / "pytorch")
        self.root = root
        self.folder = home / names[0]
        self.programs = root / "bin"
        self.notes = root / "notes"
        self.exports = {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "PYTHONPATH": home / "pytorch",
        }
        self.exports |= {"NOTES": self.notes}
        texts = {"python": f'exec "{python}" "$@"', "mlbert": f'exec "{python}" -m mlbert "$@"'}
        for program, text in (texts | {"ssh": SSH, "mpirun": MPIRUN}).items():
            write_program(self.programs / program, f"#!/bin/bash\n{text}\n")

    def run(self, *words: object, **exports: object) -> subprocess.CompletedProcess[str]:
        """Run a command in the first folder."""
        return run_quietly(*words, cwd=self.folder, env=user_environ(**{**self.exports, **exports}))

    def type(self, line: str, **exports: object) -> subprocess.CompletedProcess[str]:
        return self.run("bash", "-c", line, **exports)


@pytest.fixture
def system(tmp_path: Path, tree_root: Path, quickstart_python: Path) -> System:
    return System(tmp_path, tree_root, "samsung_dgxa100_n128", python=quickstart_python)


def config_of(name: str, tree_root: Path) -> Path:
    nodes, batch, _ = SYSTEMS[name]
    return (
        tree_root / HOME / name / f"config_Samsung_Supercomputer21_DGXA100_{nodes}x8x{batch}x1.sh"
    )


@pytest.mark.parametrize("name", SYSTEMS)
def test_plan_has_the_published_steps(name: str, tree_root: Path) -> None:
    """Values of the configs are in resolved_values.json, which test_configs.py compares."""
    found = exports_of(config_of(name, tree_root))
    assert (found["NEXP"], sum(map(int, found["BIN_COUNTS"].split()))) == (
        "10",
        int(found["BATCHSIZE"]),
    )
    config = resolve(ddp_adam.RECIPE, found).config
    text = "\n".join(make_plan(config, planned_world_size(found) or 0, found).lines)
    assert f"179 steps / 9 evaluations / about {SYSTEMS[name][2]} M samples" in text
    assert "expected samples: 2,925,000, at evaluation 9" in text
    assert "GB per step for 336,232,258 parameters" in text


def test_decay_starts_above_the_base_rate(tree_root: Path) -> None:
    readme = (tree_root / HOME / "samsung_dgxa100_n128/README.md").read_text()
    values = exports_of(config_of("samsung_dgxa100_n128", tree_root))
    schedule = schedules.make(resolve(ddp_adam.RECIPE, values).config[ScheduleConfig])
    rates = " | ".join(
        f"{schedule(update - 1):.3e}".replace("e-0", "e-") for update in (1, 65, 66, 82, 179)
    )
    assert f"| rate | {rates} |" in readme
    assert max(range(300), key=schedule) + 1 == 66


@pytest.mark.parametrize("stub", STUBS)
def test_stubs_are_short_and_equal(
    stub: str, tree_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = (tree_root / HOME / name / stub for name in SYSTEMS)
    assert one.read_bytes() == other.read_bytes()
    assert len(one.read_text().splitlines()) <= 6
    if one.suffix == ".py":
        assert run_script(one) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "arguments are required: --" in line


@pytest.mark.slow
def test_checkpoint_conversion(tree_root: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow", reason="reading TensorFlow's checkpoints needs it")
    shape, state = tiny_bert(197)
    names = tf1_names(shape.num_hidden_layers)
    arrays = {
        names[name]: value.T if names[name].endswith("kernel") else value
        for name, value in state.items()
    }
    np.savez(
        tmp_path / "weights.npz",
        **{name: value.contiguous().numpy() for name, value in arrays.items()},
    )
    (tmp_path / "bert_config.json").write_text(shape.to_json())
    write = (
        "import numpy, tensorflow as tf; w = numpy.load('weights.npz');"
        "tf.raw_ops.SaveV2(prefix='model.ckpt-28252', tensor_names=w.files, shape_and_slices=[''] * len(w.files),"
        "tensors=[w[n] for n in w.files])"
    )
    subprocess.run([sys.executable, "-c", write], cwd=tmp_path, check=True)
    system = System(tmp_path, tree_root, "samsung_dgxa100_n128")
    done = system.type(
        f"python convert_tf_checkpoint.py --tf_checkpoint '{tmp_path}/model.ckpt-28252.index' "
        f"--bert_config_path '{tmp_path}/bert_config.json' --output_checkpoint model.ckpt-28252.pt"
    )
    assert done.returncode == 0, done.stderr
    made = system.folder / "model.ckpt-28252.pt"
    assert list(torch.load(made, weights_only=True)) == ["model"]
    model = BertForPreTraining(shape)
    assert load_weights(model, made).missing == {}
    assert_same_tensors(
        {name: value[: len(state[name])] for name, value in model.named_parameters()}, state
    )


def test_tfrecords_to_hdf5(system: System, prepared_data: Path, tmp_path: Path) -> None:
    hdf5_to_tfrecords(prepared_data / "train", tmp_path / "tf records")
    line = f"TF_INPUT_DIR='{tmp_path}/tf records' HDF5_OUTPUT_DIR='{tmp_path}/hdf5' ./run_trans_tfrecord_to_hdf5.sh"
    done = system.type(line)
    assert done.returncode == 0, done.stderr
    given = open_store(prepared_data / "train")
    made = open_store(tmp_path / "hdf5")
    assert len(made) == len(given) > 100
    assert same_sequences(*(store.gather(np.arange(len(store))) for store in (given, made)))
    with h5py.File(next((tmp_path / "hdf5").glob("*.hdf5"))) as file:
        assert file["input_ids"].shape[1] == given.info.max_seq_length
    assert_refused(
        system.type("HDF5_OUTPUT_DIR=x ./run_trans_tfrecord_to_hdf5.sh"), "TF_INPUT_DIR is not set"
    )


def test_bins_of_hdf5(system: System, tmp_path: Path) -> None:
    (tmp_path / "hdf5").mkdir()
    write_fixed(tmp_path / "hdf5/part_00000.hdf5", bert_rows(200, max_length=512), 512, PREDICTIONS)
    line = f"run_split_and_chop_hdf5_files.py --input_dir='{tmp_path}/hdf5' --output_dir='{tmp_path}/bins'"
    done = system.type(f"cd cleanup_scripts; python {line}")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "bins").iterdir() if path.is_dir()} == {
        "128",
        "256",
        "384",
        "512",
    }
    given = open_store(tmp_path / "hdf5")
    made = open_store(tmp_path / "bins")
    assert same_sequences(*(store.gather(np.arange(len(store))) for store in (given, made)))


def use_tiny(system: System, inputs: Path, hosts: str = "'n1' 'n2'") -> str:
    """Add a config of 2 nodes x 2 ranks, edit `hosts`, and return the exports of the published command."""
    exports = TINY | {"BERT_CONFIG": inputs / "own/bert_config.json"}
    text = "".join(f"export {name}='{value}'\n" for name, value in exports.items())
    head = '# shellcheck shell=bash\nsource "$(dirname "${BASH_SOURCE[0]}")/env.sh"\n'
    (system.folder / "config_tiny_2x2x8x1.sh").write_text(head + text)
    program = system.folder / "run_multinode.sh"
    program.write_text(program.read_text().replace("'192.168.16.1' '192.168.16.2'", hosts))
    return (
        f"DGXSYSTEM=tiny_2x2x8x1 INPUT_DIR='{inputs}/bins' EVAL_DIR='{inputs}/eval' "
        f"CHECKPOINTDIR_PHASE1='{inputs}/phase1'"
    )


@pytest.mark.slow
def test_training_over_ssh(
    system: System, inputs: Path, tmp_path: Path, quickstart_python: Path
) -> None:
    line = use_tiny(system, inputs, "'127.0.0.1' 'localhost'")
    # Starting any other Python than the one in PYTHON fails.
    write_program(system.programs / "python3", "#!/bin/sh\nexit 9\n")
    write_program(tmp_path / "own python", f'#!/bin/sh\nexec "{quickstart_python}" "$@"\n')
    done = system.type(
        f"PYTHON='../../../../../own python' {line} NEXP=1 ./run_multinode.sh --log_freq 1",
        MASTER_PORT=20_000 + os.getpid() % 10_000,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[:6000]
    hosts = ["127.0.0.1", "localhost"]
    assert sorted(system.notes.read_text().split()) == sorted(2 * hosts), (
        "each is tried before a run"
    )
    log = (system.folder.parents[3] / "runs/tiny_2x2x8x1/result_0.txt").read_text()
    events = [json.loads(line.partition(" ")[2]) for line in log.splitlines()]
    values = {event["key"]: event["value"] for event in events}
    settings = {name: entry["value"] for name, entry in values["configuration"].items()}
    assert settings["DATADIR_PHASE2"] == str(inputs / "bins")
    assert settings["EVALDIR"] == str(inputs / "eval")
    assert settings["INIT_CHECKPOINT"] == str(inputs / "phase1/model.ckpt-28252.pt")
    assert settings["LOG_FREQ"] == 1
    assert values["global_batch_size"] == 32
    assert "no such job" not in done.stderr
    assert "unknown" not in done.stderr


def test_mpirun_with_weights_in_another_folder(system: System, inputs: Path) -> None:
    line = use_tiny(system, inputs).replace("/phase1'", "/own'")
    system.type(f"{line} ./run_multinode.sh --mpirun --max_steps 5")
    words = system.notes.read_text().splitlines()
    assert words[:8] == [
        "--np",
        "4",
        "--host",
        "n1:2,n2:2",
        "--map-by",
        "ppr:2:node",
        "--bind-to",
        "none",
    ]
    assert words[-3].endswith("/pytorch/launch/run_and_time.sh")
    assert words[-2:] == ["--max_steps", "5"]
    assert {"DATADIR_PHASE2", "EVALDIR", "INIT_CHECKPOINT", "NEXP", "EXPERIMENT"} <= set(words)
    assert {"RECIPE", "LOGDIR", "MASTER_ADDR", "PATH", "PYTHONPATH"} <= set(words)
    assert not {"INPUT_DIR", "EVAL_DIR", "CHECKPOINTDIR_PHASE1"} & set(words)


def test_wrong_exports_are_one_line_errors(system: System, inputs: Path) -> None:
    line = use_tiny(system, inputs)
    for change, reason in (
        (
            ("DGXSYSTEM=tiny", "DGXSYSTEM=tinny"),
            "There are: Samsung_Supercomputer21_DGXA100_128x8x16x1 tiny_2x2x8x1",
        ),
        (("DGXSYSTEM=", "DGXSYSTEMS="), "DGXSYSTEM= has no config here"),
        (("INPUT_DIR=", "INPUT_DIRS="), "INPUT_DIR is not set"),
        (("/bins'", "/bin'"), "is not a folder. It names the training set"),
        (("EVAL_DIR=", "EVALDIR="), "EVAL_DIR is not set"),
        (("CHECKPOINTDIR_PHASE1=", "CHECKPOINTDIR="), "CHECKPOINTDIR_PHASE1 is not set"),
        (("/phase1'", "/eval'"), "holds neither model.ckpt-28252.pt nor model.safetensors"),
        (
            ("DGXSYSTEM=tiny", "PYTHON=/no/python DGXSYSTEM=tiny"),
            "PYTHON is not an executable program",
        ),
        (
            ("DGXSYSTEM=tiny", "CONFIG_FILE=config_x.sh DGXSYSTEM=tiny"),
            "config_x.sh is sourced in this shell",
        ),
        (("tiny_2x2x8x1", "Samsung_Supercomputer21_DGXA100_128x8x16x1"), "names 2, config_Samsung"),
    ):
        done = system.type(
            f"{line.replace(*change)} ./run_multinode.sh", LOGDIR=system.folder / "logs"
        )
        assert_refused(done, reason)
        assert not system.notes.exists(), "something was started"


CONFIGS = {"baseline": "huggingface", "methods": "mlbert"}
MOSAIC = words_as_dict("""
    LR=0.1 MAX_SEQ_LENGTH=32 BATCHSIZE=8 MAX_STEPS=12 WARMUP_STEPS=0 LR_MILESTONES=8,10 TARGET_MLM_ACCURACY=0.9
    NUM_EVAL_EXAMPLES=64 EVAL_ITER_START_SAMPLES=32 EVAL_ITER_SAMPLES=32 EVAL_BATCH_SIZE=8 PRECISION=fp32
    CPU_THREADS=1 LOG_FREQ=1 CLEAR_CACHES=0 NEXP=1
""")


@pytest.fixture
def tree(tmp_path: Path, tree_root: Path, inputs: Path) -> System:
    system = System(
        tmp_path, tree_root, "composer", *(f"8xA100_80GB-{config}" for config in CONFIGS)
    )
    system.exports |= {"DATADIR_PHASE2": inputs / "mds/train", "EVALDIR": inputs / "mds/eval"}
    system.exports |= {"BERT_CONFIG": inputs / "own/bert_config.json", "PYTHON": sys.executable}
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
    flags = (
        "--pt_checkpoint",
        inputs / "phase1/model.ckpt-28252.pt",
        "--save_checkpoint",
        tmp_path / "made",
    )
    assert run_script(script, *flags) == 0
    assert_same_tensors(
        *(load_file(folder / "model.safetensors") for folder in (tmp_path / "made", inputs / "own"))
    )
    capsys.readouterr()
    assert (run_script(script), capsys.readouterr().err.count("\n")) == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "ranks", "runs"), [("methods", 1, 2), ("baseline", 2, 1)])
def test_runs_are_collected_as_results(
    config, ranks, runs, tree: System, inputs, quickstart_python
) -> None:
    words = (
        "./run_and_time.sh",
        "--config",
        config,
        "-o",
        tree.root / "out dir",
        "-s",
        70,
        "-t",
        "T1",
    )
    exports = {
        **MOSAIC,
        "INIT_CHECKPOINT": inputs / "own",
        "DGXNGPU": ranks,
        "NEXP": runs,
        "BATCHSIZE": 8 // ranks,
    }
    if config == "methods":  # baseline needs transformers
        exports["PYTHON"] = quickstart_python
    done = tree.run(*words, **exports)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    folder = tree.root / f"out dir/results/8xA100_80GB-{config}/bert"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"result_{i}.txt" for i in range(runs)
    ]
    logs = [read_log(folder / f"result_{i}.txt") for i in range(runs)]
    for index, log in enumerate(logs):
        (compliance, *_) = official.run(official.compliance_checker(log.path, log.path.name))
        assert compliance.outcome is Outcome.PASS
        assert (log.status, log.value("seed"), log.value("ranks")) == ("success", 70 + index, ranks)
        assert log.value("global_batch_size") == 8
        assert log.value("config_file").endswith(f"8xA100_80GB-{config}/config.yaml")
        assert log.value("submission_platform") == f"8xA100_80GB-{config}"
        logged = {name: entry["value"] for name, entry in log.value("configuration").items()}
        assert (logged["MODEL_IMPLEMENTATION"], logged["DECAY_ALL"], logged["LR"]) == (
            CONFIGS[config],
            True,
            0.1,
        )
        assert logged["RUN_NAME"] == f"bert-{config}-T1-{index}"
    assert f"warning: {ranks} ranks, but the published batch of 448 is 8 ranks x 56" in done.stdout
    again = tree.run(*words, **exports)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    assert "run 0 is already finished" in again.stdout
    other = tree.run(*words[:-1], "T2", **exports)
    assert (other.returncode, len(other.stderr.splitlines())) == (2, 1)
    assert "already exists and is not overwritten" in other.stderr


@pytest.mark.slow
def test_missed_target_fails_and_keeps_the_log(tree: System, inputs: Path) -> None:
    words = (
        "./run_and_time.sh",
        "-c",
        "methods",
        "-o",
        tree.root / "out",
        "--skip_data_setup",
        "--skip_env_setup",
    )
    exports = {**MOSAIC, "INIT_CHECKPOINT": inputs / "own", "LR": 1e-9, "MAX_STEPS": 4}
    assert tree.run(*words, **exports).returncode == 1
    assert (
        read_log(tree.root / "out/results/8xA100_80GB-methods/bert/result_0.txt").status
        == "aborted"
    )


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

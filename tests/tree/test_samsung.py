"""Samsung's systems: the published commands, run on a tiny model, and the published numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from mlbert.config.shell import planned_world_size
from mlbert.data.formats.open import open_store
from mlbert.data.prepare.tfrecords import hdf5_to_tfrecords
from mlbert.models.bert import BertForPreTraining
from mlbert.models.weights.checkpoint_names import tf1_names
from mlbert.models.weights.load import load_weights
from mlbert.optim import schedules
from mlbert.optim.config import ScheduleConfig
from mlbert.programs.run_plan import make_plan
from mlbert.recipes import ddp_adam
from mlbert.recipes.sections import resolve
from nvidia_shards import PREDICTIONS, bert_rows, write_fixed
from programs import assert_refused, exports_of, run_script, words_as_dict, write_program
from published_systems import HOME, System, tiny_bert, write_inputs
from same_weights import assert_same_tensors
from stored_sets import same_sequences

# Nodes, sequences per GPU, million samples.
SYSTEMS = {
    "samsung_dgxa100_n128": ("128", "16", "2.93"),
    "samsung_dgxa100_n171": ("171", "12", "2.94"),
}
# Programs that both systems have.
STUBS = (
    "convert_tf_checkpoint.py",
    "run_trans_tfrecord_to_hdf5.sh",
    "run_multinode.sh",
    "download_code.sh",
    "cleanup_scripts/run_split_and_chop_hdf5_files.py",
)
# Exports of a config of 2 nodes x 2 ranks.
TINY = words_as_dict("""
    DGXNNODES=2 DGXNGPU=2 NEXP=2 RECIPE=ddp_adam BATCHSIZE=8 PACKING_FACTOR=1 EXCHANGE_PADDING=group
    LR=0.1 OPT_LAMB_BETA_1=0.9 OPT_LAMB_BETA_2=0.98 WEIGHT_DECAY_RATE=0.01 MAX_STEPS=4
    MAX_SAMPLES_TERMINATION=1000 TARGET_MLM_ACCURACY=0.9 NUM_EVAL_EXAMPLES=64
    EVAL_ITER_START_SAMPLES=64 EVAL_ITER_SAMPLES=64 CLEAR_CACHES=0 CHECK_COMPLIANCE=0
""") | {"BIN_COUNTS": "1 1 1 5"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published inputs")
    write_inputs(folder)
    return folder


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
        assert "are missing. See " in line


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
        "tf.raw_ops.SaveV2(prefix='model.ckpt-28252', tensor_names=w.files, shape_and_slices=[''] "
        "* len(w.files),"
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
    line = (
        f"TF_INPUT_DIR='{tmp_path}/tf records' HDF5_OUTPUT_DIR='{tmp_path}/hdf5' "
        "./run_trans_tfrecord_to_hdf5.sh"
    )
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
    line = (
        f"run_split_and_chop_hdf5_files.py --input_dir='{tmp_path}/hdf5' "
        f"--output_dir='{tmp_path}/bins'"
    )
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
    """Add a config of 2 nodes x 2 ranks, edit `hosts`,
    and return the exports of the published command.
    """
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
        (("/phase1'", "/eval'"), "contains neither model.ckpt-28252.pt nor model.safetensors"),
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

"""A new system's folder: made from any other, whole or not at all,
and never over something that is there.
"""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlaudit.cli.submission import app
from mlaudit.new_system import IMPLEMENTATIONS, new_system
from mlbert.config.sources import parse_config_name
from mlbert.host.system_description import unfilled
from mlbert.recipes.sections import check_exports
from programs import exports_of
from user_errors import user_error

ROOT = Path(__file__).resolve().parents[3]
SYSTEMS = sorted(path.parent.name for path in (ROOT / IMPLEMENTATIONS).glob("*/env.sh"))
BAD_NAMES = ["a-b", "a b", "", "../up", "1st", "a__b", "end_", "x" * 65, "a\nb"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Copy the system folders, what they source, and the descriptions."""
    root = tmp_path / "a tree"
    for name in [*SYSTEMS, "pytorch/launch", "pytorch/configs"]:
        shutil.copytree(ROOT / IMPLEMENTATIONS / name, root / IMPLEMENTATIONS / name)
    shutil.copytree(ROOT / "systems", root / "systems")
    return root


@pytest.mark.parametrize("other", SYSTEMS)
def test_from_every_system(other: str, tree: Path) -> None:
    source = sorted((tree / IMPLEMENTATIONS / other).glob("config_*.sh"))[0]
    made = new_system("acme_x1", other, tree, source.name)
    config = made.folder / made.config
    names = {"README.md", "env.sh", "run.sub", "run_pretraining.py", made.config}
    assert {path.name for path in made.folder.iterdir()} == names
    assert check_exports(config)
    before = exports_of(source)
    after = exports_of(config)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed <= {"CONFIG_FILE", "DGXSYSTEM", "LOGDIR", "MLPERF_SUBMISSION_PLATFORM"}
    assert after["MLPERF_SUBMISSION_PLATFORM"] == "acme_x1"
    assert parse_config_name(made.config).system == "acme_x1"
    for stub in ("run.sub", "run_pretraining.py"):
        assert (made.folder / stub).read_bytes() == (source.parent / stub).read_bytes()
    description = json.loads(made.template.read_text())
    assert description["number_of_nodes"] == after["DGXNNODES"]
    assert "status" in unfilled(description)
    has_gpus = "cpu_" not in other
    assert description["accelerators_per_node"] == (after["DGXNGPU"] if has_gpus else "0")
    assert f"`{made.config}`" in made.row
    assert not list((tree / IMPLEMENTATIONS).glob(".*"))


@pytest.mark.parametrize(
    ("other", "nodes", "gpus", "shape"),
    [
        ("dgxa100_n1", None, 2, "1x2x224x4"),
        ("dgxa100_n1", 4, 8, "4x8x14x1"),
        ("dgxa100_n1", None, 1, "1x1x448x8"),
        ("h200_n1", None, 2, "1x2x192x4_pack"),
        ("dgxh100_n8", 1, 2, "1x2x1152x32_pack"),
    ],
)
def test_the_batch_stays_on_other_gpus(
    other: str, nodes: int | None, gpus: int, shape: str, tree: Path
) -> None:
    """Only the numbers of GPUs and how the batch is spread over them change."""
    source = sorted((tree / IMPLEMENTATIONS / other).glob("config_*.sh"))[0]
    made = new_system("acme", other, tree, source.name, nodes, gpus)
    assert made.config == f"config_acme_{shape}.sh"
    before = exports_of(source)
    after = exports_of(made.folder / made.config)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    named = {"CONFIG_FILE", "DGXSYSTEM", "LOGDIR", "MLPERF_SUBMISSION_PLATFORM"}
    spread = {"DGXNNODES", "DGXNGPU", "BATCHSIZE", "GRADIENT_STEPS", "WALLTIME", "SRUN_ARGS"}
    assert changed <= named | spread
    batches = [
        int(one["DGXNNODES"]) * int(one["DGXNGPU"]) * int(one["BATCHSIZE"])
        for one in (before, after)
    ]
    assert batches[0] == batches[1]
    micro_batches = [int(one["BATCHSIZE"]) // int(one["GRADIENT_STEPS"]) for one in (before, after)]
    assert micro_batches[1] <= micro_batches[0]
    assert f"gpu:{gpus}" in after["SRUN_ARGS"]
    first_lines = (made.folder / made.config).read_text().splitlines()[:4]
    assert any(f"x {after['BATCHSIZE']} " in line for line in first_lines)
    batch_words = f"the batch of all GPUs ({batches[0]})"
    assert any(batch_words in line for line in made.changes)


def test_gpus_on_which_the_batch_would_change(tree: Path) -> None:
    with user_error("config.conflict", "--nodes 1 --gpus 3"):
        new_system("acme", "dgxa100_n1", tree, gpus=3)
    with user_error("config.conflict", "--nodes 128 --gpus 2"):
        new_system("acme", "samsung_dgxa100_n128", tree, gpus=2)
    assert not (tree / IMPLEMENTATIONS / "acme").exists()


def test_a_chain_of_new_systems(tree: Path) -> None:
    new_system("first", "h200_n1", tree)
    made = new_system("second_one", "first", tree)
    assert made.config == "config_second_one_1x8x48x1_pack.sh"
    assert "first" not in (made.folder / "env.sh").read_text()


@pytest.mark.parametrize(
    ("name", "other", "config", "code", "subject"),
    [
        *((name, "h200_n1", None, "config.value", repr(name)) for name in BAD_NAMES),
        ("acme_1x8", "h200_n1", None, "config.value", "acme_1x8"),
        *(
            (name, "h200_n1", None, "file.exists", "systems/cpu_demo.json")
            for name in ("cpu_demo", "CPU_demo")
        ),
        ("pytorch", "h200_n1", None, "file.exists", "benchmarks/bert/implementations/pytorch"),
        ("acme", "nothing", None, "config.choice", "--from nothing"),
        (
            "acme",
            "../implementations/h200_n1",
            None,
            "config.choice",
            "--from ../implementations/h200_n1",
        ),
        ("acme", "pytorch", None, "config.choice", "--from pytorch"),
        ("acme", "gb200", None, "config.ambiguous", "gb200"),
        (
            "acme",
            "gb200",
            "config_GB200_9x9x9x9.sh",
            "config.choice",
            "--config config_GB200_9x9x9x9.sh",
        ),
    ],
)
def test_bad_and_taken_names_and_bad_origins(
    name, other, config, code, subject, tree: Path
) -> None:
    before = sorted(tree.rglob("*"))
    with user_error(code, subject):
        new_system(name, other, tree, config)
    assert sorted(tree.rglob("*")) == before


def test_an_interrupted_start_is_repeated(tree: Path) -> None:
    partial = tree / IMPLEMENTATIONS / ".acme.partial"
    partial.mkdir()
    (partial / "junk").write_text("")
    made = new_system("acme", "h200_n1", tree)
    shutil.rmtree(made.folder)
    template = made.template.read_bytes()
    again = new_system("acme", "h200_n1", tree)
    assert again.template.read_bytes() == template
    assert "junk" not in {path.name for path in again.folder.iterdir()}
    shutil.rmtree(made.folder)
    made.template.write_text("{}")
    with user_error("file.exists", made.template):  # somebody else's
        new_system("acme", "h200_n1", tree)
    assert made.template.read_text() == "{}"


def test_the_command_names_the_next_step(tree: Path) -> None:
    done = CliRunner().invoke(app, ["new-system", "acme", "--from", "h200_n1", "--tree", str(tree)])
    assert done.exit_code == 0
    assert done.stdout.count("\ncreated ") == 5
    assert "unchanged:" not in done.stdout
    command = ["new-system", "few", "--from", "dgxa100_n1", "--gpus", "2", "--tree", str(tree)]
    few = CliRunner().invoke(app, command)
    for line in ("BATCHSIZE: 56 -> 224", "GRADIENT_STEPS: 1 -> 4", "WALLTIME: 75 -> 300"):
        assert line in few.stdout.splitlines()
    for step in (
        "env.sh",
        "--print-config",
        "implementations/README.md",
        "describe-system --out systems/acme.json",
    ):
        assert step in done.stdout

"""docs/models.md is true of a wheel in an empty environment: its commands take each family, give
transformers' numbers, and refuse the other families in the page's words.

The environment has the versions of constraints.txt. pip installs it, with what it has in its cache.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import model_table
from mlbert.data.prepare import glue_stand_ins
from programs import run_checked, run_quietly, user_environ

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

EXTRAS = "finetune,onnx,embeddings"
SETUP = "benchmarks/bert/implementations/pytorch/launch/setup_venv.sh"
ROWS_OF_GLUE = 0.1  # of the stand-ins' usual number
MASK_OF_ROBERTA = "<mask>"


@pytest.fixture(scope="module")
def python(
    wheel: Path, tree_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Install the wheel in a new environment, and return its Python."""
    folder = tmp_path_factory.mktemp("environment")
    run_checked(sys.executable, "-m", "venv", folder / "venv")
    python = folder / "venv/bin/python"
    # As in setup_venv.sh: a torch with CUDA brings its own Triton.
    constraints = (tree_root / "constraints.txt").read_text().splitlines(keepends=True)
    pins = folder / "constraints.txt"
    pins.write_text("".join(line for line in constraints if not line.startswith("triton==")))
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", pins]
    index = run_checked("bash", "-c", f"source '{tree_root / SETUP}'; torch_index '{python}'")
    if url := index.stdout.strip():
        install += ["--extra-index-url", url]
    if run_quietly(*install, "setuptools").returncode:
        pytest.skip("pip reaches no package index")
    run_checked(*install, f"{wheel}[{EXTRAS}]", cwd=folder)
    yield python
    shutil.rmtree(folder)  # more than a gigabyte


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write text to pre-train on, rows to fine-tune on, and GLUE's files."""
    folder = tmp_path_factory.mktemp("data")
    model_table.write_text(folder)
    model_table.write_rows(folder)
    glue_stand_ins.make(folder / "glue", ROWS_OF_GLUE)
    return folder


def commands(
    source: Path, data: Path, out: Path, mask: str = model_table.MASK
) -> dict[str, list[str]]:
    found = model_table.commands(
        source, data / "text.txt", data / "rows.csv", data / "glue", out, mask
    )
    return {column: [str(word) for word in words] for column, words in found.items()}


def environ() -> dict[str, str]:
    """Return the environment of a user who has no GPU, and no network for models."""
    return user_environ(
        PATH="/usr/bin:/bin", CPU_THREADS=1, CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE=1
    )


@pytest.mark.parametrize("family", model_table.families())
def test_every_command_takes_a_family(
    family: str, python: Path, data: Path, tree_root: Path, tmp_path: Path
) -> None:
    cells = model_table.families()[family]
    source = model_table.write(family, tmp_path / "source")
    of_user = {"cwd": tmp_path, "env": environ()}
    mask = MASK_OF_ROBERTA if "BERTa" in family else model_table.MASK
    for column, words in commands(source, data, tmp_path, mask).items():
        run_checked(python.parent / "mlbert", *words, **of_user)
        if column != "`--to huggingface` writes":
            assert cells[column] == "yes"
    written = tmp_path / "written"
    (architecture,) = json.loads((written / "config.json").read_text())["architectures"]
    assert cells["`--to huggingface` writes"] == f"`{architecture}`"
    assert (written / "tokenizer.json").is_file()
    scores = json.loads((tmp_path / "glue/glue_scores.json").read_text())
    assert scores["tasks"].keys() == {model_table.GLUE_TASK}

    assert cells["`load_model`"] == "yes"
    script = tree_root / "tests/exported_models.py"
    *_, last = run_checked(python, script, source, tmp_path, **of_user).stdout.splitlines()
    differences = json.loads(last)
    allowed = model_table.tolerances()
    assert differences.keys() == allowed.keys()
    for name, difference in differences.items():
        assert difference <= allowed[name], name


@pytest.mark.parametrize("model", model_table.refusals())
def test_other_families_are_refused_by_every_command(
    model: str, python: Path, data: Path, tree_root: Path, tmp_path: Path
) -> None:
    said = model_table.refusals()[model]
    source = model_table.write_refused(model, tmp_path / "source")
    lines = commands(source, data, tmp_path)
    script = tree_root / "tests/refused_commands.py"
    done = run_checked(
        python,
        script,
        cwd=tmp_path,
        env=environ(),
        input=json.dumps(list(lines.values())),
    )
    for column, (status, out, err) in zip(lines, json.loads(done.stdout), strict=True):
        assert (status, out, len(err.splitlines())) == (2, "", 1), column
        assert f"{said} [model.unsupported]" in err, column
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_environment_has_the_wheel_and_the_pinned_versions(
    python: Path, tree_root: Path
) -> None:
    code = "import mlbert, torch; print(mlbert.__file__); print(torch.__version__)"
    done = run_checked(python, "-c", code, cwd=python.parent, env=environ())
    file, version = done.stdout.splitlines()
    assert Path(file).is_relative_to(python.parents[1])
    pins = (tree_root / "constraints.txt").read_text().splitlines()
    assert f"torch=={version.partition('+')[0]}" in pins

"""Fixtures for the tree checks: the tree's files, configs and shell programs."""

import ast
import subprocess
from pathlib import Path

import pytest

from quickstart_packages import make_environment

ROOT = Path(__file__).resolve().parents[2]
EXCLUDED = {".git", ".venv", "third_party", "build", "__pycache__"}


def tree_files() -> list[Path]:
    """Return the files that git tracks or would track; without git, everything but build products."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0 and (ROOT / ".git").exists():
        names = [Path(name) for name in listed.stdout.decode().split("\0") if name]
    else:
        names = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
        names = [name for name in names if name.parts[0] not in ("runs", "site") and not EXCLUDED & set(name.parts)]
        names = [name for name in names if ".egg-info" not in str(name)]
    return sorted(ROOT / name for name in names if (ROOT / name).is_file())


FILES = tree_files()
PYTHON_FILES = [path for path in FILES if path.suffix == ".py"]
SHELL_FILES = [path for path in FILES if path.suffix in (".sh", ".sub") or path == ROOT / ".ci/run"]
CONFIG_FILES = [path for path in SHELL_FILES if path.name.startswith("config_")]
SYSTEM_FOLDERS = sorted({path.parent for path in CONFIG_FILES})
YAML_CONFIGS = [path for path in FILES if path.match("benchmarks/bert/implementations/*/config.yaml")]
READMES = [path for path in FILES if path.suffix == ".md"]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests that take one of these arguments over every such file."""
    kinds = {
        "shell_file": SHELL_FILES,
        "config_file": CONFIG_FILES,
        "yaml_config": YAML_CONFIGS,
        "system_folder": SYSTEM_FOLDERS,
        "readme": READMES,
    }
    for name, paths in kinds.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, paths, ids=relative)


@pytest.fixture(scope="session")
def tracked() -> list[Path]:
    return FILES


@pytest.fixture(scope="session")
def syntax_trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in PYTHON_FILES}


@pytest.fixture(scope="session")
def quickstart_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("quickstart") / "venv")

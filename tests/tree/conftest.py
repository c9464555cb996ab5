"""Fixtures for the tree checks: the tree's files, configs and shell programs."""

import ast
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from programs import copy_files, run_checked, write_program
from tree.files import ROOT, tree_files

FILES = tree_files()
PYTHON_FILES = [path for path in FILES if path.suffix == ".py"]
SHELL_FILES = [path for path in FILES if path.suffix in (".sh", ".sub") or path == ROOT / ".ci/run"]
CONFIG_FILES = [path for path in SHELL_FILES if path.name.startswith("config_")]
SYSTEM_FOLDERS = sorted({path.parent for path in CONFIG_FILES})
YAML_CONFIGS = [
    path for path in FILES if path.match("benchmarks/bert/implementations/*/config.yaml")
]
PYTORCH = "benchmarks/bert/implementations/pytorch"
READMES = [path for path in FILES if path.suffix == ".md"]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests that take one of these arguments over every such file."""
    kinds = {"shell_file": SHELL_FILES, "config_file": CONFIG_FILES, "yaml_config": YAML_CONFIGS}
    kinds |= {"system_folder": SYSTEM_FOLDERS, "readme": READMES}
    for name, paths in kinds.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, paths, ids=relative)


@pytest.fixture(scope="session")
def tracked() -> list[Path]:
    return FILES


@pytest.fixture(scope="session")
def syntax_trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in PYTHON_FILES}


def needed_packages(name: str, *extras: str) -> set[str]:
    """Return a package and what it requires, with these extras, directly and indirectly."""
    found = set()
    waiting = [(name, extras)]
    while waiting:
        name, extras = waiting.pop()
        found.add(name)
        for requirement in map(Requirement, metadata.requires(name) or ()):
            wanted = not requirement.marker or any(
                requirement.marker.evaluate({"extra": e}) for e in ("", *extras)
            )
            if wanted and requirement.name not in found:
                waiting.append((requirement.name, tuple(requirement.extras)))
    return found


@pytest.fixture(scope="session")
def quickstart_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment like quickstart.sh's,
    with links to this one's packages, but of no extra.
    """
    folder = tmp_path_factory.mktemp("quickstart") / "venv"
    run_checked(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin/python"
    packages = Path(
        sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    )
    # quickstart.sh installs torch without naming the extra that needs it.
    for name in needed_packages("mlbert") | needed_packages("torch") | {"setuptools"}:
        # By its folder: an egg-info that a build has left in the tree's root has no files.
        distribution = next(
            iter(metadata.distributions(name=name, path=[sysconfig.get_path("purelib")]))
        )
        for entry in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / entry).exists():
                (packages / entry).symlink_to(distribution.locate_file(entry))
    write_program(folder / "bin/mlbert", f"#!{python}\nfrom mlbert.cli.main import main\nmain()\n")
    return python


@pytest.fixture(scope="session")
def wheel(tree_root: Path, tracked: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel, and return its file."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    names = (
        f"{PYTORCH}/mlbert",
        f"{PYTORCH}/c",
        "benchmarks/bert/implementations/tensorflow2",
        "benchmarks/mosaic_bert/mosaic_yaml",
        "audit/mlaudit",
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
        "NOTICE",
    )
    copy_files(
        [p for p in tracked if p.relative_to(tree_root).as_posix().startswith(names)],
        tree_root,
        source,
    )
    command = [sys.executable, "-m", "pip", "wheel", ".", "-q", "--no-deps"]
    command += ["--no-build-isolation", "-w", str(folder)]
    run_checked(*command, cwd=source)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def wheel_site(wheel: Path) -> Path:
    """Return a folder with the wheel's content."""
    site = wheel.parent / "site"
    with zipfile.ZipFile(wheel) as content:
        content.extractall(site)
    return site

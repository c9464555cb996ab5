"""A front end is imported from where this package is installed."""

import sys
from pathlib import Path

import pytest

import mlbert
from mlbert.host.repository import HOMES
from programs import run_checked, run_quietly, user_environ, write_files

PROGRAM = """
from mlbert.host.packages import import_sibling
module = import_sibling("mosaic_yaml.durations")
assert import_sibling("mosaic_yaml.durations") is module
import mosaic_yaml.durations
assert mosaic_yaml.durations is module
print(module.__file__)
"""


def test_the_front_end_of_the_same_repository_wins_over_others(tmp_path: Path, tree_root: Path):
    write_files(tmp_path / "mosaic_yaml", {"__init__.py": "", "durations.py": ""})
    package = Path(mlbert.__file__).resolve().parents[1]
    environ = user_environ(PYTHONPATH=f"{tmp_path}:{package}")
    done = run_checked(sys.executable, "-c", PROGRAM, env=environ)
    assert Path(done.stdout.strip()) == tree_root / HOMES["mosaic_yaml"] / "durations.py"


def test_commands_of_a_front_end_need_only_this_package_in_the_search_path(tmp_path: Path):
    package = Path(mlbert.__file__).resolve().parents[1]
    environ = user_environ(PYTHONPATH=package)
    for command in ("mosaic", "glue"):
        done = run_checked(
            sys.executable, "-m", "mlbert", command, "--help", env=environ, cwd=tmp_path
        )
        assert "YAML" in done.stdout


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('built for another Python')", "RuntimeError: built for another"),
        ("", "has no attribute"),  # another version, without the name that is used
        ("def", "SyntaxError"),
    ],
)
def test_a_broken_package_of_the_search_path_is_one_line(code: str, reason: str, tmp_path: Path):
    write_files(tmp_path / "numpy", {"__init__.py": code, "typing.py": ""})
    package = Path(mlbert.__file__).resolve().parents[1]
    environ = user_environ(PYTHONPATH=f"{tmp_path}:{package}")
    words = ["-m", "mlbert", "prepare", "python-text", "--out", tmp_path / "out"]
    done = run_quietly(sys.executable, *words, env=environ, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    begin = f"mlbert: error: {tmp_path}: a package in this folder of PYTHONPATH fails: "
    assert done.stderr.startswith(begin)
    assert reason in done.stderr
    assert done.stderr.endswith(". [package.broken]\n")
    assert done.stderr.count("\n") == 1

"""A non-editable install works outside the tree: it includes the model shapes and C kernels."""

import json
import os
import sys
from pathlib import Path

import pytest

from programs import assert_refused, run_quietly
from training_settings import SETTINGS

HOME = "benchmarks/bert/implementations/pytorch"


def train(wheel_site: Path, folder: Path, **variables: str) -> tuple[str, dict]:
    values = {
        **SETTINGS,
        "bert_config_file": wheel_site / "mlbert/configs/tiny.json",
        "output_dir": folder,
        "max_steps": 2,
    }
    command = [sys.executable, "-m", "mlbert", "train"]
    command += [f"{name}={value}" for name, value in values.items()]
    command.append("ops=auto")
    environ = os.environ | {"PYTHONPATH": str(wheel_site)} | variables
    done = run_quietly(*command, cwd=wheel_site.parent, env=environ)
    # Two steps cannot reach the target.
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout, json.loads((folder / "run_0/config.json").read_text())["provenance"]


def test_wheel_contains_configs_and_sources(
    wheel_site: Path, tree_root: Path, tracked: list[Path]
) -> None:
    for name in ("configs", "csrc"):
        expected = {
            path.relative_to(tree_root / HOME)
            for path in tracked
            if tree_root / HOME / name in path.parents
        }
        assert expected
        files = [path for path in (wheel_site / "mlbert" / name).rglob("*") if path.is_file()]
        assert {path.relative_to(wheel_site / "mlbert") for path in files} == expected


def test_installed_package_trains_with_its_c_kernels(wheel_site: Path, tmp_path: Path) -> None:
    out, provenance = train(wheel_site, tmp_path / "out")
    assert "ops" in provenance["native_libraries"]
    assert "C kernels" not in out


@pytest.mark.slow
def test_without_a_compiler_it_trains_and_warns_once(wheel_site: Path, tmp_path: Path) -> None:
    out, provenance = train(
        wheel_site, tmp_path / "out", PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path)
    )
    assert not provenance["native_libraries"]
    assert out.count("Install gcc") == 1
    assert "C kernels are not used, which is slower" in out


def test_messages_of_an_installed_wheel_need_no_repository(
    wheel_site: Path, tmp_path: Path
) -> None:
    shape = tmp_path / "shape.json"
    shape.write_text('{"hidden_size": "32"}')
    log = tmp_path / "result_0.txt"
    commands = {
        ("submission", "export", tmp_path / "out"): "--tree: is not given, and the installed",
        ("submission", "new-system", "acme", "--from", "cpu_demo"): "--tree: is not given, and the",
        ("submission", "repeat", log): "the installed package: has no repository around it",
        ("plan", "--model", shape): f"Compare with {wheel_site}/mlbert/configs/base.json",
    }
    environ = {**os.environ, "PYTHONPATH": str(wheel_site)}
    for words, message in commands.items():
        done = run_quietly(sys.executable, "-m", "mlbert", *words, cwd=tmp_path, env=environ)
        assert_refused(done, message)
    task = tmp_path / "task.yaml"
    task.write_text("data: {train: rows.csv}\nunknown: 1\n")
    for program in ("mosaic", "finetune", "glue", "pretrain"):
        done = run_quietly(sys.executable, "-m", "mlbert", program, task, cwd=tmp_path, env=environ)
        assert_refused(done, "unknown name")
    code = "from mlbert.host.errors import install_words; print(install_words('s3'))"
    done = run_quietly(sys.executable, "-c", code, cwd=tmp_path, env=environ)
    assert done.stdout == "Run: pip install 'mlbert[s3]'\n"
    assert not (tmp_path / "out").exists()

"""Where a run's code came from."""

import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

import mlbert
from mlbert.host import provenance
from mlbert.host.repository import HOMES
from programs import commit_all, run_checked, write_files

# With its own search path, and whether PyTorch was imported for it.
_PRINT_VERSION = "import mlbert; print(mlbert.__version__, 'torch' in sys.modules)"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    write_files(
        tmp_path / "benchmarks/system", dict.fromkeys(("run.sh", "hosts", "README.md"), "a\n")
    )
    commit_all(tmp_path)
    return tmp_path


def test_commit_and_dirt(checkout):
    commit, dirty = provenance.git_state(checkout)
    assert len(commit) == 40
    assert not dirty
    (checkout / "benchmarks/system/run.sh").write_text("b\n")
    assert provenance.git_state(checkout) == (commit, True)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        *((name, False) for name in ("results/result_0.txt", "systems/mine.json", "notes.txt")),
        *((f"benchmarks/system/{name}", False) for name in ("hosts", "README.md", "model.pt")),
        *((f"benchmarks/system/{name}", True) for name in ("new folder/mine.py", "config_x.sh")),
    ],
)
def test_only_code_and_settings_are_a_change(name, counts, checkout):
    write_files(checkout, {name: "b\n"})
    assert provenance.git_state(checkout)[1] == counts


def test_an_export_states_its_commit(tmp_path):
    (tmp_path / provenance.SOURCE_STATEMENT).write_text(
        json.dumps({"commit": "abc", "dirty": True})
    )
    assert provenance.git_state(tmp_path) == ("abc", True)


def test_files_name_themselves_where_nothing_else_does(checkout, monkeypatch):
    inner = checkout / "inner"
    package = inner / provenance.PACKAGE_HOME
    write_files(
        inner, {f"{provenance.PACKAGE_HOME}/a.py": "a = 1\n", provenance.SOURCE_STATEMENT: "[]"}
    )
    # A folder inside another checkout is not that checkout.
    before, modified = provenance.git_state(inner)
    assert re.fullmatch("tree:sha256:[0-9a-f]{64}", before)
    assert not modified
    (package / "a.py").write_text("a = 2\n")
    after = provenance.git_state(inner)[0]
    assert after != before
    (package / "a.py").rename(package / "b.py")
    assert provenance.git_state(inner)[0] not in (before, after)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert provenance.git_state(checkout)[0].startswith("tree:sha256:")


def test_the_digest_covers_every_package_and_is_the_same_for_a_wheel(tmp_path):
    source = tmp_path / "source"
    wheel = tmp_path / "wheel"
    for package, home in HOMES.items():
        write_files(source / home, {"a.py": f"# {package}\n"})
        write_files(wheel / package, {"a.py": f"# {package}\n"})
    (wheel / "numpy").mkdir()
    (wheel / "numpy/a.py").write_text("# not ours\n")
    before = provenance.tree_digest(source)
    assert provenance.tree_digest(wheel) == before
    for home in HOMES.values():
        path = source / home / "a.py"
        text = path.read_text()
        path.write_text("# another\n")
        assert provenance.tree_digest(source) != before
        path.write_text(text)


def test_only_installed_packages_have_a_version():
    versions = provenance.package_versions()
    assert {"torch", "numpy", "mlperf-logging"} <= set(versions)
    assert "unknown" not in versions.values()


def test_names_in_the_tree(tmp_path):
    module = Path(provenance.__file__)
    home = provenance.tree_root() / "benchmarks/bert/implementations/pytorch/mlbert/host"
    assert (home / "provenance.py").samefile(module)
    assert provenance.tree_relative(module) == f"{provenance.PACKAGE_HOME}/host/provenance.py"
    front_end = HOMES["mosaic_yaml"]
    root = provenance.tree_root()
    assert provenance.tree_relative(root / front_end / "a.py") == f"{front_end}/a.py"
    assert provenance.tree_relative(root / "mosaic_yaml/a.py") == "mosaic_yaml/a.py"
    assert provenance.tree_relative(tmp_path / "b" / ".." / "a.sh", tmp_path) == "a.sh"
    assert provenance.tree_relative(Path("/etc/a.sh"), tmp_path) == "/etc/a.sh"


def test_the_version_is_that_of_the_metadata_or_of_the_checkout(tmp_path, tree_root):
    package = Path(mlbert.__file__).parent
    standard = [str(Path(json.__file__).parents[1]), *(p for p in sys.path if "lib-dynload" in p)]

    def found(home: Path) -> str:
        code = f"import sys; sys.path[:] = {[str(home), *standard]}; {_PRINT_VERSION}"
        return run_checked(sys.executable, "-I", "-c", code).stdout

    stated = tomllib.loads((tree_root / "pyproject.toml").read_text())["project"]["version"]
    assert found(package.parent) == f"{stated} False\n", "a checkout that is not installed"
    installed = tmp_path / "installed"
    shutil.copytree(package / "host", installed / "mlbert/host")
    shutil.copy(package / "__init__.py", installed / "mlbert")
    assert found(installed) == "unknown False\n"
    metadata = installed / "mlbert-9.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mlbert\nVersion: 9.9\n")
    assert found(installed) == "9.9 False\n"
    with pytest.raises(AttributeError):
        mlbert.no_such_name  # noqa: B018

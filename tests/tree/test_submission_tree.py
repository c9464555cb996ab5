"""Results, system descriptions and pinned versions."""

import json
import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mlaudit.call_sites import Sources
from mlaudit.logs import read_log
from mlaudit.result_set import NAMES
from mlaudit.seal import SUMS
from mlbert.host.system_description import FIELDS

RUNS = 10


def test_descriptions_have_the_fields_of_the_official_checker_and_results(tree_root: Path) -> None:
    assert len(FIELDS) == 33
    for path in sorted((tree_root / "systems").glob("*.json")):
        system = json.loads(path.read_text())
        assert set(system) >= set(FIELDS), path.name
        assert all(isinstance(system[name], str) for name in set(FIELDS)), path.name
        assert (tree_root / "results" / path.stem / "bert/result_0.txt").is_file()
        assert "FILL IN" not in path.read_text()


def test_templates_are_not_valid_descriptions(tree_root: Path) -> None:
    templates = sorted((tree_root / "systems/templates").iterdir())
    assert templates
    for path in templates:
        system = json.loads(path.read_text())
        assert set(system) == set(FIELDS), path.name
        assert system["status"].startswith("FILL IN"), path.name
        assert not (tree_root / "systems" / path.name).exists()
        assert not (tree_root / "results" / path.stem).exists()


def test_every_result_folder_has_ten_logs_and_a_system_file(tree_root: Path) -> None:
    for folder in sorted(path for path in (tree_root / "results").iterdir() if path.is_dir()):
        assert (tree_root / "systems" / f"{folder.name}.json").is_file()
        names = {path.name for path in folder.iterdir()}
        sealed = {f"run_{i}.{name}" for i in range(RUNS) for name in NAMES} | {SUMS}
        assert names in ({"bert"}, {"bert", *sealed})
        logs = {path.name for path in (folder / "bert").glob("result_*.txt")}
        assert logs == {f"result_{i}.txt" for i in range(RUNS)}


def test_log_lines_refer_to_files_of_their_commit(tree_root: Path) -> None:
    for log in sorted((tree_root / "results").glob("*/bert/result_*.txt")):
        events = [
            json.loads(event)
            for event in re.findall(r"^.*?:::MLLOG (.*)$", log.read_text(), re.MULTILINE)
        ]
        files = {event["metadata"]["file"] for event in events}
        sources = Sources(tree_root, read_log(log))
        if (tree_root / ".git").exists():
            assert sources.gap is None
            assert all(sources.text(name) for name in files), (log.name, files)


def test_pages_with_results_say_that_they_are_not_verified(readme: Path) -> None:
    text = readme.read_text()
    if re.search(r"results?/|result_\d|time to train", text):
        assert "Result not verified by MLCommons Association." in text


def test_every_installed_package_is_pinned(tree_root: Path) -> None:
    lines = [
        line
        for line in (tree_root / "constraints.txt").read_text().splitlines()
        if line and line[0] != "#"
    ]
    assert all(
        re.fullmatch(r"[a-z0-9-]+==[\w.]+(; python_version [<>]=? \"3\.\d+\")?", line)
        for line in lines
    )
    here = [one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate()]
    pinned = {one.name: str(one.specifier).removeprefix("==") for one in here}
    project = tomllib.loads((tree_root / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    # 400 MB that the tests do not need: only the package itself is pinned.
    done = {canonicalize_name(Requirement(text).name) for text in extras.pop("nvidia-dali")}
    assert done <= set(pinned)
    groups = [project["project"]["dependencies"], *extras.values()]
    todo = [Requirement(text) for group in groups for text in group]
    while todo:
        required = todo.pop()
        name = canonicalize_name(required.name)
        if (
            name in done
            or name == "mlbert"
            or (required.marker and not required.marker.evaluate({"extra": ""}))
        ):
            continue
        done.add(name)
        assert name in pinned, f"{name} is missing from constraints.txt"
        assert required.specifier.contains(pinned[name]), (
            f"constraints.txt has {name}=={pinned[name]}, not {required}"
        )
        try:
            todo += [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:
            pytest.fail(f"{name} is not installed")
    assert pinned["torch"] == "2.13.0"
    assert set(pinned) <= done | {"setuptools"}, "constraints.txt pins packages that nothing needs"

"""Templates of descriptions never pass for descriptions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mlbert.mlperf import official
from mlbert.mlperf.check import check
from mlbert.mlperf.describe import FIELDS, MARK, template, unfilled
from mlbert.mlperf.findings import Outcome

NewTree = Callable[..., Path]


def test_a_template_has_every_field_and_names_what_is_missing() -> None:
    made = template({"number_of_nodes": "8", "division": "closed"})
    assert tuple(made) == FIELDS
    assert made["number_of_nodes"] == "8"
    assert set(unfilled(made)) == set(FIELDS) - {"number_of_nodes", "division"}
    assert all(value.startswith(MARK) for name, value in made.items() if name in unfilled(made))


def test_nothing_unknown_can_be_known() -> None:
    with pytest.raises(AssertionError):
        template({"colour": "red"})


def test_the_official_checker_refuses_a_template(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(template({"number_of_nodes": "1", "accelerators_per_node": "8"})))
    assert official.run(official.system_desc_checker(path, "machine.json"))[0].outcome is Outcome.ERROR


def test_a_tree_with_templates_passes_and_one_that_uses_them_does_not(tmp_path: Path, new_tree: NewTree) -> None:
    tree = new_tree(tmp_path / "tree", "open")
    folder = tree / "systems" / "templates"
    folder.mkdir()
    (folder / "other.json").write_text(json.dumps(template({})))
    wrong = {finding.check for finding in check(tree) if finding.outcome is not Outcome.PASS}
    assert wrong <= {"rcp_checker", "own: program"}  # for the closed division, and a note that a bare logger wrote it
    system = tree / "systems" / "machine.json"
    system.write_text(json.dumps(json.loads(system.read_text()) | {"cooling": template({})["cooling"]}))
    layout = next(finding for finding in check(tree) if finding.check == "own: layout")
    assert layout.outcome is Outcome.ERROR
    assert f"systems/machine.json still says {MARK} in cooling" in layout.words

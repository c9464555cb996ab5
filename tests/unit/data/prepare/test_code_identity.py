"""A step is finished only by the code that began it."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

import mlbert
from mlbert.data.prepare.code_identity import C_SOURCES, code_identity
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.finished_output import WORK_FOLDER
from mlbert.data.prepare.shares import Share
from mlbert.data.prepare.shuffle import Packing, shuffle_set
from mlbert.data.prepare.step_tasks import PLAN, SHARED
from mlbert.host import native
from mlbert.host.json_files import add_checksum, parse_checksummed
from programs import run_quietly
from step_shares import run_share
from stored_sets import tree
from user_errors import assert_error_line, user_error

PACKAGE = Path(mlbert.__file__).parent


def pack(source: Path, out: Path, executor: Executor) -> None:
    shuffle_set(source, out, packing=Packing(), num_shards=5, executor=executor)


def copy_package(folder: Path, changed: str) -> Path:
    """Copy the package with its C sources, append a comment to a file,
    and return the folder for PYTHONPATH.
    """
    shutil.copytree(PACKAGE, folder / "mlbert", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(native.SOURCE_FOLDER, folder / "csrc" / "cpu")
    with (folder / changed).open("a") as file:
        file.write("// changed\n" if changed.endswith(".c") else "# changed\n")
    return folder


def run_pack(package: Path, source: Path, out: Path, *words: str) -> tuple[int, str]:
    """Run ``mlbert prepare pack`` with a copy of the package;
    return its status and the lines of its errors.
    """
    environment = os.environ | {"PYTHONPATH": str(package)}
    command = [sys.executable, "-m", "mlbert", "prepare", "pack", "--workers", "1"]
    done = run_quietly(*command, "--input", source, "--out", out, *words, env=environment)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("changed", "is_refused"),
    [
        ("mlbert/data/formats/packing.py", True),
        ("csrc/cpu/instances.c", True),
        ("mlbert/training/loop.py", False),
    ],
)
def test_code_that_decides_bytes_must_be_that_of_the_first_share(
    source, tmp_path, changed, is_refused
):
    other = copy_package(tmp_path / "other", changed)
    out = tmp_path / "out"
    run_share(pack, source, out, 0, 2)
    before = tree(out)
    status, errors = run_pack(other, source, out, "--task", "1/2", "--shards", "5")
    assert status == (2 if is_refused else 0), errors
    if is_refused:
        assert_error_line(errors, "prepare.other-version", out, wording=False)
        assert tree(out) == before


def rewrite_plan(out: Path, **changes: object) -> None:
    """Change entries of a plan, or remove those that are None, with a new checksum."""
    path = out / WORK_FOLDER / PLAN
    plan = {**parse_checksummed(path.read_text()), **changes}
    kept = {name: value for name, value in plan.items() if value is not None}
    path.write_text(json.dumps(add_checksum(kept)))


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_step_that_other_code_began_is_refused(source, tmp_path, is_shared):
    out = tmp_path / "out"
    run_share(pack, source, out, 0, 2)
    if not is_shared:
        (out / WORK_FOLDER / SHARED).unlink()
    shares = [Share()]
    if is_shared:
        shares += [Share.only_merge(), Share(1, 2, merges=False)]
    identity = {**code_identity(), "code": "0" * 64, "unicode": "1.0"}
    for made_by in (None, identity, {**identity, "tool": "mlbert 0.0.1"}):
        rewrite_plan(out, made_by=made_by)
        before = tree(out)
        for share in shares:
            with user_error("prepare.other-version", out, wording=False) as caught:
                pack(source, out, Executor(share=share))
            begun_by = "an earlier version" if made_by is None else made_by["tool"]
            assert f"was begun by {begun_by}" in str(caught.value)
        assert tree(out) == before
    (out / WORK_FOLDER / PLAN).write_text("{}")
    with user_error("data.damaged", PLAN):
        pack(source, out, Executor(share=Share(1, 2, merges=False)))


def test_the_identity_of_code_covers_every_c_source():
    found = set()
    for folder in ("formats", "prepare"):
        for module in (PACKAGE / "data" / folder).rglob("*.py"):
            found |= {*re.findall(r'"(\w+\.c)"', module.read_text())}
    for name in [*found]:
        found |= {*re.findall(r'#include "(.*)"', (native.SOURCE_FOLDER / name).read_text())}
    assert found == {*C_SOURCES}

"""The auditor needs no tensor library and none of the training code, and states the same rules."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from audit import OURS, TREE, system_of
from mlaudit import keys, rules
from mlbert.mlperf import keys as training_keys
from mlbert.mlperf import rules as training_rules

PUBLISHED = Path(__file__).parents[2] / "assets/published_logs/2xXE9712x4GB200.tar.xz"
# Prints the modules that importing the check loads.
IMPORTS = """
import json, sys
import mlaudit.check
print(json.dumps(sorted(sys.modules)))
"""
# The command line, in an installation without the extra `train`.
WITHOUT_TORCH = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "tensorflow", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from mlaudit.cli.main import main
main(sys.argv[1:])
"""


def run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_importing_the_check_loads_neither_torch_nor_the_training_code() -> None:
    loaded = json.loads(run(IMPORTS).stdout)
    assert "mlaudit.check" in loaded
    heavy = ("torch", "tensorflow", "mlbert.training", "mlbert.recipes", "mlbert.models")
    assert [name for name in loaded if name.startswith(heavy)] == []


def test_logs_of_others_and_of_ours_are_checked_without_torch(tmp_path: Path) -> None:
    with tarfile.open(PUBLISHED) as packed:
        packed.extractall(tmp_path, filter="data")
    (published,) = tmp_path.rglob("result_0.txt")
    ours = TREE / "results" / OURS / "bert" / "result_0.txt"
    assert system_of([ours]).is_file()
    done = run(WITHOUT_TORCH, "check", published, ours, "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "passed"


@pytest.mark.parametrize(
    "name",
    [
        "BENCHMARK",
        "UNVERIFIED",
        "TARGET_MLM_ACCURACY",
        "INITIAL_MLM_ACCURACY",
        "NUM_EVAL_SAMPLES",
    ],
)
def test_the_auditor_and_the_training_program_state_the_same_rules(name: str) -> None:
    assert getattr(rules, name) == getattr(training_rules, name)


@pytest.mark.parametrize("batch", [64, 256, 448, 768, 4096, 6144, 8192, 12288, 16384, 20000])
def test_both_have_the_same_grid_and_reference_points(batch: int) -> None:
    assert rules.eval_interval(batch) == training_rules.eval_interval(batch)
    ours = rules.reference_point(batch)
    theirs = training_rules.reference_point(batch)
    if theirs is None:
        assert ours is None
        return
    assert ours is not None
    assert ours.global_batch_size == theirs.global_batch_size
    assert ours.mean_samples == pytest.approx(theirs.mean_samples, rel=1e-9)
    assert ours.min_mean_samples == pytest.approx(theirs.min_mean_samples, rel=1e-9)


def test_both_name_the_same_keys() -> None:
    assert sorted(keys.CLOSED_KEYS) == sorted(training_keys.CLOSED_KEYS)
    assert keys.ELAPSED == training_keys.ELAPSED

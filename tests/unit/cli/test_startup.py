"""What a command imports before it has anything to do: help, plans and mistakes need no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CODE = """
import sys
from mlbert.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert end.code in (None, 0, 2), end.code
heavy = {"torch", "tensorflow", "transformers", "matplotlib", "scipy"} & set(sys.modules)
sys.exit(f"imported: {heavy}" if heavy else 0)
"""
DEMO = "source benchmarks/bert/implementations/cpu_demo/config_cpu_1x1x32x1_demo.sh && env -0"


def demo_exports() -> dict[str, str]:
    done = subprocess.run(["bash", "-c", DEMO], cwd=ROOT, capture_output=True, text=True, check=True)
    return dict(entry.split("=", 1) for entry in done.stdout.split("\0") if "=" in entry)


def run(words: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", CODE, *words]
    return subprocess.run(words, capture_output=True, text=True, env=environ, check=False)


@pytest.mark.parametrize("words", [["train", "--help"], ["train", "--seeed=1"]], ids=" ".join)
def test_help_and_mistakes_import_no_heavy_library(words: list[str]) -> None:
    done = run(words, dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert ("[config.unknown-name]" in done.stderr) == ("error:" in done.stderr) == ("--seeed=1" in words)


def test_a_plan_imports_no_heavy_library(tmp_path: Path) -> None:
    """Unless starting weights must be opened; the data is read with numpy alone."""
    done = run(["train", "--print-config", "--synthetic_data", "1", "--output_dir", str(tmp_path)], demo_exports())
    assert done.returncode == 0, done.stderr
    assert "data and model shape: synthetic" in done.stdout

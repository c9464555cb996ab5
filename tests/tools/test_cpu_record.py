"""The record of a processor is complete, and a busy machine gets none."""

import json
import subprocess
import sys

import pytest
import torch

import cpu_record
import cpu_record_page
import op_shares
from cpu_cells import COMPARE, PARTS, SWEEP, Cell, cells_of
from mlbert.programs.bench import expert


def test_a_cell_is_found_by_its_name():
    cells = cells_of(8, ["float32", "bfloat16"])
    assert [Cell.named(cell.name) for cell in cells] == cells
    swept = {(cell.threads, cell.sequences) for cell in cells if cell.kind == SWEEP}
    assert {threads for threads, _ in swept} == {1, 2, 8}
    assert {sequences for _, sequences in swept} == {8, 32, 128}


@pytest.mark.parametrize(
    ("operator", "part"),
    [
        ("aten::addmm", op_shares.PRODUCTS),
        ("_NativeAttentionBackward", op_shares.ATTENTION),
        ("_DropoutNorm", op_shares.NORMS),
        ("aten::copy_", op_shares.NORMS),
        ("_CrossEntropy", op_shares.LOSS),
        ("_EmbeddingSumBackward", op_shares.EMBEDDING),
        ("aten::linear", op_shares.PYTHON),
        ("optimizer", op_shares.OPTIMIZER),
    ],
)
def test_each_operator_has_a_part(operator, part):
    assert op_shares.part_of(operator) == part


@pytest.mark.slow
def test_the_page_has_what_was_measured(monkeypatch):
    monkeypatch.setattr(expert, "_COMPILED", (False,))
    monkeypatch.setattr(expert, "TRIALS", 1)
    threads = torch.get_num_threads()
    records = {}
    for kind in (COMPARE, PARTS, SWEEP):
        cell = Cell("demo", "float32", kind, threads, 8)
        facts = cpu_record.facts_of_run(seconds=1.0, others=0.0)
        records[cell] = {**json.loads(json.dumps(cpu_record.measure(cell))), **facts}
    parts = records[Cell("demo", "float32", PARTS, threads, 8)]
    total = sum(parts["part_seconds"].values())
    assert total == pytest.approx(parts["profiled_seconds"], rel=0.02)
    assert min(parts["part_seconds"].values()) > 0
    compared = records[Cell("demo", "float32", COMPARE, threads, 8)]
    page = cpu_record_page.page(records)
    for name in ("huggingface", "expert"):
        assert f"{compared['ratios'][name]['ratio']:.2f} (" in page
    assert f"| {1e3 * parts['step_seconds']:.1f} |" in page


def test_a_busy_machine_is_refused(tmp_path, capsys):
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        status = cpu_record.main(["--out", str(tmp_path)])
        other.kill()
    assert status == 2
    errors = capsys.readouterr().err
    assert "other programs use" in errors
    assert len(errors.splitlines()) == 1
    assert not list(tmp_path.iterdir())

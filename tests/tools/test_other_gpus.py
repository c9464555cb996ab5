"""The table of other GPUs in docs/gpu.md: which kernels compile,
and the errors for what is not supported.
"""

import re
from pathlib import Path

import pytest
import torch

import compile_kernels
import mlbert
from mlbert.ops.precision import fp8_products
from programs import RunMlbert
from user_errors import user_error

TRITON = Path(mlbert.__file__).parent / "ops" / "triton"


@pytest.fixture(scope="module")
def table(tree_root: Path) -> dict[str, list[str]]:
    section = (tree_root / "docs" / "gpu.md").read_text().partition("## Other GPUs")[2]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line[:2] == "| "
    ]
    return {row[0].partition(",")[0]: row[1:] for row in rows[1:]}


@pytest.mark.parametrize(("gpu", "arch"), [("A100", 80), ("B200", 100), ("RTX 5090", 120)])
def test_kernels_compile_as_the_table_says(
    gpu: str, arch: int, table: dict[str, list[str]]
) -> None:
    compiled = [case for case in ("LAMB", "cast fp8") if compile_kernels.compile_case(case, arch)]
    assert compiled == (["LAMB"] if gpu == "A100" else ["LAMB", "cast fp8"])
    assert table[gpu][0] == ("all but FP8" if gpu == "A100" else "all")


def test_kernels_with_nvidia_assembly_are_unavailable_on_rocm(table: dict[str, list[str]]) -> None:
    """The helpers in mask.py that contain such assembly are used by attention only."""
    with_assembly = {
        path.stem for path in TRITON.glob("*.py") if "inline_asm_elementwise" in path.read_text()
    }
    assert with_assembly == {"fp8_copies", "gelu", "mask"}
    users = {
        path.stem
        for path in TRITON.glob("*.py")
        if re.search(r"keep_signs|pack_masks|copied_signs|select_pairs", path.read_text())
    }
    assert all("attention" in stem for stem in users - {"mask"})
    assert len(users) > 1
    assert table["MI300X"][0] == "all but attention with dropout and FP8"


def test_fp8_without_hardware_support_is_an_error(
    table: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    with user_error("device.unavailable", wording=False) as error:
        fp8_products("fp8", torch.device("cuda"))
    assert f"`{error.value}" in table["A100"][1]


@pytest.mark.parametrize(
    ("gpu", "words"), [("A100", "--gpu a100 --precision fp8"), ("RTX 5090", "--gpu rtx5090")]
)
def test_plan_prints_the_errors_in_the_table(
    gpu: str, words: str, table, run_mlbert: RunMlbert
) -> None:
    status, _, error = run_mlbert("plan", "--gpus", 8, *words.split())
    assert status == 2
    assert f"`{error.removeprefix('mlbert: error: ').partition('. ')[0]}`" in table[gpu][2]


def test_plan_estimates_b200_and_mi300x(table: dict[str, list[str]], run_mlbert: RunMlbert) -> None:
    for gpu, precision in (("b200", "fp8"), ("mi300x", "bf16")):
        status, out, _ = run_mlbert("plan", "--gpus", 8, "--gpu", gpu, "--precision", precision)
        assert (status, "FP8 products" in out) == (0, precision == "fp8")
    assert table["B200"][2] == "both precisions"
    assert table["MI300X"][2].startswith("estimated from its peak")

"""The CUDA attention of csrc/fmha without a GPU: its sources are compiled as C++ for an emulated
GPU.

The emulation (csrc/fmha/emulation) checks every access to shared memory. If nvcc is installed, the
sources are also compiled with it.
"""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emulated_fmha import CSRC, compile_emulated, compile_fmha
from mlbert.ops import api as ops
from mlbert.ops import dropout, fmha, reference
from mlbert.ops.attention import FMHA_HEAD_SIZE
from unit.ops.conftest import check_attention_mask, check_errors
from unit.ops.op_inputs import packed_qkv, with_float32_slopes
from user_errors import user_error

KEY = dropout.dropout_key(1, 2, 3, 4)
# Blocks process 128 queries or keys, 32 per warp, in tiles of 64 keys (forward)
# or 32 queries (backward).
LENGTHS = ([1], [15, 16, 17], [63, 64, 65], [127, 128, 130], [0, 20, 0, 33, 0], [0, 0])


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("fmha") / "libfmha.so"
    compile_fmha(path)
    library = fmha.load(path)
    library.emulation_reports.restype = ctypes.c_char_p
    return library


@pytest.fixture
def reports(emulated: ctypes.CDLL) -> Iterator[Callable[[], str]]:
    """Use the emulated kernels; return and clear their error reports by call.

    The test fails if any are left.
    """

    def take() -> str:
        return emulated.emulation_reports().decode()

    fmha.use(emulated)
    yield take
    fmha.use(None)
    emulated.emulation_skip(b"", 0)
    assert take() == ""


def inputs(
    lengths: list[int], num_heads: int, probability: float, tail: int = 2, alibi: bool = False
) -> list[object]:
    """Return arguments of attention; `tail` unused tokens follow the last sequence."""
    qkv, bounds, longest, rows = packed_qkv(lengths, num_heads, FMHA_HEAD_SIZE, tail)
    slopes = torch.linspace(0.1, 0.9, num_heads) if alibi else None
    return [qkv, bounds, longest, probability, KEY, rows, slopes]


@pytest.mark.parametrize(
    ("lengths", "num_heads", "probability", "alibi", "dtype"),
    [
        *((lengths, 1, p, False, torch.bfloat16) for lengths in LENGTHS for p in (0.0, 0.1)),
        *(([33, 7, 70], num_heads, 0.1, True, torch.float16) for num_heads in (2, 3)),
        (
            [511],
            1,
            0.1,
            True,
            torch.bfloat16,
        ),  # the gradient of Q is summed over four blocks of keys
    ],
)
def test_error(reports, lengths, num_heads, probability, alibi, dtype):
    form = with_float32_slopes(fmha.attention)
    check_errors(
        "attention", inputs(lengths, num_heads, probability, alibi=alibi), dtype, [0], form
    )


@pytest.mark.parametrize("probability", [0.1, 0.6])  # thresholds below and above 128
def test_dropout_mask_equals_the_reference(reports, probability):
    check_attention_mask(fmha.attention, 140, 2, FMHA_HEAD_SIZE, torch.bfloat16, probability)


def output_and_gradient(arguments: list[object]) -> tuple[Tensor, Tensor]:
    """Run attention forward and backward in bfloat16."""
    qkv = arguments[0].bfloat16().requires_grad_()
    out = fmha.attention(qkv, *arguments[1:])
    out.backward(torch.ones_like(out))
    return out.detach(), qkv.grad


def test_runs_are_bit_equal_also_with_a_key_on_the_device(reports):
    arguments = inputs([40], 2, 0.1)
    out, gradient = output_and_gradient(arguments)
    for key in (KEY, torch.tensor(KEY, dtype=torch.uint32).view(torch.int32)):
        assert all(
            map(
                torch.equal,
                output_and_gradient([*arguments[:4], key, *arguments[5:]]),
                (out, gradient),
            )
        )


def test_very_negative_scores(reports):
    """A kernel that forgets to mask the keys after the end overflows."""
    arguments = inputs([20], 1, 0.0, tail=0)
    arguments[0][:, 0] = 20.0
    arguments[0][:, 1] = -20.0
    assert all(result.isfinite().all() for result in output_and_gradient(arguments))


def test_unsupported_cases_equal_the_reference(reports):
    qkv, bounds, longest, *rest = inputs([30], 2, 0.1)
    for x, most in ((qkv, longest), (qkv[..., :32].bfloat16(), longest), (qkv.bfloat16(), 513)):
        want = reference.attention(x, bounds, longest, *rest)
        assert torch.equal(fmha.attention(x, bounds, most, *rest), want)


def barriers_and_waits() -> list[tuple[str, int]]:
    """Return the file and line of every barrier and every wait for copies."""
    return [
        (path.name, number)
        for path in (CSRC / "forward.cu", CSRC / "backward.cu")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"__syncthreads\(|wait_for_copies", line)
    ]


@pytest.mark.parametrize(("name", "line"), barriers_and_waits())
def test_removing_a_barrier_or_wait_is_reported(emulated, reports, name, line):
    arguments = inputs([140], 1, 0.1)
    output_and_gradient(arguments)
    assert reports() == ""
    emulated.emulation_skip(str(CSRC / name).encode(), line)
    output_and_gradient(arguments)
    missed = reports()
    is_wait = "wait_for_copies" in (CSRC / name).read_text().splitlines()[line - 1]
    assert ("is under way" if is_wait else "without a barrier") in missed
    assert name.partition(".")[0] in missed or "tiles.cuh:" in missed


@pytest.mark.slow
def test_memory_under_address_sanitizer(tmp_path):
    """Kernels write all results and stay within buffers of exactly the documented sizes,
    in both types.
    """
    program = tmp_path / "sweep"
    source = Path(__file__).with_name("fmha_sweep.cpp")
    compile_emulated(program, source, "-fsanitize=address")
    done = subprocess.run([program, "0", "17", "129"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "all written\n"), done.stderr


@pytest.mark.slow
def test_nvcc_compiles_without_spills(tree_root, tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    target = tmp_path / "cache" / "fmha.so"
    done = subprocess.run(
        [tree_root / "tools/build_cuda.sh", target], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    text = done.stdout + done.stderr
    kernels = re.findall(r"(forward|backward)_kernel\S+ for '(sm_\d+)'", text)
    wanted = {
        (name, arch) for name in ("forward", "backward") for arch in ("sm_80", "sm_90", "sm_100")
    }
    assert set(kernels) == wanted
    assert len(kernels) == 2 * len(wanted)  # two types
    spills = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text
    )
    assert spills == [("0", "0", "0")] * len(kernels)
    assert [path.name for path in target.parent.iterdir()] == ["fmha.so"]
    fmha.load(target)


def test_missing_or_damaged_library_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Bypass the result that other tests cached.
    monkeypatch.setattr(fmha, "_built", fmha._built.__wrapped__)
    with user_error("ops.unavailable", "OPS=fmha"):
        ops.select("fmha", "cuda")
    fmha.library_path().parent.mkdir()
    fmha.library_path().write_bytes(b"no library")
    with user_error("ops.unavailable", "OPS=fmha", wording=False):  # the dynamic linker's wording
        ops.select("fmha", "cuda")


def test_build_without_nvcc_is_a_one_line_error(tree_root):
    command = [tree_root / "tools/build_cuda.sh"]
    environment = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "no nvcc on PATH" in done.stderr

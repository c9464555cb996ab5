"""Matrix products through cublasLt, with `cublaslt_emulator.c` in place of NVIDIA's library.

If NVIDIA's header or library is installed, our declarations and descriptors are checked against it.
"""

import contextlib
import ctypes
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mlbert.host import native
from mlbert.host.native import MHALIB_FOLDER
from mlbert.ops import cublaslt_library
from mlbert.ops.cublaslt_library import CublasLtError, Epilogue, Library
from mlbert.ops.fp8_scaling import GRADIENT, WEIGHT, FP8Scaling, Products
from unit.ops.op_inputs import randn

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")
INCLUDE_FOLDERS = [
    *Path("/usr/local").glob("cuda*/include"),
    *(
        Path(folder) / "nvidia" / name / "include"
        for folder in sys.path
        for name in ("cu13", "cublas", "cuda_runtime")
    ),
]

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc on PATH")


def test_problem_is_planned_once(emulator):
    out = torch.empty(5, 8)
    left = randn(5, 16)
    right = randn(16, 8)
    bias = randn(8)
    for _ in range(3):
        assert emulator.library.product(out, left, right, epilogue=Epilogue.BIAS, bias=bias)
        torch.testing.assert_close(out, left @ right + bias)
        right.copy_(randn(16, 8))
    assert emulator.library.plans_made(CPU) == emulator.count("heuristics") == 1
    for other in ({}, {"epilogue": Epilogue.GELU_BIAS, "bias": bias}):
        assert emulator.library.product(out, left, right, **other)
    assert emulator.library.product(out[:4], left[:4], right)
    unaligned = torch.cat([left.flatten(), randn(1)])[1:].view(5, 16)
    assert emulator.library.product(out, unaligned, right)
    assert emulator.library.plans_made(CPU) == emulator.count("heuristics") == 5
    assert emulator.count("products") == 7


def test_old_plans_are_evicted(emulator):
    """A problem whose plan was evicted is planned again."""
    # the limit is 2048 plans
    left = torch.ones(3000, 8)
    right = torch.ones(8, 8)
    for rows in range(1, 3001):
        assert emulator.library.product(torch.empty(rows, 8), left[:rows], right)
    assert emulator.count("living") < 3000 * 5
    out = torch.empty(1, 8)
    assert emulator.library.product(out, left[:1], right)
    assert (out == 8).all()


def test_unsupported_problem_is_looked_up_once(emulator):
    emulator.refuse(Epilogue.NONE)
    out = torch.empty(3, 8)
    left = torch.ones(3, 8)
    right = torch.ones(8, 8)
    with pytest.warns(RuntimeWarning, match="no algorithm"):
        assert not emulator.library.product(out, left, right)
    assert not emulator.library.product(out, left, right)
    assert emulator.count("heuristics") == 1


def test_product_that_the_library_rejects_is_unsupported(emulator):
    """NVIDIA's library rejects FP8 scales that are not 16-byte aligned,
    but its heuristic does not check them.
    """
    factors = FP8Scaling(2, Products()).inverse
    out = torch.empty(16, 16, dtype=torch.bfloat16)
    ones = torch.ones(16, 16).to(torch.float8_e4m3fn)
    scales = {"inverse_left": factors[1, WEIGHT], "inverse_right": factors[0, GRADIENT]}
    assert emulator.library.product(out, ones, ones, right_transposed=True, **scales)
    assert (out == 16.0).all()
    scales["inverse_left"] = torch.ones(2)[1]
    with pytest.warns(RuntimeWarning, match="no algorithm"):
        assert not emulator.library.product(out, ones, ones, right_transposed=True, **scales)


def test_other_errors_are_raised_once(emulator):
    out = torch.empty(3, 8)
    left = torch.ones(3, 8)
    right = torch.ones(8, 8)
    emulator.fail_next(13)
    with pytest.raises(CublasLtError, match=r"EXECUTION_FAILED for 3x8x8, torch.float32"):
        emulator.library.product(out, left, right)
    assert emulator.library.product(out, left, right)
    with pytest.raises(CublasLtError, match="INVALID_VALUE"):
        emulator.library.product(out, left, right, epilogue=Epilogue.BIAS)
    assert "bias" in emulator.complaint


def test_threads_share_a_device(emulator):
    """Threads create and use plans concurrently with the same results as one thread."""
    problems = [(randn(rows, 16), randn(16, 24), randn(24)) for rows in range(1, 33)] * 4

    def multiply(problem: tuple[Tensor, ...]) -> Tensor:
        left, right, bias = problem
        out = torch.empty(left.shape[0], right.shape[1])
        assert emulator.library.product(out, left, right, epilogue=Epilogue.GELU_BIAS, bias=bias)
        return out

    alone = [multiply(problem) for problem in problems]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(multiply, problems))
    assert all(map(torch.equal, alone, together))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("left_transposed", [False, True])
@pytest.mark.parametrize("right_transposed", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_layouts(emulator, dtype, left_transposed, right_transposed, wide):
    left = randn(5, 11).to(dtype)
    right = randn(11, 8).to(dtype)
    out = torch.empty(5, 8, dtype=torch.float32 if wide else dtype)
    stored = [
        x.t().contiguous() if t else x
        for x, t in ((left, left_transposed), (right, right_transposed))
    ]
    transposed = {"left_transposed": left_transposed, "right_transposed": right_transposed}
    assert emulator.library.product(out, *stored, **transposed)
    exact = left.double() @ right.double()
    torch.testing.assert_close(
        out, exact.to(out.dtype), rtol=2 * torch.finfo(out.dtype).eps, atol=1e-6
    )


@pytest.mark.parametrize("left_type", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_operands(emulator, left_type):
    left = randn(5, 32).to(left_type)
    right = randn(16, 32).to(torch.float8_e4m3fn)
    out = torch.empty(5, 16, dtype=torch.bfloat16)
    scales = {"inverse_left": torch.tensor(0.25), "inverse_right": torch.tensor(2.0), "fast": True}
    assert emulator.library.product(out, left, right, right_transposed=True, **scales)
    exact = (left.double() / 4) @ (right.double() * 2).t()
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-6)


def test_fp8_output_with_gelu(emulator):
    """The output is scaled, amax is its largest magnitude before scaling,
    and the pre-activation is in bfloat16.
    """
    left, right = (randn(rows, 32).to(torch.float8_e4m3fn) for rows in (5, 16))
    bias = randn(16).bfloat16()
    amax = torch.zeros(())
    out = torch.empty(5, 16).to(torch.float8_e4m3fn)
    aux = torch.empty(5, 16).bfloat16()
    options = {"epilogue": Epilogue.GELU_AUX_BIAS, "bias": bias, "aux": aux, "amax_out": amax}
    scale = torch.tensor(16.0)
    assert emulator.library.product(
        out, left, right, right_transposed=True, scale_out=scale, **options
    )
    pre = left.double() @ right.double().t() + bias.double()
    exact = torch.nn.functional.gelu(pre, approximate="tanh")
    torch.testing.assert_close(aux.double(), pre, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(amax.double(), exact.abs().max())
    torch.testing.assert_close(out.double() / 16, exact.clamp(-28, 28), rtol=2**-3, atol=2**-13)


def test_invalid_arguments_raise(emulator):
    ones = torch.ones
    left = torch.ones(3, 8)
    right = torch.ones(8, 8)
    fp8 = [ones(rows, 24).to(torch.float8_e4m3fn) for rows in (3, 16)]
    wide = ones(3, 16).bfloat16()
    aux = {"bias": ones(8), "aux": ones(2, 8)}
    for words, tensors, options in (
        ("is not", (left, left, ones(9, 8)), {}),
        (
            "bias has the wrong size",
            (left, left, right),
            {"epilogue": Epilogue.BIAS, "bias": ones(5)},
        ),
        (
            "bias has the wrong size",
            (left, left, right),
            {"epilogue": Epilogue.BGRADB, "bias": ones(5)},
        ),
        (
            "aux has the wrong shape",
            (left, left, right),
            {"epilogue": Epilogue.GELU_AUX_BIAS, **aux},
        ),
        ("contiguous", (left, ones(8, 3).t(), right), {}),
        ("multiples of 16", (wide, *fp8), {"right_transposed": True}),
        ("operands must be", (wide, fp8[0], fp8[1].t().contiguous()), {}),
    ):
        with pytest.raises(AssertionError, match=words):
            emulator.library.product(*tensors, **options)


def test_c_code_compiles_without_warnings(tmp_path):
    command = ["gcc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC"]
    command += ["-c", str(MHALIB_FOLDER / "matmul.c"), "-o", str(tmp_path / "matmul.o")]
    subprocess.run(command, check=True)


def test_python_constants_equal_the_header():
    """Those that the emulator does not check."""
    numbers = dict(re.findall(r"LT_(\w+) = (\d+)", (MHALIB_FOLDER / "cublaslt.h").read_text()))
    found = cublaslt_library._COMPUTE_FLOAT32, cublaslt_library._COMPUTE_TF32
    assert found == (int(numbers["COMPUTE_32F"]), int(numbers["COMPUTE_32F_FAST_TF32"]))


def test_declarations_equal_nvidias():
    """Needs cublasLt.h and the CUDA runtime's headers:
    a toolkit, wheels in this environment, or CPATH.
    """
    folders = [
        item for folder in INCLUDE_FOLDERS if folder.is_dir() for item in ("-isystem", str(folder))
    ]
    found = subprocess.run(
        ["gcc", *folders, "-E", "-include", "cublasLt.h", "-xc", "/dev/null"], capture_output=True
    )
    if found.returncode:
        pytest.skip("no cublasLt.h with CUDA's headers (CPATH can list their folders)")
    command = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-fsyntax-only"]
    command += [f"-I{MHALIB_FOLDER}", *folders]
    command.append(str(Path(__file__).with_name("cublaslt_interface.c")))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("epilogue", list(Epilogue))
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn])
def test_nvidias_library_accepts_the_descriptors(epilogue, dtype):
    """The only error is the missing handle, without which no device is needed."""
    for major in ("13", "12"):
        with contextlib.suppress(native.NativeUnavailable):
            library = Library(cublaslt_library.find(major))
            break
    else:
        pytest.skip("no cublasLt")
    library._contexts[CPU] = library._open()
    is_fp8 = dtype.itemsize == 1
    out_type = torch.bfloat16 if is_fp8 else dtype
    scale = torch.ones(())
    out, left, right = (torch.zeros(*shape) for shape in ((32, 48), (32, 16), (48, 16)))
    bias = torch.zeros(32 if epilogue == Epilogue.BGRADB else 48, dtype=out_type)
    options = {
        "right_transposed": True,
        "epilogue": epilogue,
        "bias": bias,
        "aux": out.to(out_type),
    }
    if is_fp8:
        options |= dict.fromkeys(
            ("inverse_left", "inverse_right", "scale_out", "amax_out"), scale
        ) | {"fast": True}
    with pytest.raises(CublasLtError, match="NOT_INITIALIZED"):
        library.product(out.to(dtype), left.to(dtype), right.to(dtype), **options)
    library.close()


def test_missing_libraries_are_reported(tmp_path):
    with pytest.raises(native.NativeUnavailable, match=r"libnothing.so: cannot open"):
        Library(tmp_path / "libnothing.so")
    with pytest.raises(native.NativeUnavailable, match="has no cublasLtMatmul"):
        Library("libm.so.6")
    if torch.version.cuda is None:
        with pytest.raises(native.NativeUnavailable, match="built without CUDA"):
            cublaslt_library.library()


def test_loaded_library_is_found_first(emulator_path, tmp_path):
    path = tmp_path / "libcublasLt.so.77"
    shutil.copy(emulator_path, path)
    assert cublaslt_library.find("77") == "libcublasLt.so.77"  # for the dynamic linker to find
    ctypes.CDLL(str(path))
    assert cublaslt_library.find("77") == str(path)

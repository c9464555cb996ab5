"""Find NVIDIA's cublasLt, manage its handles and workspaces, and compute a matrix product with it.

The C part, ``csrc/mhalib``, opens cublasLt at run time and caches one plan per problem. A handle is
created when a device is first used, a workspace when a stream is. Nothing here synchronizes with
the device, and a repeated product allocates nothing, so it can be captured in a CUDA graph.

Tensors are row-major, cublasLt is column-major: a product ``left right`` is passed as
``right^T left^T``, so cublasLt's A is `right` and its B is `left`.

Legend: R rows and C columns of the result, K the inner dimension.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mlbert.host import native

WORKSPACE_BYTES = 32 << 20
LARGEST_ALIGNMENT = 256
FIRST = 0  # choice of the heuristic's first algorithm, besides 1, 2, ...
APART = -1  # choice of a product without its epilogue, see `Library.choices`
# Required multiple of the columns if the epilogue writes or reads a pre-activation.
AUX_MULTIPLE = 8
FP8_MULTIPLE = 16  # required multiple of every size and address of an FP8 product
_TYPES = {
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
_NO_TYPE = -1
_COMPUTE_FLOAT32 = 68
_COMPUTE_TF32 = 77
_SUCCESS = 0
_NO_ALGORITHM = 1000
_STATUS = {
    1: "NOT_INITIALIZED",
    3: "ALLOC_FAILED",
    7: "INVALID_VALUE",
    8: "ARCH_MISMATCH",
    11: "MAPPING_ERROR",
    13: "EXECUTION_FAILED",
    14: "INTERNAL_ERROR",
    15: "NOT_SUPPORTED",
    16: "LICENSE_ERROR",
}
_MESSAGE_BYTES = 1024


class Epilogue(enum.IntEnum):
    """Operation on a product y = left right before it is stored. GELU is the tanh form.

    ``bias`` and ``aux`` are arguments of `Library.product`.
    """

    NONE = 1
    BIAS = 4  # y + bias [C]
    GELU_BIAS = 36  # gelu(y + bias)
    GELU_AUX_BIAS = 164  # the same, and aux [R, C] = y + bias
    DGELU_BGRAD = 208  # d = y gelu'(aux), and bias [C] = its sum over rows
    BGRADB = 512  # y, and bias [R] = the sum of left over the inner dimension


class MatmulProblem(NamedTuple):
    """Everything that determines the fastest algorithm for a product: all but the addresses.

    Attributes:
        rows, columns, inner: R, C and K.
        types: of left, right and the result.
        left_transposed, right_transposed, epilogue, fast, adds: as in `Library.product`.
        alignments: in bytes, of the addresses of result, left, right, bias and aux;
            0 for an absent tensor.
    """

    rows: int
    columns: int
    inner: int
    types: tuple[torch.dtype, torch.dtype, torch.dtype]
    left_transposed: bool
    right_transposed: bool
    epilogue: Epilogue
    fast: bool
    adds: bool
    alignments: tuple[int, ...]

    def __str__(self) -> str:
        types = " ".join(str(dtype).removeprefix("torch.") for dtype in self.types)
        options = (self.left_transposed, self.right_transposed, self.fast, self.adds)
        flags = "".join(str(int(option)) for option in options)
        sizes = f"{self.rows}x{self.columns}x{self.inner}"
        return f"{sizes} {types} {self.epilogue.name} {flags} {' '.join(map(str, self.alignments))}"


class CublasLtError(RuntimeError):
    """A failed call of cublasLt; the message has its status."""


class _Product(ctypes.Structure):
    """``struct product`` of ``csrc/mhalib/matmul.c``."""

    _fields_ = (
        ("m", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("lda", ctypes.c_int64),
        ("ldb", ctypes.c_int64),
        ("ldd", ctypes.c_int64),
        ("type_a", ctypes.c_int32),
        ("type_b", ctypes.c_int32),
        ("type_d", ctypes.c_int32),
        ("type_bias", ctypes.c_int32),
        ("type_aux", ctypes.c_int32),
        ("compute", ctypes.c_int32),
        ("transpose_a", ctypes.c_int32),
        ("transpose_b", ctypes.c_int32),
        ("epilogue", ctypes.c_int32),
        ("fast_accumulation", ctypes.c_int32),
        ("adds", ctypes.c_int32),
        ("choice", ctypes.c_int32),
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("d", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("aux", ctypes.c_void_p),
        ("scale_a", ctypes.c_void_p),
        ("scale_b", ctypes.c_void_p),
        ("scale_d", ctypes.c_void_p),
        ("amax_d", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
    )


class Library:
    """An opened cublasLt.

    Args:
        path: path or name of the shared library.

    Raises:
        mlbert.host.native.NativeUnavailable: the C part can't be compiled,
            or the library can't be opened.

    Attributes:
        version: 10000 major + 100 minor + patch.
        choices: problem -> number of its algorithm in the heuristic's list, from 1; missing means
            `FIRST`. `APART` means that product and epilogue are faster as separate kernels.
        noted: records problems as keys while it is not None.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        self.choices: dict[MatmulProblem, int] = {}
        self.noted: dict[MatmulProblem, None] | None = None
        self._code = _compiled()
        self._contexts: dict[torch.device, int] = {}
        self._workspaces: dict[tuple[torch.device, int], Tensor] = {}
        self._refused: set[tuple[object, ...]] = set()
        context = self._open()
        self.version = int(self._code.mhalib_version(context))
        self._code.mhalib_close(context)

    def product(
        self,
        out: Tensor,
        left: Tensor,
        right: Tensor,
        *,
        left_transposed: bool = False,
        right_transposed: bool = False,
        epilogue: Epilogue = Epilogue.NONE,
        bias: Tensor | None = None,
        aux: Tensor | None = None,
        inverse_left: Tensor | None = None,
        inverse_right: Tensor | None = None,
        scale_out: Tensor | None = None,
        amax_out: Tensor | None = None,
        fast: bool = False,
        adds: bool = False,
    ) -> bool:
        """Compute out [R, C] = epilogue(left [R, K] right [K, C]), summed in float32,
        on the current stream.

        Args:
            out: output. All tensors must be contiguous, and no size may be 0.
            left, right: of one dtype, or two FP8 dtypes; stored as [K, R] and [C, K] if transposed.
            epilogue, bias, aux: see `Epilogue`; ``bias``
                and ``aux`` have the dtype of `out` (bfloat16 for FP8).
            inverse_left, inverse_right: float32 scalars on the device; factors of FP8 operands.
            scale_out, amax_out: float32 scalars on the device, for an FP8 result: its scale, and
                the output for its largest magnitude before scaling.
            fast: accumulate FP8 products with fewer bits.
            adds: add to `out`.

        Returns:
            False if nothing was computed: cublasLt has no algorithm (warns once per kind),
                or the choice is `APART`.

        Raises:
            CublasLtError: cublasLt fails in any other way.
        """
        rows, columns, inner = _sizes(out, left, right, left_transposed, right_transposed)
        _check(out, left, right, bias, aux, rows if epilogue == Epilogue.BGRADB else columns)
        choice = FIRST
        if (self.choices or self.noted is not None) and scale_out is None:
            problem = MatmulProblem(
                rows=rows,
                columns=columns,
                inner=inner,
                types=(left.dtype, right.dtype, out.dtype),
                left_transposed=left_transposed,
                right_transposed=right_transposed,
                epilogue=epilogue,
                fast=fast,
                adds=adds,
                alignments=tuple(_alignment(x) for x in (out, left, right, bias, aux)),
            )
            choice = self._choice(problem)
        if choice == APART:
            return False
        stream = 0
        if out.is_cuda:
            assert out.device.index == torch.cuda.current_device(), (
                "cublasLt uses the current device"
            )
            stream = torch.cuda.current_stream(out.device).cuda_stream
        workspace = self._workspace(out.device, stream)
        # Row-major: cublasLt's A is `right`, its B is `left`.
        call = _Product(
            m=columns,
            n=rows,
            k=inner,
            lda=right.shape[1],
            ldb=left.shape[1],
            ldd=columns,
            type_a=_TYPES[right.dtype],
            type_b=_TYPES[left.dtype],
            type_d=_TYPES[out.dtype],
            type_bias=_type(bias),
            type_aux=_type(aux),
            compute=_compute(left.dtype),
            transpose_a=right_transposed,
            transpose_b=left_transposed,
            epilogue=epilogue,
            fast_accumulation=fast,
            adds=adds,
            choice=choice,
            a=_address(right),
            b=_address(left),
            d=_address(out),
            bias=_address(bias),
            aux=_address(aux),
            scale_a=_address(inverse_right),
            scale_b=_address(inverse_left),
            scale_d=_address(scale_out),
            amax_d=_address(amax_out),
            workspace=_address(workspace),
            workspace_bytes=workspace.numel(),
            stream=stream,
        )
        status = self._code.mhalib_matmul(self._context(out.device), ctypes.byref(call))
        # The heuristic may return fewer algorithms than requested.
        if status != _SUCCESS and not (status == _NO_ALGORITHM and choice):
            self._warn_or_raise(
                status, epilogue, left.dtype, out.dtype, f"{rows}x{columns}x{inner}"
            )
        return bool(status == _SUCCESS)

    def plans_made(self, device: torch.device) -> int:
        """Return the number of plans for a device: one per distinct product."""
        return int(self._code.mhalib_plans_made(self._context(device)))

    def close(self) -> None:
        """Free handles and workspaces. All products must have finished."""
        for context in self._contexts.values():
            self._code.mhalib_close(context)
        self._contexts.clear()
        self._workspaces.clear()

    def _open(self) -> int:
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        context = self._code.mhalib_open(self._path.encode(), message, _MESSAGE_BYTES)
        if not context:
            raise native.NativeUnavailable(f"cublasLt: {message.value.decode(errors='replace')}")
        return int(context)

    def _context(self, device: torch.device) -> int:
        if device not in self._contexts:
            context = self._open()
            # A handle belongs to the device that is current at its creation.
            with torch.cuda.device(device if device.type == "cuda" else -1):
                status = self._code.mhalib_create_handle(context)
            if status != _SUCCESS:
                self._code.mhalib_close(context)
                raise CublasLtError(
                    f"cublasLt: {_STATUS.get(status, status)} when creating a handle"
                )
            self._contexts[device] = context
        return self._contexts[device]

    def _choice(self, problem: MatmulProblem) -> int:
        if self.noted is not None:
            self.noted[problem] = None
        return self.choices.get(problem, FIRST)

    def _workspace(self, device: torch.device, stream: int) -> Tensor:
        key = device, stream
        if key not in self._workspaces:
            self._workspaces[key] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspaces[key]

    def _warn_or_raise(
        self,
        status: int,
        epilogue: Epilogue,
        type_in: torch.dtype,
        type_out: torch.dtype,
        sizes: str,
    ) -> None:
        problem = f"{sizes}, {type_in} to {type_out}, epilogue {epilogue.name}"
        if status != _NO_ALGORITHM:
            reason = _STATUS.get(status, status)
            raise CublasLtError(
                f"cublasLt: {reason} for {problem} (OPS=triton does not use cublasLt)"
            )
        kind = epilogue, type_in, type_out
        if kind not in self._refused:
            self._refused.add(kind)
            text = f"cublasLt has no algorithm for {problem}; PyTorch's product runs instead"
            warnings.warn(text, RuntimeWarning, stacklevel=4)


@functools.cache
def library() -> Library:
    """Return the cublasLt of this PyTorch.

    Raises:
        mlbert.host.native.NativeUnavailable: PyTorch is built without CUDA, or as `Library`.
    """
    if torch.version.cuda is None:
        raise native.NativeUnavailable(f"PyTorch {torch.__version__} is built without CUDA")
    return Library(find(torch.version.cuda.split(".")[0]))


def find(major: str) -> str:
    """Return the path of cublasLt for CUDA `major`: already loaded in this process, else installed
    with PyTorch, else its bare name for the system's loader.
    """
    name = f"libcublasLt.so.{major}"
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.is_file() else []
    if loaded := next((line.split(maxsplit=5)[5] for line in lines if line.endswith(name)), None):
        return loaded
    packages = Path(torch.__file__).parents[1] / "nvidia"
    places = [packages / folder / "lib" / name for folder in (f"cu{major}", "cublas")]
    return next((str(place) for place in places if place.is_file()), name)


@functools.cache
def _compiled() -> ctypes.CDLL:
    code = native.load("mhalib", ["matmul.c"], openmp=False, folder=native.MHALIB_FOLDER)
    context = ctypes.c_void_p
    code.mhalib_open.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
    code.mhalib_open.restype = context
    code.mhalib_matmul.argtypes = [context, ctypes.POINTER(_Product)]
    numbers = {
        "version": ctypes.c_uint64,
        "plans_made": ctypes.c_uint64,
        "create_handle": ctypes.c_uint32,
    }
    for name, result in {**numbers, "close": None}.items():
        function = getattr(code, f"mhalib_{name}")
        function.argtypes = [context]
        function.restype = result
    code.mhalib_product_bytes.restype = ctypes.c_size_t
    assert code.mhalib_product_bytes() == ctypes.sizeof(_Product), "struct product differs"
    return code


def _sizes(
    out: Tensor, left: Tensor, right: Tensor, left_transposed: bool, right_transposed: bool
) -> tuple[int, int, int]:
    """Return R, C and K; check all shapes."""
    inner, rows = left.shape if left_transposed else (left.shape[1], left.shape[0])
    columns = out.shape[1]
    shapes = (rows, columns), ((columns, inner) if right_transposed else (inner, columns))
    assert (out.shape, right.shape) == shapes, (
        f"{left.shape} times {right.shape} is not {out.shape}"
    )
    if left.element_size() == 1:
        assert (left_transposed, right_transposed) == (False, True), (
            "FP8 operands must be [R, K] and [C, K]"
        )
        assert not any(size % FP8_MULTIPLE for size in (columns, inner)), (
            "FP8 sizes must be multiples of 16"
        )
    return rows, columns, inner


def _check(
    out: Tensor,
    left: Tensor,
    right: Tensor,
    bias: Tensor | None,
    aux: Tensor | None,
    bias_size: int,
) -> None:
    assert bias is None or bias.shape == (bias_size,), "bias has the wrong size"
    assert aux is None or aux.shape == out.shape, "aux has the wrong shape"
    for tensor in (out, left, right, bias, aux):
        assert tensor is None or (tensor.is_contiguous() and tensor.device == out.device), (
            "contiguous, one device"
        )


def _type(tensor: Tensor | None) -> int:
    return _NO_TYPE if tensor is None else _TYPES[tensor.dtype]


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _alignment(tensor: Tensor | None) -> int:
    """Return the alignment of the address in bytes, as the C part computes it."""
    if tensor is None:
        return 0
    bits = tensor.data_ptr() | LARGEST_ALIGNMENT
    return bits & -bits


def _compute(dtype: torch.dtype) -> int:
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return _COMPUTE_TF32
    return _COMPUTE_FLOAT32

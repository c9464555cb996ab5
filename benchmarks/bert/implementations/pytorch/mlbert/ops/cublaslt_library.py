"""NVIDIA's cublasLt as Python functions: where it lies, handles, workspaces, and one matrix product.

The C part, ``csrc/mhalib``, opens cublasLt at run time and keeps one plan for each problem it has seen. A handle is
made when a device is first used, a workspace when a stream is. Nothing here waits for the device, and a product that
was computed before allocates nothing, so it may be captured in a CUDA graph.

Tensors are row-major, cublasLt is column-major: a product ``left right`` is handed over as ``right^T left^T``, so what
cublasLt calls A is `right` and what it calls B is `left`.

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
FIRST, APART = 0, -1  # choices beside the numbers from 1 on: what the heuristic says first; no epilogue, see `choices`
AUX_MULTIPLE = 8  # columns of a result whose epilogue keeps or reads a pre-activation
FP8_MULTIPLE = 16  # every size and address of an FP8 product
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_NO_TYPE = -1
_COMPUTE_FLOAT32, _COMPUTE_TF32 = 68, 77
_SUCCESS, _NO_ALGORITHM = 0, 1000
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
    """What cublasLt does with a product y = left right before it is stored (GELU in the tanh form).

    ``bias`` and ``aux`` are the arguments of `Library.product` that it reads or writes.
    """

    NONE = 1
    BIAS = 4  # y + bias [C]
    GELU_BIAS = 36  # gelu(y + bias)
    GELU_AUX_BIAS = 164  # the same, and aux [R, C] = y + bias
    DGELU_BGRAD = 208  # d = y gelu'(aux), and bias [C] = its sum over rows
    BGRADB = 512  # y, and bias [R] = the sum of left over the inner dimension


class MatmulProblem(NamedTuple):
    """What makes one algorithm or another the fastest for a product: all of it but the addresses.

    Attributes:
        rows, columns, inner: R, C and K.
        types: of left, right and the result.
        left_transposed, right_transposed, epilogue, fast, adds: as in `Library.product`.
        alignments: bytes that the addresses of result, left, right, bias and aux are multiples of; 0: there is none.
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
        flags = "".join(map(str, map(int, (self.left_transposed, self.right_transposed, self.fast, self.adds))))
        sizes = f"{self.rows}x{self.columns}x{self.inner}"
        return f"{sizes} {types} {self.epilogue.name} {flags} {' '.join(map(str, self.alignments))}"


class CublasLtError(RuntimeError):
    """cublasLt refused a call; the text has its status."""


class _Product(ctypes.Structure):
    """``struct product`` of ``csrc/mhalib/matmul.c``."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "lda", "ldb", "ldd")),
        *((name, ctypes.c_int32) for name in ("type_a", "type_b", "type_d", "type_bias", "type_aux", "compute")),
        *((name, ctypes.c_int32) for name in ("transpose_a", "transpose_b", "epilogue", "fast_accumulation", "adds")),
        ("choice", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("a", "b", "d", "bias", "aux")),
        *((name, ctypes.c_void_p) for name in ("scale_a", "scale_b", "scale_d", "amax_d", "workspace")),
        ("workspace_bytes", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
    )


class Library:
    """An opened cublasLt.

    Args:
        path: of the shared library, or its name.

    Raises:
        mlbert.host.native.NativeUnavailable: the C part can't be compiled, or the library can't be opened.

    Attributes:
        version: 10000 major + 100 minor + patch.
        choices: the algorithm of a problem, by its number in the heuristic's list, from 1 on; `FIRST` where it has
            none here. `APART`: its product and what its epilogue does are faster one after the other.
        noted: problems as they come, while there is a place for them.
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
        """out [R, C] = epilogue(left [R, K] right [K, C]), summed in float32, on the current stream.

        Args:
            out: contiguous, as all tensors here; written. No size may be 0.
            left, right: of one type, or two FP8 types; stored as [K, R] and [C, K] where said to be transposed.
            epilogue, bias, aux: see `Epilogue`; ``bias`` and ``aux`` have the type of `out` (bfloat16 for FP8).
            inverse_left, inverse_right: float32 scalars on the device that FP8 operands are multiplied by.
            scale_out, amax_out: float32 scalars on the device, for an FP8 result: its scale, and where to put its
                largest magnitude before scaling.
            fast: lets FP8 products add with fewer bits.
            adds: adds to what `out` holds.

        Returns:
            False where cublasLt has no algorithm for this, which is said once in a warning, or the choice is `APART`;
            then nothing was computed.

        Raises:
            CublasLtError: any other refusal.
        """
        rows, columns, inner = sizes = _sizes(out, left, right, left_transposed, right_transposed)
        _check(out, left, right, bias, aux, rows if epilogue == Epilogue.BGRADB else columns)
        choice = FIRST
        if (self.choices or self.noted is not None) and scale_out is None:
            types = left.dtype, right.dtype, out.dtype
            alignments = tuple(map(_alignment, (out, left, right, bias, aux)))
            transposed = left_transposed, right_transposed
            choice = self._choice(MatmulProblem(*sizes, types, *transposed, epilogue, fast, adds, alignments))
        if choice == APART:
            return False
        stream = 0
        if out.is_cuda:
            assert out.device.index == torch.cuda.current_device(), "cublasLt works on the current device"
            stream = torch.cuda.current_stream(out.device).cuda_stream
        workspace = self._workspace(out.device, stream)
        call = _Product(
            *(columns, rows, inner, right.shape[1], left.shape[1], columns),
            *(_TYPES[right.dtype], _TYPES[left.dtype], _TYPES[out.dtype], _type(bias), _type(aux)),
            *(_compute(left.dtype), right_transposed, left_transposed, epilogue, fast, adds, choice),
            *(_address(x) for x in (right, left, out, bias, aux)),
            *(_address(x) for x in (inverse_right, inverse_left, scale_out, amax_out, workspace)),
            *(workspace.numel(), stream),
        )
        status = self._code.mhalib_matmul(self._context(out.device), ctypes.byref(call))
        # A list of choices may be shorter than asked for.
        if status != _SUCCESS and not (status == _NO_ALGORITHM and choice):
            self._remark_or_raise(status, epilogue, left.dtype, out.dtype, f"{rows}x{columns}x{inner}")
        return bool(status == _SUCCESS)

    def plans_made(self, device: torch.device) -> int:
        """How many different products the device has seen; one that came again made no plan."""
        return int(self._code.mhalib_plans_made(self._context(device)))

    def close(self) -> None:
        """Gives back handles and workspaces; the products must have been waited for."""
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
            # A handle belongs to the device that is current when it is made.
            with torch.cuda.device(device if device.type == "cuda" else -1):
                status = self._code.mhalib_create_handle(context)
            if status != _SUCCESS:
                self._code.mhalib_close(context)
                raise CublasLtError(f"cublasLt: {_STATUS.get(status, status)} when making a handle")
            self._contexts[device] = context
        return self._contexts[device]

    def _choice(self, problem: MatmulProblem) -> int:
        if self.noted is not None:
            self.noted[problem] = None
        return self.choices.get(problem, FIRST)

    def _workspace(self, device: torch.device, stream: int) -> Tensor:
        place = device, stream
        if place not in self._workspaces:
            self._workspaces[place] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspaces[place]

    def _remark_or_raise(
        self, status: int, epilogue: Epilogue, type_in: torch.dtype, type_out: torch.dtype, sizes: str
    ) -> None:
        words = f"{sizes}, {type_in} to {type_out}, epilogue {epilogue.name}"
        if status != _NO_ALGORITHM:
            reason = _STATUS.get(status, status)
            raise CublasLtError(f"cublasLt: {reason} for {words} (OPS=triton does without cublasLt)")
        kind = epilogue, type_in, type_out
        if kind not in self._refused:
            self._refused.add(kind)
            text = f"cublasLt has no algorithm for {words}: PyTorch's product runs"
            warnings.warn(text, RuntimeWarning, stacklevel=4)


@functools.cache
def library() -> Library:
    """The cublasLt that belongs to this PyTorch.

    Raises:
        mlbert.host.native.NativeUnavailable: PyTorch is not built for CUDA, or what `Library` raises.
    """
    if torch.version.cuda is None:
        raise native.NativeUnavailable(f"PyTorch {torch.__version__} is built without CUDA")
    return Library(find(torch.version.cuda.split(".")[0]))


def find(major: str) -> str:
    """Path of the cublasLt for CUDA `major`: the one in this process, else the one installed beside PyTorch, else its
    bare name, which the system's loader knows or not."""
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
    numbers = {"version": ctypes.c_uint64, "plans_made": ctypes.c_uint64, "create_handle": ctypes.c_uint32}
    for name, result in {**numbers, "close": None}.items():
        function = getattr(code, f"mhalib_{name}")
        function.argtypes, function.restype = [context], result
    code.mhalib_product_bytes.restype = ctypes.c_size_t
    assert code.mhalib_product_bytes() == ctypes.sizeof(_Product), "struct product differs"
    return code


def _sizes(
    out: Tensor, left: Tensor, right: Tensor, left_transposed: bool, right_transposed: bool
) -> tuple[int, int, int]:
    """R, C and K."""
    inner, rows = left.shape if left_transposed else (left.shape[1], left.shape[0])
    columns = out.shape[1]
    shapes = (rows, columns), ((columns, inner) if right_transposed else (inner, columns))
    assert (out.shape, right.shape) == shapes, f"{left.shape} times {right.shape} is not {out.shape}"
    if left.element_size() == 1:
        assert (left_transposed, right_transposed) == (False, True), "FP8 operands lie along the inner dimension"
        assert not any(size % FP8_MULTIPLE for size in (columns, inner)), "FP8 sizes are multiples of 16"
    return rows, columns, inner


def _check(out: Tensor, left: Tensor, right: Tensor, bias: Tensor | None, aux: Tensor | None, bias_size: int) -> None:
    assert bias is None or bias.shape == (bias_size,), "bias of another size"
    assert aux is None or aux.shape == out.shape, "aux of another shape"
    for tensor in (out, left, right, bias, aux):
        assert tensor is None or (tensor.is_contiguous() and tensor.device == out.device), "contiguous, one device"


def _type(tensor: Tensor | None) -> int:
    return _NO_TYPE if tensor is None else _TYPES[tensor.dtype]


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _alignment(tensor: Tensor | None) -> int:
    """As the C part finds it."""
    if tensor is None:
        return 0
    bits = tensor.data_ptr() | LARGEST_ALIGNMENT
    return bits & -bits


def _compute(dtype: torch.dtype) -> int:
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return _COMPUTE_TF32
    return _COMPUTE_FLOAT32

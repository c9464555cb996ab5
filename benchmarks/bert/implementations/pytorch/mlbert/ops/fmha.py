"""Attention with the CUDA kernels of ``csrc/fmha``:
at most 512 tokens per sequence, head size 64, 16-bit dtypes.

The kernels are optional; ``tools/build_cuda.sh`` compiles them with ``nvcc``. They use the masks of
`mlbert.ops.dropout`, are deterministic, and run asynchronously on PyTorch's current stream, so they
work in a CUDA graph. They have never been measured, so they are opt-in.

Legend: S sequences, T tokens, N heads, H head size.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlbert.host import native
from mlbert.host.native import NativeUnavailable
from mlbert.ops import forms as registry
from mlbert.ops import reference
from mlbert.ops.attention import FMHA_HEAD_SIZE, FMHA_LENGTH, HALF_TYPES
from mlbert.ops.dropout import MASK32, Key, dropout_threshold
from mlbert.ops.native_library import check_attention, pointer

_KEYS_AT_ONCE = 128
_FOLDER = native.SOURCE_FOLDER.with_name("fmha")


_override: ctypes.CDLL | None = None


class _Problem(ctypes.Structure):
    """`fmha_problem` of fmha.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "cu_seqlens", "rows", "slopes", "key_place")),
        ("key", ctypes.c_uint32),
        *(
            (name, ctypes.c_int32)
            for name in ("threshold", "num_tokens", "num_sequences", "num_heads", "is_bfloat16")
        ),
    )


def library_path() -> Path:
    """Return the path for the compiled kernels; it has a hash of the sources."""
    digest = hashlib.sha256()
    for path in sorted(path for path in _FOLDER.iterdir() if path.is_file()):
        digest.update(path.read_bytes())
    return native.cache_folder() / f"fmha-{digest.hexdigest()[:32]}.so"


def use(given: ctypes.CDLL | None) -> None:
    """Use this library instead of the compiled one, for tests. None restores the compiled one."""
    global _override
    _override = given


def library() -> ctypes.CDLL:
    """Return the library in use.

    Raises:
        mlbert.host.native.NativeUnavailable: it has not been built from these sources,
            or cannot be loaded.
    """
    return _override or _built()


@functools.cache
def _built() -> ctypes.CDLL:
    path = library_path()
    if not path.is_file():
        raise NativeUnavailable(
            f"{path} does not exist; the repository's tools/build_cuda.sh builds it"
        )
    return load(path)


def load(path: Path) -> ctypes.CDLL:
    """Load the library at `path` and declare its functions.

    Raises:
        mlbert.host.native.NativeUnavailable: it cannot be loaded.
    """
    try:
        code = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"{path.name} does not load: {error}") from error
    problem = ctypes.POINTER(_Problem)
    address = ctypes.c_void_p
    code.fmha_forward.argtypes = [problem, address, address, address]
    code.fmha_backward.argtypes = [problem, *[address] * 6]
    code.fmha_error.argtypes = [ctypes.c_int]
    code.fmha_error.restype = ctypes.c_char_p
    code.fmha_problem_bytes.restype = ctypes.c_size_t
    assert code.fmha_problem_bytes() == ctypes.sizeof(_Problem), "fmha_problem differs"
    return code


def check_device(kind: str) -> None:
    """Check that the library is built and that the current device, if there is one,
    can run the kernels.

    Raises:
        mlbert.host.native.NativeUnavailable: it is not, or it cannot.
    """
    code = library()
    if torch.cuda.is_available() and (error := code.fmha_check()):
        raise NativeUnavailable(f"csrc/fmha: {code.fmha_error(error).decode()}")


@registry.register("attention", "fmha")
def attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float,
    key: Key,
    rows: Tensor | None,
    alibi_slopes: Tensor | None = None,
    window: int | None = None,
    rotations: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """See `mlbert.ops.attention.attention`.

    Longer sequences, windows, other head sizes and wider dtypes run plain.
    """
    del order
    is_supported = (
        qkv.dtype in HALF_TYPES
        and qkv.shape[3] == FMHA_HEAD_SIZE
        and max_seqlen <= FMHA_LENGTH
        and (window is None or window >= max_seqlen - 1)
    )
    if not is_supported:
        return reference.attention(
            qkv,
            cu_seqlens,
            max_seqlen,
            dropout_p,
            key,
            rows,
            alibi_slopes,
            window,
            rotations,
        )
    if rotations is not None:
        qkv = reference.rotary(qkv, rotations)
    threshold = dropout_threshold(dropout_p)
    return _FmhaAttention.apply(
        qkv.contiguous(), cu_seqlens, max_seqlen, threshold, key, rows, alibi_slopes
    )


class _FmhaAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cu_seqlens: Tensor, *settings: Any) -> Tensor:
        max_seqlen, threshold, key, rows, slopes = settings
        check_attention(qkv, rows, threshold, slopes)
        num_tokens, _, num_heads, _ = qkv.shape
        ctx.max_seqlen = max_seqlen
        ctx.threshold = threshold
        # A key on the device must stay alive until backward; a number is passed by value.
        ctx.key, key_place = (0, key) if isinstance(key, Tensor) else (key & MASK32, None)
        out = qkv.new_empty(num_tokens, num_heads, FMHA_HEAD_SIZE)
        log_sums = torch.empty(num_heads, num_tokens, dtype=torch.float32, device=qkv.device)
        ctx.save_for_backward(qkv, cu_seqlens, rows, slopes, key_place, out, log_sums)
        _call("fmha_forward", ctx, (qkv, cu_seqlens, rows, slopes, key_place), out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, log_sums = ctx.saved_tensors
        d_qkv = torch.empty_like(inputs[0])
        d_query = None
        if ctx.max_seqlen > _KEYS_AT_ONCE:
            d_query = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        _call("fmha_backward", ctx, inputs, out, log_sums, d_out.contiguous(), d_query, d_qkv)
        return d_qkv, None, None, None, None, None, None


def _call(name: str, ctx: Any, inputs: Any, *tensors: Tensor | None) -> None:
    """Launch forward or backward on the current stream."""
    qkv, cu_seqlens, rows, slopes, key_place = inputs
    problem = _Problem(
        qkv=pointer(qkv),
        cu_seqlens=pointer(cu_seqlens, torch.int32),
        rows=pointer(rows, torch.int32),
        slopes=pointer(slopes, torch.float32),
        key_place=pointer(key_place, torch.int32),
        key=ctx.key,
        threshold=ctx.threshold,
        num_tokens=qkv.shape[0],
        num_sequences=cu_seqlens.numel() - 1,
        num_heads=qkv.shape[2],
        is_bfloat16=int(qkv.dtype == torch.bfloat16),
    )
    stream = torch.cuda.current_stream(qkv.device).cuda_stream if qkv.is_cuda else None
    addresses = [pointer(tensor) for tensor in tensors]
    with torch.cuda.device_of(qkv):
        error = getattr(library(), name)(ctypes.byref(problem), *addresses, stream)
    if error:
        raise RuntimeError(f"{name}: {library().fmha_error(error).decode()}")

"""The C kernels of ``csrc/cpu/ops_*.c`` as Python functions: argument types, pointers, thread count.

Callers pass contiguous CPU tensors of the documented types; `pointer` asserts it. Results do not depend on the number
of threads.

Legend: T tokens.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from mlbert.host import native

SOURCES = (
    "ops_attention.c",
    "ops_attention_tiles.c",
    "ops_norm.c",
    "ops_linear.c",
    "ops_embedding.c",
    "ops_loss.c",
    "ops_rotary.c",
)
ACTIVATION_TYPES = (torch.float32, torch.bfloat16)
# Sums over tokens are taken in at most this many chunks; enough for any number of cores, few enough to add up cheaply.
_MAX_CHUNKS = 64
_MIN_CHUNK_TOKENS = 32

_CODES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "u": ctypes.c_uint32, "f": ctypes.c_float}
_SIGNATURES = {
    "attention_forward": "pppppllllu iii ppp",
    "attention_backward": "pppppllllu iii pppp",
    "attention_tiles_forward": "pppppllllu iii ppp",
    "attention_tiles_backward": "pppppllllu iii pppp",
    "norm_forward": "pppppp ll f u iiii ppp",
    "norm_backward": "ppppp lll u iiii ppp i",
    "bias_gelu_forward": "pp ll ii p",
    "bias_gelu_backward": "ppp lll ii pp",
    "sum_tokens": "p lll ii p",
    "embedding_forward": "pppppp ll ii p",
    "embedding_backward": "pppp ll ii ppp",
    "cross_entropy_forward": "pp lll ii ppp",
    "cross_entropy_backward": "pp lll f ii p",
    "rotary": "pp lll iii p",
}


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels.

    Raises:
        mlbert.host.native.NativeUnavailable: they can't be compiled or loaded here.
    """
    lib = native.load("ops", SOURCES)
    for name, signature in _SIGNATURES.items():
        function = getattr(lib, name)
        function.argtypes = [_CODES[code] for code in signature.replace(" ", "")]
        function.restype = None
    for function in (lib.attention_scratch_floats, lib.attention_tiles_scratch_floats):
        function.argtypes, function.restype = [ctypes.c_int64, ctypes.c_int64], ctypes.c_int64
    return lib


def pointer(tensor: Tensor | None, dtype: torch.dtype | None = None) -> int | None:
    """The address of a contiguous CPU tensor, None (null) for None."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "native kernels take contiguous tensors"
    assert dtype is None or tensor.dtype == dtype, f"expected {dtype}, got {tensor.dtype}"
    return tensor.data_ptr()


def is_bf16(tensor: Tensor) -> int:
    """The kernels' type flag: 1 for bfloat16, 0 for float32."""
    assert tensor.dtype in ACTIVATION_TYPES, f"expected float32 or bfloat16, got {tensor.dtype}"
    return int(tensor.dtype == torch.bfloat16)


def check_rows(rows: Tensor | None, num_tokens: int, threshold: int) -> None:
    """Dropout reads one row number for each token."""
    if threshold:
        assert rows is not None, "dropout needs rows"
        assert rows.shape == (num_tokens,), f"rows {tuple(rows.shape)} for {num_tokens} tokens"


def token_chunk(num_tokens: int) -> int:
    """Tokens a chunk for sums over tokens: a function of T alone, so that sums are the same for any thread count."""
    return max(_MIN_CHUNK_TOKENS, -(-num_tokens // _MAX_CHUNKS))


def token_chunks(num_tokens: int) -> int:
    """How many chunks of `token_chunk` tokens there are."""
    return -(-num_tokens // token_chunk(num_tokens))


def sum_tokens(x: Tensor) -> Tensor:
    """Sum over the first dimension of [T, F], float32 [F]."""
    num_tokens, columns = x.shape
    partial = torch.empty(token_chunks(num_tokens), columns)
    chunk = token_chunk(num_tokens)
    threads = torch.get_num_threads()
    library().sum_tokens(pointer(x), num_tokens, columns, chunk, is_bf16(x), threads, pointer(partial))
    return partial.sum(0)

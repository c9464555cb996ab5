"""Bindings for the C kernels of ``csrc/cpu/ops_*.c``.

Callers pass contiguous CPU tensors of the documented dtypes, checked by `pointer`. Results do not
depend on the number of threads.

Legend: T tokens.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from mlbert.host import native
from mlbert.ops.weights import GradientBuffer

SOURCES = (
    "ops_attention.c",
    "ops_attention_tiles.c",
    "ops_norm.c",
    "ops_linear.c",
    "ops_embedding.c",
    "ops_loss.c",
)
ACTIVATION_TYPES = (torch.float32, torch.bfloat16)
# Maximum number of chunks of a sum over tokens: enough for any number of cores,
# few enough to add up cheaply.
_MAX_CHUNKS = 64
_MIN_CHUNK_TOKENS = 32

_SIGNATURES = {
    "attention_forward": "pppppp lllll u iii ppp",
    "attention_backward": "pppppp lllll u iii pppp",
    "attention_queries_forward": "pppppp lllll u iii ppppp pp",
    "attention_queries_backward": "pppppp lllll u iii ppppp pppp",
    "attention_tiles_forward": "pppppp lllll u iii ppp",
    "attention_tiles_backward": "pppppp lllll u iii pppp",
    "norm_forward": "pppppp ll f u iiii ppp",
    "norm_backward": "pppppp lll u iiii ppp i",
    "bias_gelu_forward": "pp ll ii p",
    "bias_gelu_backward": "ppp lll ii pp",
    "sum_tokens": "p lll ii p",
    "sum_chunks": "p lll i p",
    "embedding_forward": "pppppp ll ii p",
    "embedding_backward": "pppp ll ii ppp",
    "cross_entropy_forward": "pp lll ii ppp",
    "cross_entropy_backward": "pp lll f ii p",
}


@functools.cache
def library() -> ctypes.CDLL:
    """Return the compiled kernels.

    Raises:
        mlbert.host.native.NativeUnavailable: they cannot be compiled or loaded.
    """
    return native.load("ops", SOURCES, signatures())


def signatures() -> dict[str, str]:
    """Return the signatures of the kernels, as for `mlbert.host.native.load`."""
    scratch = dict.fromkeys(("attention_scratch_floats", "attention_tiles_scratch_floats"), "lll:l")
    void = {name: f"{signature.replace(' ', '')}:v" for name, signature in _SIGNATURES.items()}
    return {**scratch, "attention_tiles_available": ":i", **void}


def load(kind: str) -> None:
    """Compile or load the kernels. Raises as `library`."""
    library()


def pointer(tensor: Tensor | None, dtype: torch.dtype | None = None) -> int | None:
    """Return the address of a contiguous tensor, or None (null) for None."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "native kernels need contiguous tensors"
    assert dtype is None or tensor.dtype == dtype, f"expected {dtype}, got {tensor.dtype}"
    return tensor.data_ptr()


def is_bf16(tensor: Tensor) -> int:
    """Return the kernels' dtype flag: 1 for bfloat16, 0 for float32."""
    assert tensor.dtype in ACTIVATION_TYPES, f"expected float32 or bfloat16, got {tensor.dtype}"
    return int(tensor.dtype == torch.bfloat16)


def check_rows(rows: Tensor | None, num_tokens: int, threshold: int) -> None:
    """Assert that there is one dropout row number per token, if dropout is on."""
    if threshold:
        assert rows is not None, "dropout needs rows"
        assert rows.shape == (num_tokens,), f"rows {tuple(rows.shape)} for {num_tokens} tokens"


def check_attention(
    qkv: Tensor,
    rows: Tensor | None,
    threshold: int,
    slopes: Tensor | None,
    rotations: Tensor | None = None,
) -> None:
    """Assert the shapes of attention's arguments [T, 3, N, H], [T], [N] and [T, H].

    Rows are only needed with dropout.
    """
    num_tokens, three, num_heads, head_size = qkv.shape
    assert three == 3, f"qkv {tuple(qkv.shape)} is not [T, 3, N, H]"
    check_rows(rows, num_tokens, threshold)
    check_slopes(slopes, num_heads)
    check_rotations(rotations, num_tokens, head_size)


def check_slopes(slopes: Tensor | None, num_heads: int) -> None:
    """Assert the type and shape of ALiBi's slopes."""
    assert slopes is None or (slopes.dtype, slopes.shape) == (torch.float32, (num_heads,)), (
        "slopes: float32 [N]"
    )


def check_rotations(rotations: Tensor | None, num_tokens: int, head_size: int) -> None:
    """Assert the shape of the tokens' rotations."""
    if rotations is not None:
        assert head_size % 2 == 0, f"rotations of heads of {head_size}"
        assert rotations.shape == (num_tokens, head_size), f"rotations {tuple(rotations.shape)}"


def token_chunk(num_tokens: int) -> int:
    """Return the tokens per chunk of a sum.

    Depends on T only, so that sums are the same for any thread count.
    """
    return max(_MIN_CHUNK_TOKENS, -(-num_tokens // _MAX_CHUNKS))


def token_chunks(num_tokens: int) -> int:
    """Return the number of chunks of `token_chunk` tokens."""
    return -(-num_tokens // token_chunk(num_tokens))


def token_sums(x: Tensor) -> Tensor:
    """Return the sums of x [T, F] over each chunk of tokens, float32 [chunks, F]."""
    num_tokens, columns = x.shape
    partial = torch.empty(token_chunks(num_tokens), columns)
    chunk = token_chunk(num_tokens)
    library().sum_tokens(
        pointer(x),
        num_tokens,
        columns,
        chunk,
        is_bf16(x),
        torch.get_num_threads(),
        pointer(partial),
    )
    return partial


def chunk_sums(partial: Tensor, columns: int, buffer: GradientBuffer | None) -> Tensor:
    """Return the sum of the first ``columns`` of float32 [chunks, F] over the chunks, in the buffer
    if there is one.
    """
    assert partial.dtype == torch.float32
    chunks, step = partial.shape
    out = torch.empty(columns) if buffer is None else buffer.out
    assert out.shape == (columns,), f"{tuple(out.shape)} for {columns} columns"
    adds = buffer is not None and buffer.adds
    library().sum_chunks(
        pointer(partial), chunks, step, columns, int(adds), pointer(out, torch.float32)
    )
    return out

"""Compile every Triton kernel for GPUs that need not be present,
and print the resources that each kernel uses.

python tools/compile_kernels.py [--arch 80 90 100] [--only attention]

The kernels, types and block sizes are those of real calls: the ops run on tensors of PyTorch's
"meta" device, and their launches are recorded. Columns: registers per thread, spilled bytes per
thread, shared memory per block, warps per block, barriers, machine instructions, minimum clocks per
warp if no loop repeats (see sass.py), instructions of the longest loop.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import sass
from counted.access import bind_launch
from mlbert.data.batches import HostBatch, StaticShape
from mlbert.distributed.sharding import ShardLayout
from mlbert.ops.api import dropout_key
from mlbert.ops.qkv_attention import AttentionArguments
from mlbert.ops.triton import (
    cast,
    device,
    embedding,
    expand_batch,
    gate,
    gelu,
    gluon_attention,
    gluon_product,
    loss,
    norm,
    product,
    residual,
)
from mlbert.ops.triton.attention import attention
from mlbert.ops.triton.qkv_attention import TritonAttentionForm
from mlbert.optim.acclip import ACClip
from mlbert.optim.adamw import AdamW, StableAdamW
from mlbert.optim.compiled import CompiledOptimizer
from mlbert.optim.flat import FlatParameters, pieces_of
from mlbert.optim.lamb import Lamb
from mlbert.optim.madgrad import Madgrad
from mlbert.optim.sgd import SGD
from mlbert.optim.triton_update import TritonUpdate

ARCHITECTURES = (80, 90, 100)
FIRST_FP8_ARCHITECTURE = 89
# Used on sm_90 only; Triton 3.6 does not compile them for sm_100.
HOPPER_CASE = "products fp8 GELU"
GLUON_CASE = "products fp8 GELU, weight kept"
ATTENTION_IN_GLUON = "attention in Gluon"
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}
_META = torch.device("meta")
# What ptxas says if it serializes asynchronous matrix products: C7510 to C7519.
SERIALIZED = re.compile(r"\(C751\d\)[^\n]*")


@dataclass(frozen=True)
class Launch:
    """One kernel launch: arguments by name and Triton's options."""

    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Assembly:
    """What ptxas reports of a kernel."""

    registers: int  # per thread
    spilled: int  # bytes per thread
    serialized: tuple[str, ...]  # messages of `SERIALIZED`


@dataclass(frozen=True)
class Report:
    """Resources of a compiled kernel, such as shared bytes per block, and its code, such as PTX."""

    kernel: str
    case: str
    arch: int
    shared: int
    warps: int
    ttir: str
    ptx: str
    cubin: bytes
    arguments: dict[str, Any]

    @functools.cached_property
    def assembly(self) -> Assembly:
        """Return what ptxas reports, by assembling again, the only way to get it."""
        return assembled(self.ptx, self.arch)


@contextlib.contextmanager
def recording(arch: int) -> Iterator[list[Launch]]:
    """Make ops on meta tensors use kernels for compute capability `arch`,
    and append launches to the yielded list.
    """
    launches: list[Launch] = []
    run = JITFunction.run
    capability = device.assumed_capability

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(Launch(self, *bind_launch(self, args, kwargs)))

    JITFunction.run = record
    device.assumed_capability = arch
    try:
        yield launches
    finally:
        JITFunction.run = run
        device.assumed_capability = capability


def compile_launch(launch: Launch, case: str, arch: int) -> Report:
    """Compile a kernel for compute capability `arch`, such as 90 for 9.0 (sm_90a)."""
    signature = {}
    constants = {}
    attributes = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, GluonDescriptor):
            element = _POINTERS[value.base.dtype][1:]
            signature[parameter.name] = f"tensordesc<{element}{value.block_shape},{value.layout!r}>"
        elif isinstance(value, TensorDescriptor):
            signature[parameter.name] = (
                f"tensordesc<{_POINTERS[value.base.dtype][1:]}{value.block_shape}>"
            )
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int) and value == 1 and not parameter.do_not_specialize:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = 1
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if not parameter.do_not_specialize and isinstance(value, int) and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    kind = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    source = kind(launch.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    ptx = compiled.asm["ptx"]
    name = launch.kernel.fn.__name__
    metadata = compiled.metadata
    return Report(
        name,
        case,
        arch,
        metadata.shared,
        metadata.num_warps,
        compiled.asm.get("ttir", ""),  # Gluon starts from the GPU's own form
        ptx,
        compiled.asm["cubin"],
        launch.arguments,
    )


def assembled(ptx: str, arch: int) -> Assembly:
    """Assemble with Triton's bundled ptxas."""
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target, "no .target in the PTX"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        command = [
            get_ptxas(arch).path,
            "-v",
            f"--gpu-name={target[1]}",
            source,
            "-o",
            f"{folder}/kernel.cubin",
        ]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", output)
    spills = re.findall(r"(\d+) bytes spill", output)
    assert registers, output
    messages = tuple(dict.fromkeys(SERIALIZED.findall(output)))
    return Assembly(int(registers[1]), sum(map(int, spills)), messages)


def _key(device_key: bool) -> int | torch.Tensor:
    """Return a dropout key as a number, or as a tensor that captured graphs read."""
    return (
        torch.empty((), dtype=torch.int32, device=_META) if device_key else dropout_key(1, 2, 3, 0)
    )


def _attention(
    head_size: int,
    dtype: torch.dtype,
    dropout: float,
    alibi: bool,
    device_key: bool = False,
    window: int | None = None,
    form: Callable[..., torch.Tensor] = attention,
) -> None:
    """Record attention; with a window, also with rotations, as in ModernBERT."""
    num_tokens = 4096
    num_heads = 1024 // head_size
    qkv = torch.empty(
        num_tokens, 3, num_heads, head_size, dtype=dtype, device=_META, requires_grad=True
    )
    bounds, rows = (torch.empty(n, dtype=torch.int32, device=_META) for n in (17, num_tokens))
    slopes = torch.empty(num_heads, device=_META) if alibi else None
    rotations = None if window is None else torch.empty(num_tokens, head_size, device=_META)
    key = _key(device_key)
    out = form(qkv, bounds, 512, dropout, key, rows, slopes, window, rotations)
    out.backward(torch.empty_like(out))


def _gluon_attention(dropout: float, window: int | None = None) -> None:
    form = gluon_attention.attention
    _attention(64, torch.bfloat16, dropout, False, True, window, form)


def _qkv_attention(quantized: bool) -> None:
    """Record attention that sums, and for FP8 rounds, the gradient for the product before it."""
    num_tokens = 4096
    qkv = torch.empty(num_tokens, 3, 16, 64, dtype=torch.bfloat16, device=_META)
    bounds, order, rows = (
        torch.empty(n, dtype=torch.int32, device=_META) for n in (17, 16, num_tokens)
    )
    arguments = AttentionArguments(bounds, 512, 0.1, _key(True), rows, None, order)
    scale, amax = torch.empty(2, device=_META) if quantized else (None, None)
    form = TritonAttentionForm()
    out, saved = form.forward(qkv, arguments)
    form.backward(saved, out, torch.empty_like(out), None, scale, amax)


def _tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a leaf tensor on the meta device; it requires a gradient if its dtype allows one."""
    return torch.empty(*shape, dtype=dtype, device=_META, requires_grad=dtype.is_floating_point)


def _norm(
    hidden: int,
    dtype: torch.dtype,
    dropout: float,
    quantized: bool = False,
    tokens: int = 4096,
    device_key: bool = False,
) -> None:
    x = _tensor(tokens, hidden, dtype=dtype)
    added = _tensor(tokens, hidden, dtype=dtype)
    weight = _tensor(hidden)
    bias = _tensor(hidden)
    x_bias = _tensor(hidden)
    eps = 1e-12
    key = _key(device_key)
    rows = _tensor(tokens, dtype=torch.int32)
    if quantized:
        scale, amax = torch.empty(2, device=_META)
        _, _, saved = norm.quantized_norm(
            x, added, weight, bias, eps, dropout, key, rows, x_bias, scale, amax
        )
        norm.quantized_norm_gradients(x, added, saved, weight, dropout, key, rows, scale, amax)
        return
    out = norm.dropout_add_layer_norm(x, added, weight, bias, eps, dropout, key, rows, x_bias)
    out.backward(torch.empty_like(x))
    out = norm.layer_norm_dropout(x, weight, bias, eps, dropout, key, rows)
    out.backward(torch.empty_like(x))


def _loss(dtype: torch.dtype, rows: int = 640) -> None:
    logits = _tensor(rows, 30528, dtype=dtype)
    labels = _tensor(rows, dtype=torch.int64)
    loss.masked_cross_entropy(logits, labels, 30522)[0].backward()


def _embedding(dtype: torch.dtype, tokens: int = 4096) -> None:
    out = embedding.embedding_sum(
        _tensor(tokens, dtype=torch.int64),
        _tensor(tokens, dtype=torch.int64),
        _tensor(tokens, dtype=torch.int64),
        _tensor(30528, 1024),
        _tensor(512, 1024),
        _tensor(2, 1024),
        dtype,
    )
    out.backward(torch.empty_like(out))


def _expand() -> None:
    batch = HostBatch.dummy(512)
    target = replace(StaticShape.over([batch]), has_labels=False).allocate(_META)
    expand_batch.expand(batch.parts(batch.data.to(_META)), target.tensors())


def _cast(tokens: int = 4096) -> None:
    x = _tensor(tokens, 1024, dtype=torch.bfloat16).detach()
    bias = _tensor(1024, dtype=torch.bfloat16).detach()
    scale, amax = torch.empty(2, device=_META)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        cast.cast_transpose(x, scale, amax, dtype)
        cast.cast_transpose_bias(x, scale, amax, dtype)
        is_gradient = dtype is torch.float8_e5m2
        cast.gelu_cast_transpose(x, bias, is_gradient, scale, amax, torch.float8_e4m3fn)
        cast.gelu_backward_cast_transpose(x, x, bias, is_gradient, scale, amax, dtype)


def _product(tokens: int = 4096, kept: bool = False) -> None:
    form = gluon_product if kept else product
    small = functools.partial(torch.empty, device=_META, dtype=torch.float8_e4m3fn)
    x = small(tokens, 1024)
    weight = small(4096, 1024)
    bias = torch.empty(4096, device=_META)
    inverses = tuple(torch.empty(2, device=_META))
    scale, amax = torch.empty(2, device=_META)
    exact = False
    fast = True
    pre, _ = form.product_gelu(x, weight, inverses, bias, exact, scale, amax, x.dtype)
    d_out = x.view(torch.float8_e5m2)
    form.product_gelu_backward(
        d_out, weight, inverses, fast, pre, bias, exact, scale, amax, torch.float8_e5m2
    )
    if kept:
        return  # it has no form with slopes
    slopes, _ = product.product_slope(x, weight, inverses, bias, scale, amax, x.dtype)
    product.product_slope_backward(d_out, weight, inverses, slopes, scale, amax, torch.float8_e5m2)


def _gelu(dtype: torch.dtype, tokens: int = 4096) -> None:
    x = _tensor(tokens, 4096, dtype=dtype).detach()
    for exact in (False, True):
        gelu.gelu(x, exact)
        gelu.gelu_backward(x, x, exact)


def _gate(dtype: torch.dtype) -> None:
    for exact in (False, True):
        out = gate.gated_gelu(_tensor(4096, 2 * 1152, dtype=dtype), exact)
        out.backward(torch.empty_like(out))


def _residual(dtype: torch.dtype, device_key: bool = False) -> None:
    x = _tensor(4096, 768, dtype=dtype)
    rows = _tensor(4096, dtype=torch.int32)
    out = residual.add_dropout(_tensor(4096, 768, dtype=dtype), x, 0.1, _key(device_key), rows)
    out.backward(torch.empty_like(out))


def _update(optimizer: type[CompiledOptimizer], *sizes: int) -> None:
    """Update parameters of these sizes; by default the last two elements are unaligned,
    as in BERT.
    """
    flat = FlatParameters(
        (f"{i}.weight", torch.nn.Parameter(_tensor(size)))
        for i, size in enumerate(sizes or (1 << 20, 1024, 2))
    )
    settings: dict[str, Any] = {
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
    }
    settings |= {"formulas": optimizer.FORMULAS, "scaling": optimizer.SCALING}
    layout = ShardLayout.whole(flat.numel)
    pieces = pieces_of(layout.parts, flat.segments)
    update = TritonUpdate(pieces, len(flat.segments), layout, _META, **settings)
    state = (torch.empty_like(flat.data) for _ in optimizer.STATE)
    update.launch((flat.data, flat.grad, *state), after_block=lambda block: None)


def cases() -> dict[str, Callable[[], None]]:
    """Return calls of ops on meta tensors, forward and backward, by name."""
    half = torch.bfloat16
    single = torch.float32
    return {
        "attention H=64 bf16 dropout": lambda: _attention(64, half, 0.1, False),
        "attention H=64 bf16": lambda: _attention(64, half, 0.0, False),
        "attention H=64 bf16 dropout ALiBi": lambda: _attention(64, half, 0.1, True),
        "attention H=64 fp16 dropout": lambda: _attention(64, torch.float16, 0.1, False),
        "attention H=32 bf16 dropout": lambda: _attention(32, half, 0.1, False),
        "attention H=128 bf16 dropout": lambda: _attention(128, half, 0.1, False),
        "attention H=64 fp32 dropout": lambda: _attention(64, single, 0.1, False),
        "attention H=64 bf16 local": lambda: _attention(64, half, 0.0, False, window=64),
        "attention H=64 bf16 local dropout": lambda: _attention(64, half, 0.1, False, window=64),
        "attention H=64 bf16 device key": lambda: _attention(64, half, 0.1, False, True),
        "attention H=64 bf16 gradient sums": lambda: _qkv_attention(False),
        "attention H=64 bf16 fp8 gradient": lambda: _qkv_attention(True),
        f"{ATTENTION_IN_GLUON} dropout": lambda: _gluon_attention(0.1),
        f"{ATTENTION_IN_GLUON}": lambda: _gluon_attention(0.0),
        f"{ATTENTION_IN_GLUON} local": lambda: _gluon_attention(0.0, 64),
        f"{ATTENTION_IN_GLUON} local dropout": lambda: _gluon_attention(0.1, 64),
        "norm D=1024 bf16 device key": lambda: _norm(1024, half, 0.1, device_key=True),
        "norm D=1024 bf16 dropout": lambda: _norm(1024, half, 0.1),
        "norm D=1024 bf16": lambda: _norm(1024, half, 0.0),
        "norm D=768 bf16 dropout": lambda: _norm(768, half, 0.1),
        "norm D=1024 fp32 dropout": lambda: _norm(1024, single, 0.1),
        "norm D=1024 fp16 dropout": lambda: _norm(1024, torch.float16, 0.1),
        "norm D=1024 bf16 fp8 output": lambda: _norm(1024, half, 0.1, quantized=True),
        "loss bf16": lambda: _loss(half),
        "loss fp32": lambda: _loss(single),
        "loss fp16": lambda: _loss(torch.float16),
        "embedding bf16": lambda: _embedding(half),
        "embedding fp32": lambda: _embedding(single),
        "embedding fp16": lambda: _embedding(torch.float16),
        "cast fp8": _cast,
        HOPPER_CASE: _product,
        GLUON_CASE: lambda: _product(kept=True),
        "GELU bf16": lambda: _gelu(half),
        "GELU fp16": lambda: _gelu(torch.float16),
        "GELU one token": lambda: _gelu(half, tokens=1),
        "GeGLU bf16": lambda: _gate(half),
        "residual bf16 dropout": lambda: _residual(half, device_key=True),
        "norm one token": lambda: _norm(1024, half, 0.1, tokens=1),
        "loss one row": lambda: _loss(half, rows=1),
        "embedding one token": lambda: _embedding(half, tokens=1),
        "cast fp8 one token": lambda: _cast(tokens=1),
        "expand": _expand,
        "LAMB": lambda: _update(Lamb),
        "LAMB unaligned": lambda: _update(Lamb, 4097),
        "AdamW": lambda: _update(AdamW),
        "StableAdamW": lambda: _update(StableAdamW),
        "ACClip": lambda: _update(ACClip),
        "MADGRAD": lambda: _update(Madgrad),
        "SGD": lambda: _update(SGD),
    }


def compile_case(case: str, arch: int) -> list[Report]:
    """Compile every kernel of a case once; FP8 cases have none on an architecture without FP8."""
    if ("fp8" in case and arch < FIRST_FP8_ARCHITECTURE) or (
        case.startswith((HOPPER_CASE, ATTENTION_IN_GLUON)) and arch != 90
    ):
        return []
    with recording(arch) as launches:
        cases()[case]()
    if case.startswith(ATTENTION_IN_GLUON):
        # The others are those of Triton's form.
        launches = [launch for launch in launches if launch.kernel.is_gluon()]
    unique = {(x.kernel.fn.__name__, repr(x.arguments), repr(x.options)): x for x in launches}
    return [compile_launch(launch, case, arch) for launch in unique.values()]


def main(words: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--arch", type=int, nargs="*", default=ARCHITECTURES, help="compute capabilities times ten"
    )
    parser.add_argument("--only", default="", help="only cases with this text in their name")
    options = parser.parse_args(words)
    line = "{:34} {:36} {:>4} {:>4} {:>5} {:>7} {:>5} {:>8} {:>12} {:>6} {:>9}"
    print(
        line.format(
            "case",
            "kernel",
            "arch",
            "regs",
            "spill",
            "shared",
            "warps",
            "barriers",
            "instructions",
            "clocks",
            "in a loop",
        )
    )
    serialized: list[str] = []
    for case in cases():
        if options.only not in case:
            continue
        for arch in options.arch:
            reports = compile_case(case, arch)
            for report in reports:
                counts = sass.instructions(report.cubin)
                loops = sass.loops(report.cubin)
                barriers = sum(
                    count for opcode, count in counts.items() if opcode.startswith("BAR")
                )
                assembly = report.assembly
                longest_loop = max((loop.total() for loop in loops), default=0)
                print(
                    line.format(
                        case,
                        report.kernel,
                        arch,
                        assembly.registers,
                        assembly.spilled,
                        report.shared,
                        report.warps,
                        barriers,
                        counts.total(),
                        sass.clocks(counts),
                        longest_loop,
                    )
                )
                for message in assembly.serialized:
                    print(f"    {message}")
                    serialized.append(report.kernel)
    if serialized:
        sys.exit(f"ptxas serializes matrix products of {', '.join(dict.fromkeys(serialized))}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Settings of precision, ops, threads and CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mlbert.config.section import Choice, Ranges, Registry, Section, fixed_setting, setting


@dataclass(frozen=True)
class Form(Choice):
    """A choice of implementations of the ops.

    Its place is a function of the kind of device that loads what is registered by its name with
    `mlbert.ops.forms.register`. It raises NativeUnavailable or ImportError with the reason if that
    is not available. The place is empty if there is nothing to load.

    Attributes:
        tried: kind of device -> names to try for each op, in this order, before plain.
        timed_on: kinds of device on which ``fastest`` compares it.
    """

    tried: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    timed_on: tuple[str, ...] = ()


FORMS = Registry(
    {
        "auto": Form("", {"cpu": ("native",), "cuda": ("cublaslt", "triton")}),
        "plain": Form("", {"cpu": (), "cuda": ()}),
        "native": Form("mlbert.ops.native_library:load", {"cpu": ("native",)}, ("cpu",)),
        "triton": Form(
            "mlbert.ops.triton_loader:load", {"cpu": ("triton",), "cuda": ("triton",)}, ("cuda",)
        ),
        "cublaslt": Form("mlbert.ops.cublaslt:load", {"cuda": ("cublaslt", "triton")}, ("cuda",)),
        "fused": Form(
            "mlbert.ops.triton_loader:load_fused",
            {"cpu": ("fused", "triton"), "cuda": ("fused", "cublaslt", "triton")},
            ("cuda",),
        ),
        # Not timed by ``fastest``: its gain is in the two directions together, and in memory.
        "slopes": Form(
            "mlbert.ops.triton_loader:load_fused",
            {
                "cpu": ("slopes", "fused", "triton"),
                "cuda": ("slopes", "fused", "cublaslt", "triton"),
            },
        ),
        "gluon": Form(
            "mlbert.ops.triton_loader:load_gluon",
            {"cuda": ("gluon", "fused", "cublaslt", "triton")},
        ),
        "gluon-attention": Form(
            "mlbert.ops.triton_loader:load_gluon_attention",
            {"cuda": ("gluon-attention", "cublaslt", "triton")},
        ),
        "qkv": Form(
            "mlbert.ops.triton_loader:load_qkv",
            {"cpu": ("qkv", "triton"), "cuda": ("qkv", "cublaslt", "triton")},
        ),
        "fmha": Form(
            "mlbert.ops.fmha:check_device", {"cuda": ("fmha", "cublaslt", "triton")}, ("cuda",)
        ),
        "fastest": Form(""),
    }
)


class ComputeConfig(Section):
    """Number formats, implementations of the ops, threads and CUDA graphs."""

    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8", "fp8-forward"] = fixed_setting(
        "PRECISION",
        "Number format of matrix products. auto: bf16 on a GPU, and on a CPU whichever is faster "
        "for the run; fp8: in the encoder; fp8-forward: only in its forward products.",
        default="auto",
    )
    fp8_fast_accumulation: Literal["forward", "all"] = fixed_setting(
        "FP8_FAST_ACCUMULATION",
        "FP8 products that Hopper's tensor cores accumulate with fewer bits; "
        "all: also the products for gradients.",
        default="forward",
    )
    loss_scale: float = setting(
        "LOSS_SCALE",
        "Initial loss scale of fp16; halved on overflow.",
        default=131072.0,
        gt=0,
        le=16777216,
    )
    loss_scale_window: int = fixed_setting(
        "LOSS_SCALE_WINDOW",
        "Steps without overflow after which LOSS_SCALE doubles.",
        default=2000,
        **Ranges.STEPS,
    )
    cpu_threads: int | None = setting(
        "CPU_THREADS",
        "none: one for each of the rank's cores, except those that other programs keep busy.",
        default=None,
        unit="threads per rank",
        **Ranges.CPUS,
    )
    ops: str = setting(
        "OPS",
        "Implementation of the ops; fastest: time all before the run.",
        default="auto",
        choices=FORMS,
    )
    cuda_graph_mode: Literal["none", "segmented", "full_iteration"] = setting(
        "CUDA_GRAPH_MODE",
        "What to replay as a CUDA graph: forward and backward of a micro-batch, or the full step.",
        default="none",
    )
    auto_micro_batch: bool | None = setting(
        "AUTO_MICRO_BATCH",
        "Double GRADIENT_STEPS when the device runs out of memory.",
        default=None,
    )

"""Count the instructions of attention's kernels, in Triton and in Gluon, for sm_90a.

PYTHONPATH=benchmarks/bert/implementations/pytorch:tools python count.py > counts.txt

The loop is the first one with products, over blocks of 64 keys or queries that need no mask but a
window's: what a warp executes for 64 queries and 64 keys.
"""

from __future__ import annotations

import compile_kernels
import sass

CASES = {
    "BERT, dropout": ("attention H=64 bf16 device key", "attention in Gluon dropout"),
    "ModernBERT, global": ("attention H=64 bf16", "attention in Gluon"),
    "ModernBERT, local": ("attention H=64 bf16 local", "attention in Gluon local"),
}
WITHOUT_PRODUCTS = ("attention_order_kernel", "attention_pairs_kernel", "rotary_kernel")
ARCH = 90


def main() -> None:
    """Print the counts."""
    for what, cases in CASES.items():
        for case in cases:
            with compile_kernels.recording(ARCH) as launches:
                compile_kernels.cases()[case]()
            for launch in launches:
                if launch.kernel.fn.__name__ not in WITHOUT_PRODUCTS:
                    describe(what, compile_kernels.compile_launch(launch, case, ARCH))


def describe(what: str, report: compile_kernels.Report) -> None:
    """Print the counts of a kernel."""
    loop = next(x for x in sass.loops(report.cubin) if sass.classes(x)["tensor"])
    barriers = sum(count for opcode, count in loop.items() if opcode.startswith("BAR"))
    counts = sass.instructions(report.cubin)
    assembly = report.assembly
    classes = ", ".join(f"{name} {count}" for name, count in sass.classes(loop).most_common())
    print(f"{what}: {report.kernel}")
    print(
        f"    {assembly.registers} registers, {assembly.spilled} bytes of spills, "
        f"{report.shared} bytes of shared memory, {report.warps} warps, {counts.total()} "
        f"instructions, {sass.classes(counts)['tensor']} products, serialized: "
        f"{', '.join(assembly.serialized) or 'none'}"
    )
    print(
        f"    loop: {loop.total()} instructions ({classes}), {barriers} barriers, "
        f"{loop['MUFU.EX2']} exponentials",
        flush=True,
    )


if __name__ == "__main__":
    main()

"""Model the time of attention on an H200 from instruction counts: BERT-large, dropout 0.1, forward and backward.

Each kernel is compiled for compute capability 9.0 and its SASS counted (`sass.py`). A program (one block of queries or
keys, one head, one sequence of L tokens) walks ceil(L / B) blocks of B keys or queries::

    step      max(clocks of the main loop's instructions * warps / 4,
              1 clock per 2,048 multiplications and additions of the matrix products); the main loop is the one
              with the products, and its clocks are `sass.clocks`: at least one per instruction
    rest      (the kernel's instructions - those of all its loops - those of the main loop) * warps / 4: the code
              outside the loops, less the last block's step, which is compiled separately and replaces one iteration
    program   ceil(L / B) * step + rest
    sequence  24 layers * 16 heads * sum over the kernels of ceil(L / own block) programs, averaged over the lengths
              (`mlbert.data.loading.synthetic.LENGTH_QUANTILES` at 10,000 even shares), / 132 multiprocessors / 1.83 GHz

A multiprocessor has four schedulers, each of which issues one warp instruction per clock, and its tensor cores do 4,096
bf16 operations per clock; 1.83 GHz is the clock at which that gives the data sheet's 989.5 TFLOP/s. The model leaves
out stalls, launches and memory (about 2 us per sequence for the mask's bits).
Printed by `python tools/compile_kernels.py --only "attention H=64 bf16 dropout" --arch 90`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

import sass
from mlbert.data.loading.synthetic import lengths_at

LAYERS, HEADS, HEAD_SIZE, LONGEST = 24, 16, 64, 512
MULTIPROCESSORS, HERTZ, SCHEDULERS, PRODUCTS_A_CLOCK = 132, 1.83e9, 4, 2048
# Matrix products per tile, and the side of the tile that a program owns.
KERNELS = {
    "attention_forward_kernel": (2, "BLOCK_Q"),
    "attention_query_gradient_kernel": (3, "BLOCK_Q"),
    "attention_key_value_gradient_kernel": (4, "BLOCK_K"),
}


@dataclass(frozen=True)
class Kernel:
    """Clocks of one multiprocessor; `slots` is the number of main-loop instructions per warp."""

    step: float
    rest: float
    own: int
    other: int
    slots: int

    def microseconds(self) -> float:
        """Return microseconds per sequence of the benchmark's mean length, over all layers and heads."""
        lengths = lengths_at((np.arange(10_000) + 0.5) / 10_000, LONGEST)
        programs, steps = -(-lengths // self.own), -(-lengths // self.other)
        clocks = float((programs * (steps * self.step + self.rest)).mean())
        return 1e6 * LAYERS * HEADS * clocks / MULTIPROCESSORS / HERTZ


def of(name: str, blocks: Mapping[str, int], warps: int, cubin: bytes) -> Kernel:
    """Return the model of a compiled kernel of `KERNELS`; `blocks` has its BLOCK_Q and BLOCK_K."""
    products, side = KERNELS[name]
    loops = sass.loops(cubin)
    main = next(loop for loop in loops if sass.classes(loop)["tensor"])
    area = blocks["BLOCK_Q"] * blocks["BLOCK_K"]
    tensor = products * area * HEAD_SIZE / PRODUCTS_A_CLOCK
    rest = sass.instructions(cubin).total() - sum(loop.total() for loop in loops) - main.total()
    share = warps / SCHEDULERS
    step = max(sass.clocks(main) * share, tensor)
    own = blocks[side]
    return Kernel(step, max(0, rest) * share, own, area // own, main.total())

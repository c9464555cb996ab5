"""Print the rate of the C kernel of attention by length, and of a matrix product, on one core.

Forward counts 2 products of a head, backward 5; the fastest of a few calls.
"""

import time

import torch

from mlbert.ops.attention import native_attention

HEADS = 12
HEAD_SIZE = 64
TOKENS = 4096


def fastest(call, repeats):
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


torch.set_num_threads(1)
for length in (128, 512, 1024, 2048, 8192):
    sequences = max(1, TOKENS // length)
    tokens = sequences * length
    qkv = torch.randn(tokens, 3, HEADS, HEAD_SIZE, requires_grad=True)
    bounds = torch.arange(0, tokens + 1, length, dtype=torch.int32)
    gradient = torch.randn(tokens, HEADS, HEAD_SIZE)
    repeats = 3 if length > TOKENS else 5

    def forward(qkv=qkv, bounds=bounds):
        return native_attention(qkv, bounds, 0.0, 1, None, tiles=False)

    out = forward()

    def backward(qkv=qkv, out=out, gradient=gradient):
        torch.autograd.grad(out, qkv, gradient, retain_graph=True)

    flops = 4.0 * sequences * length**2 * HEADS * HEAD_SIZE
    rates = (flops / fastest(forward, repeats), 2.5 * flops / fastest(backward, repeats))
    print(f"{length} tokens: forward {rates[0] / 1e9:.1f}, backward {rates[1] / 1e9:.1f} GFLOP/s")
a = torch.randn(2048, 768)
b = torch.randn(768, 768)
print(f"product: {2 * 2048 * 768**2 / fastest(lambda: a @ b, 20) / 1e9:.1f} GFLOP/s")

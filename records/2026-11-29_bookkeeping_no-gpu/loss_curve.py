"""Loss curves of a small BERT on a CPU: bfloat16, FP8, and FP8 with the new forms' references.

    PYTHONPATH=benchmarks/bert/implementations/pytorch:tests python loss_curve.py

Sixty updates on the same few samples, which the model learns by heart, with dropout, as in
tests/unit/models/test_fp8.py, for several seeds. "slope" keeps GELU's derivative in a byte; "qkv"
rounds attention's gradient once, from float32 to e5m2, and sums it before rounding.
"""

import json

import torch

from capturable import SETTINGS
from host_batches import made_up_batches
from mlbert.config.bert_config import BertConfig
from mlbert.distributed.sharding import ShardLayout
from mlbert.models.bert import BertForPreTraining
from mlbert.ops import api as ops
from mlbert.ops import forms as registry
from mlbert.ops import qkv_attention
from mlbert.ops.fp8_scaling import Products
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb
from model_loss import loss_of
from same_weights import initialized

SHAPE = BertConfig(200, 64, 2, 2, 128, max_position_embeddings=64)
STEPS = 60
SEEDS = (3, 4, 5)
SLOPE_OPS = ("fp8_product_slope", "fp8_product_slope_backward")


def losses(products: Products | None, seed: int) -> list[float]:
    model = initialized(BertForPreTraining(SHAPE, torch.bfloat16, fp8_products=products), seed)
    flat = FlatParameters(model.ordered_parameters())
    (batch,) = made_up_batches(4, seed=seed, vocab_size=200, max_tokens=64)
    batch = batch.to("cpu")
    optimizer = Lamb(flat, ShardLayout.whole(flat.numel), **SETTINGS)
    curve = []
    for step in range(STEPS):
        flat.begin_gradients()
        loss = loss_of(model, batch, (seed, step))
        loss.backward()
        flat.finish_gradients()
        optimizer.step(0.03)
        model.end_step(lambda amax: amax)
        curve.append(float(loss.detach()))
    return curve


for op in SLOPE_OPS:
    registry.register(op, "reference")(registry.form(op, "plain"))
qkv_attention.register("reference", qkv_attention.PlainAttentionForm())
torch.set_num_threads(1)
names = ops.select("auto")
for seed in SEEDS:
    curves = {}
    variants = {
        "bf16": (None, {}),
        "fp8": (Products(fast=True), {}),
        "slope": (Products(fast=True), dict.fromkeys(SLOPE_OPS, "reference")),
        "qkv": (Products(fast=True), {qkv_attention.FP8_OP: "reference"}),
    }
    for name, (products, forms) in variants.items():
        registry.select_each(names | forms)
        curves[name] = losses(products, seed)
    for name in ("fp8", "slope", "qkv"):
        gap = max(abs(a - b) for a, b in zip(curves[name], curves["bf16"], strict=True))
        own = max(abs(a - b) for a, b in zip(curves[name], curves["fp8"], strict=True))
        print(
            f"seed {seed}: {name:5} first {curves[name][0]:.4f} last {curves[name][-1]:.4f}, "
            f"largest distance from bf16 {gap:.4f}, from fp8 {own:.4f}",
            flush=True,
        )
    print(json.dumps({"seed": seed, **curves}), flush=True)

"""The model and its step on a GPU: fast ops against plain ones, determinism, no synchronization."""

import dataclasses

import pytest
import torch

from gpu_check.profile import profile_step
from gpu_check.published_step import PublishedStep, configured
from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import Batch
from mlbert.models.bert import BertForPreTraining
from mlbert.ops import api as ops
from mlbert.ops.fp8_scaling import Products
from mlbert.programs.bench.sides import make_batch
from model_loss import loss_of
from same_weights import initialized
from trainer import Trainer

STEPS = 3


@pytest.fixture
def batch(large: BertConfig, device: torch.device) -> Batch:
    return make_batch(large, 24, None, seed=1).to(device)


def gradients(
    config: BertConfig, batch: Batch, dtype: torch.dtype, choice: str
) -> tuple[float, dict]:
    """Return the loss and gradients of one pass with dropout."""
    ops.select(choice, batch.input_ids.device)
    model = initialized(BertForPreTraining(config, dtype)).to(batch.input_ids.device)
    loss = loss_of(model, batch, (1, 0))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [{}, {"position_embedding_type": "alibi", "gated_mlp": True}, {"norm_position": "pre"}],
    ids=str,
)
def test_fast_model_matches_plain_model(large, batch, options):
    """In bfloat16 with the same dropout masks, the error of the fast model is at most twice
    that of the plain one.
    """
    large = dataclasses.replace(large, **options)
    exact_loss, exact = gradients(large, batch, torch.float32, "plain")
    plain_loss, plain = gradients(large, batch, torch.bfloat16, "plain")
    fast_loss, fast = gradients(large, batch, torch.bfloat16, "auto")
    assert fast_loss == pytest.approx(exact_loss, rel=5e-3)
    assert plain_loss == pytest.approx(exact_loss, rel=5e-3)

    def distance(found: dict[str, torch.Tensor]) -> float:
        return sum(float((found[n] - exact[n]).double().square().sum()) for n in exact) ** 0.5

    assert distance(fast) <= 2 * distance(plain)


def losses(config: BertConfig, device: torch.device, products: Products | None) -> list[float]:
    trainer = Trainer(
        config,
        make_batch(config, 24, None, seed=1),
        device,
        torch.bfloat16,
        seed=1,
        products=products,
    )
    return [float(trainer.step()) for _ in range(STEPS)]


def test_two_runs_are_bit_equal(products, large, device):
    first = losses(large, device, products)
    assert first == losses(large, device, products)
    assert first[-1] < first[0]


def test_step_does_not_synchronize(products, large, device, allow_sync_afterwards):
    trainer = Trainer(
        large,
        make_batch(large, 24, None, seed=1),
        device,
        torch.bfloat16,
        seed=1,
        products=products,
    )
    trainer.step()  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    loss = trainer.step()
    torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(loss)


def test_profile_attributes_kernels_to_groups(large, device, tmp_path):
    """Every group of a replayed step has kernels."""
    published = PublishedStep(configured("bf16", tmp_path, {"BATCHSIZE": "12"}, large), device)
    groups = profile_step(published.step, device)["groups"]
    for group in ("attention", "GEMM", "norm", "loss", "optimizer", "embedding"):
        assert groups[group]["seconds"] > 0, group
    assert groups["GEMM"]["share"] > 0.2
    assert any("kernel" in name for name in groups["attention"]["names"])

"""The optimizer for other people's loops: torch's numbers, schedules and checkpoints."""

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import mlbert
from programs import run_checked
from user_errors import user_error


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 2))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, clear="optimizer"
) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for _ in range(2):  # micro-batches
            model(torch.randn(8, 6, generator=draw)).square().sum().backward()
        optimizer.step()
        schedule.step()
        (optimizer if clear == "optimizer" else model).zero_grad()


@pytest.mark.parametrize("clear", ["optimizer", "model"])
@pytest.mark.parametrize("implementation", ["plain", "auto"])
def test_adamw_equals_torch(implementation: str, clear: str) -> None:
    model = network()
    peer = network()
    options = {"lr": 0.01, "betas": (0.9, 0.98), "eps": 1e-6}
    optimizer = mlbert.make_optimizer(
        model, "adamw", weight_decay=0.1, implementation=implementation, **options
    )
    groups = [
        {"params": [p for p in peer.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in peer.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    train(model, optimizer, 5, clear)
    train(peer, torch.optim.AdamW(groups, **options), 5)
    for found, expected in zip(model.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_checkpoint_continues_exactly() -> None:
    whole = network()
    rule = {"name": "decoupled_stableadamw", "lr": 0.01, "max_grad_norm": 1.0}
    optimizer = mlbert.make_optimizer(whole, **rule)
    train(whole, optimizer, 3)
    file = io.BytesIO()
    torch.save({"model": whole.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(whole, optimizer, 3)

    file.seek(0)
    state = torch.load(file, weights_only=True)
    model = network()
    again = mlbert.make_optimizer(model, **rule)
    model.load_state_dict(state["model"])
    again.load_state_dict(state["optimizer"])
    train(model, again, 3)
    for found, expected in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, expected)
    with user_error("checkpoint.shape", "optimizer state"):
        mlbert.make_optimizer(nn.Linear(2, 2), **rule).load_state_dict(state["optimizer"])


def test_frozen_parameters_stay_and_infinite_gradients_change_nothing() -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = mlbert.make_optimizer(model, "lamb", lr=0.1)
    before = [parameter.clone() for parameter in model.parameters()]
    model(torch.full((2, 6), float("inf"))).sum().backward()
    optimizer.step()
    assert not optimizer.grad_norm.isfinite()
    assert all(map(torch.equal, model.parameters(), before))
    optimizer.zero_grad()
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before[0])
    assert not torch.equal(model[3].weight, before[4])


def test_mistakes() -> None:
    with user_error("config.choice", "optimizer 'adam'"):
        mlbert.make_optimizer(network(), "adam", lr=0.1)
    model = network()
    optimizer = mlbert.make_optimizer(model, lr=0.1)
    model.double()
    with user_error("config.conflict", "optimizer"):
        optimizer.step()


@pytest.mark.slow
def test_two_ranks_train_as_one_process(pretrained: Path, tmp_path: Path) -> None:
    shape = json.loads((pretrained / "bert_config.json").read_text())
    shape |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    file = tmp_path / "bert_config.json"
    file.write_text(json.dumps(shape))
    script = Path(__file__).with_name("two_ranks.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = ["--nproc-per-node=2", script, pretrained, file, tmp_path / "out.pt"]
    run_checked(*launcher, *words, timeout=120)
    found = torch.load(tmp_path / "out.pt", weights_only=True)

    model = mlbert.new_model(file, seed=1).train()
    optimizer = mlbert.make_optimizer(model, lr=0.01)
    ranks = [
        mlbert.open_dataset(pretrained, 4, steps=3, rank=rank, world_size=2) for rank in (0, 1)
    ]
    for batches in zip(*ranks, strict=True):
        for batch in batches:
            (model(batch).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(found[name], expected, atol=1e-5, rtol=1e-4)

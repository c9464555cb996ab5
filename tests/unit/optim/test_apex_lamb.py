"""The adapter to apex's FusedLAMB: errors without apex,
and the arguments it passes to a working stand-in.
"""

import math
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from mlbert.distributed.groups import RankGroup, ShardGroups
from mlbert.distributed.sharding import ShardLayout
from mlbert.host.native import NativeUnavailable
from mlbert.optim.adamw import AdamW
from mlbert.optim.lamb import ApexLamb, Lamb, find_fused_lamb
from optimizer_cases import COMMON as SETTINGS
from unsharded import unsharded
from user_errors import user_error


class StandIn(torch.optim.Optimizer):
    """LAMB in plain operations, with FusedLAMB's documented arguments and use of state."""

    def __init__(self, params: list[dict], lr: float = 1e-3, **settings: Any) -> None:
        assert settings.pop("adam_w_mode")
        assert settings.pop("grad_averaging")
        assert not settings.pop("use_nvlamb")
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, **settings})

    @torch.no_grad()
    def step(self) -> None:
        total = math.sqrt(
            sum(
                float(p.grad.double().square().sum())
                for g in self.param_groups
                for p in g["params"]
            )
        )
        for group in self.param_groups:
            group["step"] = step = group["step"] + 1 if "step" in group else 1
            beta_1, beta_2 = group["betas"]
            decay = group["weight_decay"]
            limit = group["max_grad_norm"]
            for parameter in group["params"]:
                grad = parameter.grad * (limit / total if limit > 0 and total > limit else 1.0)
                m = self.state[parameter]["exp_avg"]
                v = self.state[parameter]["exp_avg_sq"]
                m.mul_(beta_1).add_(grad, alpha=1 - beta_1)
                v.mul_(beta_2).addcmul_(grad, grad, value=1 - beta_2)
                root = (v / (1 - beta_2**step)).sqrt()
                update = m / (1 - beta_1**step) / (root + group["eps"]) + decay * parameter
                norms = float(parameter.double().norm()), float(update.double().norm())
                ratio = norms[0] / norms[1] if decay and all(norms) else 1.0
                parameter.sub_(group["lr"] * ratio * update)


def test_updates_match_lamb_on_the_same_buffers(make_flat):
    """The rate and update number change from step to step;
    the stand-in has no state except the flat moments.
    """
    flat = make_flat()
    plain_flat = make_flat()
    moments = torch.zeros_like(flat.data), torch.zeros_like(flat.data)
    apex = ApexLamb(StandIn, flat, moments, **SETTINGS, bias_correction=True)
    plain = unsharded(Lamb, plain_flat, **SETTINGS, implementation="plain")
    for update in range(1, 5):
        apex.step(0.01 / update, update)
        plain.step(0.01 / update)
    torch.testing.assert_close(flat.data, plain_flat.data, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(moments, (plain.exp_avg, plain.exp_avg_sq), rtol=1e-5, atol=1e-9)


def test_no_clipping_is_a_norm_of_0_for_apex_and_in_the_log(make_flat):
    flat = make_flat()
    settings = SETTINGS | {"max_grad_norm": None}
    fused = ApexLamb(StandIn, flat, (flat.data, flat.grad), **settings, bias_correction=True)._fused
    assert {group["max_grad_norm"] for group in fused.param_groups} == {0.0}
    events: dict[str, object] = {}
    unsharded(Lamb, flat, **settings, implementation="plain").hyperparameters(events.__setitem__)
    assert events["opt_gradient_clip_norm"] == 0.0


def test_apex_does_not_shard(make_flat):
    flat = make_flat()
    with user_error("ops.unavailable", "apex optimizer", wording=False) as caught:
        Lamb(
            flat,
            ShardLayout(128, ShardGroups(inside=RankGroup(0, 2)), 0),
            **SETTINGS,
            implementation="apex",
        )
    assert "cannot be sharded" in str(caught.value)


@pytest.mark.parametrize("optimizer", [Lamb, AdamW])
def test_unavailable_apex_is_a_user_error(make_flat, optimizer):
    with user_error("ops.unavailable", "apex optimizer"):
        unsharded(optimizer, make_flat(), **SETTINGS, implementation="apex")


@pytest.mark.parametrize("module", [None, SimpleNamespace()])
def test_no_apex_or_another_package_of_that_name_is_reported(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "apex.optimizers", module)
    with pytest.raises(NativeUnavailable, match="apex cannot be imported"):
        find_fused_lamb()


def test_apex_without_kernels_is_reported(make_flat):
    flat = make_flat()
    without_kernels = Mock(side_effect=RuntimeError("requires cuda extensions"))
    with pytest.raises(NativeUnavailable, match="requires cuda extensions"):
        ApexLamb(without_kernels, flat, (flat.data, flat.grad), **SETTINGS, bias_correction=True)

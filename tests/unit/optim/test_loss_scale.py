"""The dynamic loss scale: its rule, and training in float16 with it."""

import pytest
import torch

from mlbert.optim.loss_scale import LARGEST, LossScale
from training_settings import train

GOOD, BAD = (torch.tensor(value, dtype=torch.float64) for value in (1.0, float("nan")))


def after(scale: LossScale, norms: list[torch.Tensor]) -> list[float]:
    found = []
    for norm in norms:
        scale.update(norm)
        found.append(float(scale.value))
    return found


def test_scale_halves_at_once_and_doubles_after_the_window():
    scale = LossScale(8.0, 3, torch.device("cpu"))
    assert after(scale, [GOOD, GOOD, BAD, GOOD, GOOD, GOOD, GOOD]) == [8, 8, 4, 4, 4, 8, 8]
    assert after(scale, [torch.tensor(float("inf"), dtype=torch.float64), GOOD]) == [4, 4]
    assert after(LossScale(LARGEST / 2, 1, torch.device("cpu")), [GOOD] * 3) == [LARGEST] * 3


def test_state_is_restored():
    first = LossScale(8.0, 3, torch.device("cpu"))
    second = LossScale(2.0, 3, torch.device("cpu"))
    after(first, [BAD, GOOD])
    second.load_state_dict(first.state_dict())
    norms = [GOOD, GOOD, GOOD, BAD]
    assert after(second, norms) == after(first, norms) == [4, 8, 8, 4]


@pytest.mark.parametrize(("recipe", "clipping"), [("packed_lamb", "after"), ("ddp_adam", "before")])
def test_float16_training_is_close_to_float32(tmp_path, recipe, clipping):
    settings = {
        "recipe": recipe,
        "gradient_clipping": clipping,
        "average_packing_rate": 1,
        "exchange_padding": "off",
    }
    settings |= {"max_steps": 6, "learning_rate": 0.001}
    exact, half = (train(tmp_path, name, precision=name, **settings) for name in ("fp32", "fp16"))
    for key, tolerance in (("loss", 1e-3), ("grad_norm", 1e-2)):
        assert [m[key] for m in half] == pytest.approx([m[key] for m in exact], rel=tolerance)


def test_steps_that_overflow_do_not_count(tmp_path):
    """A scale that is too large is halved until the gradients fit;
    until then the learning rate does not advance.
    """
    metrics = train(tmp_path, precision="fp16", loss_scale=2**24, warmup_steps=100, max_steps=20)
    skipped = [m for m in metrics if not m["grad_norm"] < float("inf")]
    assert 0 < len(skipped) < len(metrics), metrics
    assert metrics[: len(skipped)] == skipped
    updates = 0
    for metric in metrics:
        assert metric["learning_rate"] == pytest.approx(0.01 * updates / 100)
        updates += metric not in skipped

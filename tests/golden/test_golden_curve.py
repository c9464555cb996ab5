"""Compare the loss curve of the tiny recipe with a golden one:
refactoring must not change it, a new method does.

`tiny_loss.txt` has the step, loss and gradient norm of 60 steps on a small prepared text, with the
plain ops on one thread. Two runs on one machine are bit-equal. Other processors sum in another
order, and 60 steps of LAMB amplify a difference of 1e-7 to less than TOLERANCE. A failure names the
file of the new curve: copy it here if the change is intended.
"""

from pathlib import Path

import pytest

from mlbert.data.formats.manifest import read_manifest
from training_settings import train

GOLDEN = Path(__file__).with_name("tiny_loss.txt")
TOLERANCE = 5e-4


def tiny_curve(prepared: Path, folder: Path, name: str, ops: str = "plain") -> Path:
    """Train and write the curve to a text file."""
    metrics = train(
        folder,
        name,
        shape={
            "vocab_size": read_manifest(prepared / "train").vocab_size,
            "initializer_range": 0.1,
        },
        synthetic_data=0,
        input_dir=prepared / "train",
        eval_dir=prepared / "eval",
        num_eval_examples=32,
        max_steps=60,
        warmup_steps=5,
        seed=20,
        ops=ops,
    )
    curve = folder / f"{name}.txt"
    lines = [f"{m['step']} {m['loss']!r} {m['grad_norm']!r}\n" for m in metrics]
    curve.write_text("".join(lines))
    return curve


def losses(curve: Path) -> list[float]:
    return [float(line.split()[1]) for line in curve.read_text().splitlines()]


@pytest.mark.parametrize("ops", ["plain", "auto"])
def test_curve_matches_the_golden_curve(tmp_path, prepared_data, ops):
    curve = tiny_curve(prepared_data, tmp_path, "out", ops)
    if ops == "plain":
        again = tiny_curve(prepared_data, tmp_path, "again", ops)
        assert curve.read_text() == again.read_text(), "two runs are bit-equal"
    golden = losses(GOLDEN)
    assert losses(curve) == pytest.approx(golden, abs=TOLERANCE), f"new curve: {curve}"
    assert golden[-1] < golden[0] - 1.0, "the tiny recipe must learn"

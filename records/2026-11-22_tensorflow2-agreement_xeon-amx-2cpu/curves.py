"""`start`: the weights that both begin with. `draw`: both loss curves, and how far they are apart."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib
import numpy as np
from mlbert.core.bert_config import BertConfig
from safetensors.torch import save_file

from mlbert.models.bert import BertForPreTraining

matplotlib.use("Agg")


def start(shape: Path, folder: Path) -> None:
    """Writes a new model's weights."""
    config = BertConfig.from_json(shape)
    model = BertForPreTraining(config)
    model.initialize(7)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: value.detach().contiguous() for name, value in model.named_parameters()}, folder / "model.safetensors"
    )
    (folder / "bert_config.json").write_text(config.to_json())


def draw(ours: Path, theirs: Path, target: Path) -> None:
    """Draws losses and accuracies, and prints the differences that README.md quotes."""
    from matplotlib import pyplot

    points = [[json.loads(line) for line in path.read_text().splitlines()] for path in (ours, theirs)]
    steps = [[p for p in run if p["kind"] == "step"] for run in points]
    evaluations = [[p for p in run if p["kind"] == "evaluation"] for run in points]
    assert [p["samples"] for p in steps[0]] == [p["samples"] for p in steps[1]], "not the same sequences"
    losses = np.array([[p["loss"] for p in run] for run in steps])
    apart = np.abs(losses[0] - losses[1])
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True, layout="constrained")
    for name, run, measured, style in zip(("PyTorch", "TensorFlow 2"), steps, evaluations, ("-", "--"), strict=True):
        smooth = np.convolve([p["loss"] for p in run], np.ones(25) / 25, "valid")
        top.plot([p["step"] for p in run][24:], smooth, style, label=f"{name}: loss, mean of 25 steps")
        bottom.plot([p["step"] for p in measured], [p["eval_accuracy"] for p in measured], f"{style}.", label=name)
    top.set_ylabel("training loss")
    bottom.set_ylabel("masked-LM accuracy, evaluation set")
    bottom.set_xlabel("step")
    top.legend()
    bottom.legend()
    figure.savefig(target / "curves.png", dpi=100)
    lines = [
        f"{last:5} steps: losses at most {apart[:last].max():.2e} apart" for last in (1, 10, 100, 300, 1000, len(apart))
    ]
    found = [[p["eval_accuracy"] for p in run] for run in evaluations]
    lines += [f"evaluation {i + 1:2}: accuracy {a:.4f} {b:.4f}" for i, (a, b) in enumerate(zip(*found, strict=True))]
    rows = [f"{p['step']},{p['samples']},{a},{b}" for p, a, b in zip(steps[0], *losses, strict=True)]
    (target / "losses.csv").write_text("\n".join(["step,samples,pytorch,tensorflow2", *rows]) + "\n")
    (target / "output.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    {"start": start, "draw": draw}[sys.argv[1]](*map(Path, sys.argv[2:]))

"""Time training steps of `mlbert pretrain` with Muon: wide matrices multiplied in each iteration, and twice only.

    python pairs.py TEXT FOLDER [TURNS]

Seconds are processor time of one thread. Both forms take turns on one model, after one step each that is not measured.
"""

import statistics
import sys
import time
from pathlib import Path

import torch

import race_sides
from mlbert.optim import muon
from mlbert.programs.pretrain_rules import SEQUENCE_LENGTH, choose
from race_text import read_race


def each_iteration(matrices, dtype):
    a, b, c = muon.COEFFICIENTS
    x = (matrices / torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=1e-7)).to(dtype)
    for _ in range(muon.ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def main():
    forms = {"each iteration": each_iteration, "twice": muon.orthogonalize}
    torch.set_num_threads(1)
    text, folder, turns = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 12
    for size, steps in (("tiny", 30), ("small", 4), ("medium", 1)):
        choice = choose(text.stat().st_size // 4, 1200.0, size)
        race = read_race(text, folder, choice.shape.vocabulary, SEQUENCE_LENGTH)
        step, _ = race_sides.ours(race, choice, 1, torch.float32)
        seconds = {name: [] for name in forms}
        for turn in range(turns + 1):
            for name, form in forms.items():
                muon.orthogonalize = form
                start = time.process_time()
                for _ in range(steps):
                    step(0.3)
                if turn:
                    seconds[name].append((time.process_time() - start) / steps)
        ratios = sorted(new / old for old, new in zip(*seconds.values(), strict=True))
        medians = {name: round(statistics.median(values), 4) for name, values in seconds.items()}
        quarter = len(ratios) // 4
        print(
            choice.shape,
            choice.optimizer,
            medians,
            f"ratio {statistics.median(ratios):.3f}",
            f"quartiles {ratios[quarter]:.3f} {ratios[-quarter - 1]:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()

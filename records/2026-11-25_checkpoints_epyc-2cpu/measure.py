"""Cost of a checkpoint to training, before and after it is written in the background, in turns.

    measure.py OLD NEW GIGABYTES ROUNDS THREADS >raw.jsonl

OLD and NEW are checkouts of the tree. Each round starts a process with each, in alternating order. A process "trains":
it multiplies matrices, so that a step takes about 0.1 s. One line each:

    copy      seconds to copy the state into memory that is in use, median of 3
    save      seconds that `Snapshots.save` takes from the training thread
    slowdown  seconds by which the steps are slower until the checkpoint is complete, against the median before
    write     seconds from the call until the checkpoint is complete
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace

SAVES = 2


def train(gigabytes: float, threads: int, folder: Path) -> dict[str, float]:
    import torch
    from torch import nn

    from mlbert.distributed.sharding import ShardLayout
    from mlbert.distributed.world import World
    from mlbert.optim.flat import FlatParameters
    from mlbert.optim.lamb import Lamb
    from mlbert.runs.progress import TrainState
    from mlbert.training.checkpoint import CheckpointFolder, Snapshots

    torch.set_num_threads(threads)
    numel = round(gigabytes * 1e9 / 12)  # weights and two moments
    flat = FlatParameters([("w", nn.Parameter(torch.rand(numel)))])
    flat.grad = flat.padded_grad = torch.empty(0)  # not saved
    layout = ShardLayout.whole(flat.padded_data.numel())
    optimizer = Lamb(flat, layout, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01, max_grad_norm=None)
    method = SimpleNamespace(
        optimizer=optimizer,
        flat=flat,
        model=SimpleNamespace(derived_state=dict),
        loss_scale=None,
        source=SimpleNamespace(state_dict=dict),
    )
    state = TrainState()
    snapshots = Snapshots(CheckpointFolder(folder, 1, {}), method, state, 1, World())
    is_new = hasattr(snapshots, "prepare")
    if is_new:
        snapshots.prepare()
    live = [flat.data, optimizer.exp_avg, optimizer.exp_avg_sq]
    target = torch.ones(numel)

    def copy() -> float:
        begun = time.monotonic()
        for tensor in live:
            target.copy_(tensor)
        return time.monotonic() - begun

    copies = median(copy() for _ in range(3))
    matrix = torch.rand(1500, 1500)

    def step() -> float:
        begun = time.monotonic()
        torch.mm(matrix, matrix)
        return time.monotonic() - begun

    results = []
    for state.step in range(1, SAVES + 1):
        usual = median(step() for _ in range(30))
        begun = time.monotonic()
        snapshots.save()
        save, steps = time.monotonic() - begun, []
        while not (folder / f"step_{state.step:08d}").exists():
            steps.append(step())
        results.append({"save": save, "slowdown": sum(steps) - len(steps) * usual, "write": time.monotonic() - begun})
        if is_new:
            snapshots.wait()
    return {"copy": copies, **{key: median(result[key] for result in results) for key in results[0]}}


def main() -> None:
    if sys.argv[1] == "--train":
        print(json.dumps(train(float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))))
        return
    trees, (gigabytes, rounds, threads) = {"old": sys.argv[1], "new": sys.argv[2]}, sys.argv[3:]
    for number in range(int(rounds)):
        for name in sorted(trees, reverse=number % 2 == 0):
            folder = tempfile.mkdtemp()
            package = Path(trees[name]) / "benchmarks/bert/implementations/pytorch"
            words = [sys.executable, __file__, "--train", gigabytes, threads, folder]
            try:
                done = subprocess.run(
                    words, env={**os.environ, "PYTHONPATH": str(package)}, capture_output=True, text=True, check=True
                )
            finally:
                shutil.rmtree(folder)
            line = {"code": name, "gigabytes": float(gigabytes), "threads": int(threads), **json.loads(done.stdout)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

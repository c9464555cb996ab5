"""Continue to pre-train a model in a loop of your own. Stop it at any time: the same command
continues with the next batch.

    mlbert pretrain texts/ --out my-model
    python own_loop.py my-model continued STEPS
"""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import mlbert

BATCH = 32
LEARNING_RATE = 3e-4
DECAY_STEPS = 1000  # until the rate is a tenth
STEPS_BETWEEN_CHECKPOINTS = 10


def main(pretrained: str, out: str, steps: int, workers: int = 2) -> list[float]:
    """Train up to ``steps``; return the losses of the steps that this call ran."""
    checkpoint = Path(out) / "checkpoint.pt"
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)  # dropout

    data = mlbert.open_dataset(pretrained, BATCH, steps=steps)
    model = mlbert.load_model(f"{pretrained}/model").train()
    optimizer = mlbert.make_optimizer(model, "adamw", lr=LEARNING_RATE, max_grad_norm=1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=DECAY_STEPS)

    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        data.load_state_dict(state["data"])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"])

    losses = []
    # With a separate generator, the loader does not change the one of dropout.
    loader = DataLoader(data, batch_size=None, num_workers=workers, generator=torch.Generator())
    for step, batch in enumerate(loader, start=data.first_step + 1):
        loss = model(batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if step % STEPS_BETWEEN_CHECKPOINTS == 0 or step == steps:
            state = {
                "data": data.state_dict(step),
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "random": torch.get_rng_state(),
            }
            torch.save(state, checkpoint)

    held_out = mlbert.open_dataset(pretrained, BATCH, evaluation=True)
    model.eval()
    with torch.no_grad():
        of_batches = [(model(batch).loss, batch.num_masked) for batch in held_out]
    predicted = sum(count for _, count in of_batches)
    loss = sum(loss * count for loss, count in of_batches) / predicted
    print(f"held-out loss {loss:.3f} over {predicted} tokens")
    model.save_pretrained(f"{out}/model")  # for transformers
    return losses


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

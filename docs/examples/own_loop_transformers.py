"""Train a model of transformers on the batches of a prepared set or of `mlbert pretrain`.

python own_loop_transformers.py my-model STEPS
"""

import sys
from itertools import islice

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForMaskedLM

import mlbert

BATCH = 16
LEARNING_RATE = 1e-4


def main(pretrained: str, steps: int) -> list[float]:
    """Return the loss of each step."""
    torch.manual_seed(1)
    data = mlbert.open_dataset(pretrained, BATCH, padded=True)  # never ends
    model = AutoModelForMaskedLM.from_pretrained(f"{pretrained}/model").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for batch in islice(DataLoader(data, batch_size=None, num_workers=1), steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""Train a model on two ranks with DistributedDataParallel, and save the weights of rank 0:

torchrun --nproc-per-node 2 two_ranks.py SET SHAPE OUT
"""

import sys

import torch
from torch.nn.parallel import DistributedDataParallel

import mlbert

torch.distributed.init_process_group("gloo")
data, shape, out = sys.argv[1:]
model = mlbert.new_model(shape, seed=1).train()
wrapped = DistributedDataParallel(model)
optimizer = mlbert.make_optimizer(wrapped, lr=0.01)
for batch in mlbert.open_dataset(data, 4, steps=3):
    wrapped(batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if torch.distributed.get_rank() == 0:
    torch.save(model.state_dict(), out)
torch.distributed.destroy_process_group()

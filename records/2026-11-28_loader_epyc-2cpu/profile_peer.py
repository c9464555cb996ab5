"""Profile five batches of the benchmark's side "pytorch"."""

import cProfile
import pstats
import tempfile
from pathlib import Path

import torch

from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.programs.bench import loader

torch.set_num_threads(1)
tokenizer = load_tokenizer(loader.TOKENIZER)
with tempfile.TemporaryDirectory() as scratch:
    folder = loader.write_documents(Path(scratch) / "set", tokenizer.vocab_size, 1)
    task = loader.Task(folder, tokenizer, 1024, 0, torch.device("cpu"), 1)
    side = loader._pytorch_side(task)
    next(side.batches)
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(5):
        next(side.batches)
    profile.disable()
pstats.Stats(profile).strip_dirs().sort_stats("cumtime").print_stats(12)

"""A model and a text with which a phase of ``mlbert pretrain`` takes seconds."""

import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

TINY: dict[str, Any] = {
    "shape": "modernbert_base.json",
    "differs": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "local_attention": 8,
    },
    "learning_rate": 3e-3,
    "extend_rate": 1e-3,
    "weight_decay": 1e-5,
    "warmup_tokens": 300,
    "rows": 4608,
    "first_rows": 2304,
    "growth_tokens": 200,
    "micro_rows": 8,
    "published": {},
    "h100_rate": 0,
}
SENTENCES = 700
NOUNS = ("river", "teacher", "engine", "window", "garden", "letter")


def write_sentences(path: Path, count: int = SENTENCES) -> Path:
    """Write documents of one sentence each."""
    draw = random.Random(1)
    lines = [
        f"The {draw.choice(NOUNS)} of {draw.randrange(1000)} sees a {draw.choice(NOUNS)}."
        for _ in range(count)
    ]
    path.write_text("\n\n".join(lines))
    return path


def newest(out: Path, folder: str = "checkpoints") -> Path:
    """Return the last checkpoint of a run."""
    return max((out / "run_0" / folder).glob("step_*"))


def assert_equal_tensors(one: Path, other: Path) -> None:
    """Expect the same weights and optimizer state, to the bit, in two checkpoints."""
    ours = load_file(one / "tensors.safetensors")
    theirs = load_file(other / "tensors.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name

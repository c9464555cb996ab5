"""The other sides of the case, for `mlbert finetune --from`:

baselines.py random MODEL OUT            the shape and vocabulary of MODEL, random weights
baselines.py modernbert MODEL TEXT TOKENS OUT
    ModernBERT in transformers: the shape and vocabulary of MODEL, trained on as many tokens of TEXT
    with AdamW, and as race_sides.theirs in tools/
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoConfig, ModernBertForMaskedLM, PreTrainedTokenizerFast

LENGTH = 128  # tokens of a row
ROWS = 16  # of a step
MASKED = 0.30
RATE = 4e-3  # the best of records/2026-11-23_pretrain_epyc-2cpu for this size
WARMUP = 0.06
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json")


def new_model(source: Path) -> ModernBertForMaskedLM:
    """Return a model of the shape of ``source`` with random weights."""
    return ModernBertForMaskedLM(AutoConfig.from_pretrained(source))


def save(model: ModernBertForMaskedLM, source: Path, out: Path) -> None:
    """Write the model, with the tokenizer of ``source``."""
    model.save_pretrained(out)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


def full_rows(source: Path, text: Path) -> torch.Tensor:
    """Return the text as full rows, int64 [N, LENGTH]: [CLS], documents with [SEP] between."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"))
    documents = text.read_text(encoding="utf-8").split("\n\n")
    separator = tokenizer.convert_tokens_to_ids("[SEP]")
    stream: list[int] = []
    for first in range(0, len(documents), 1000):
        for ids in tokenizer(documents[first : first + 1000], add_special_tokens=False).input_ids:
            stream += [*ids, separator]
    count = len(stream) // (LENGTH - 1)
    body = torch.tensor(stream[: count * (LENGTH - 1)]).view(count, LENGTH - 1)
    first_tokens = torch.full((count, 1), tokenizer.convert_tokens_to_ids("[CLS]"))
    return torch.cat([first_tokens, body], dim=1)


def batches(rows: torch.Tensor, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield rows [ROWS, LENGTH] without end, in a new order each pass."""
    while True:
        order = torch.randperm(len(rows), generator=generator)
        for first in range(0, len(rows) - ROWS + 1, ROWS):
            yield rows[order[first : first + ROWS]]


def train(source: Path, text: Path, tokens: int) -> ModernBertForMaskedLM:
    """Return a model trained on ``tokens`` tokens."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(1)
    model = new_model(source)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"))
    mask = tokenizer.convert_tokens_to_ids("[MASK]")
    special = torch.tensor([tokenizer.convert_tokens_to_ids(name) for name in ("[CLS]", "[SEP]")])
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.01},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98), eps=1e-6, fused=True)
    rows = full_rows(source, text)
    print(f"{rows.numel():,} tokens of text, {sum(p.numel() for p in model.parameters()):,} parameters")
    steps = -(-tokens // (ROWS * LENGTH))
    found = batches(rows, generator)
    started = time.monotonic()
    for step in range(steps):
        share = step / steps
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((share + 1 / steps) / WARMUP, (1 - share) / (1 - WARMUP))
        ids = next(found)
        chosen = (torch.rand(ids.shape, generator=generator) < MASKED) & ~torch.isin(ids, special)
        labels = ids[chosen]
        draw = torch.rand(labels.shape, generator=generator)
        others = torch.randint(len(special) + 3, model.config.vocab_size, labels.shape, generator=generator)
        masked = torch.where(draw < 0.8, mask, torch.where(draw < 0.9, others, labels))
        inputs = ids.masked_scatter(chosen, masked)
        hidden = model.model(input_ids=inputs).last_hidden_state[chosen]
        loss = F.cross_entropy(model.decoder(model.head(hidden)), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 200 == 199 or step == steps - 1:
            seconds = time.monotonic() - started
            print(f"step {step + 1} of {steps}, loss {loss.item():.4f}, {seconds:.0f} s", flush=True)
    return model


def main(arguments: list[str]) -> None:
    """Run one side."""
    side, source, *rest = arguments
    torch.manual_seed(1)
    if side == "random":
        save(new_model(Path(source)), Path(source), Path(rest[0]))
    else:
        text, tokens, out = rest
        save(train(Path(source), Path(text), int(tokens)), Path(source), Path(out))


if __name__ == "__main__":
    main(sys.argv[1:])

"""MDS sets of texts that count, their vocabulary,
and a main.py YAML for a model that can learn to count.
"""

import random
from pathlib import Path

from mlbert.data.formats.mds import MdsWriter
from mlbert.data.formats.wordpiece import SPECIAL_TOKENS

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
SHAPE = "num_attention_heads: 2, num_hidden_layers: 1, hidden_size: 32, intermediate_size: 64"
# Arguments of main.py in the folder that `make_texts` creates.
BASE = ("data_local=data", "tokenizer_name=vocab.txt", "max_seq_len=24", "optimizer.lr=0.01")


def make_texts(folder: Path, tree_root: Path) -> None:
    """Write data/train_small, data/val, vocab.txt
    and main.yaml (the published smoke test with a tiny shape).
    """
    draw = random.Random(1)
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS]) + "\n", encoding="utf-8")
    for split, count in (("train_small", 400), ("val", 40)):
        with MdsWriter(folder / "data" / split, {"text": "str"}, size_limit=4000) as writer:
            for _ in range(count):
                start = draw.randrange(10)
                length = draw.randrange(5, 60)
                writer.write({"text": " ".join(WORDS[(start + i) % 10] for i in range(length))})
    text = (tree_root / "benchmarks/mosaic_bert/yamls/test/main.yaml").read_text(encoding="utf-8")
    text = text.replace(
        "  tokenizer_name: ${tokenizer_name}\n\n", f"  model_config: {{{SHAPE}}}\n\n"
    )
    text = text.replace(
        "pretrained_model_name: ${tokenizer_name}", "pretrained_model_name: prajjwal1/bert-tiny"
    )
    (folder / "main.yaml").write_text(text, encoding="utf-8")

"""A folder like that of `mlbert pretrain`, without its training."""

import random
from pathlib import Path

import pytest

import mlbert
from mlbert.data.prepare.corpus_files import find_sources
from mlbert.data.prepare.custom_corpus import Request, prepare
from mlbert.models.weights.export import write_huggingface
from mlbert.models.weights.huggingface import to_huggingface

LENGTH = 32
VOCAB_SIZE = 400
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": LENGTH,
}
WORDS = ["river", "teacher", "finds", "builds", "the", "old", "market", "garden", "slowly", "and"]


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with ``text/`` and ``model/``, a ModernBERT-style model."""
    folder = tmp_path_factory.mktemp("library") / "my-model"
    draw = random.Random(1)
    lines = [" ".join([*draw.choices(WORDS, k=9), str(draw.randrange(10**6))]) for _ in range(1500)]
    text = folder.parent / "text.txt"
    text.write_text("\n\n".join("\n".join(lines[n : n + 5]) for n in range(0, len(lines), 5)))
    request = Request(find_sources([text], folder), None, VOCAB_SIZE, True, LENGTH, 0.15)
    prepare(request, folder / "text")
    vocabulary = folder / "text/vocab.txt"
    options = {"position_embedding_type": "rotary", "norm_position": "pre", "gated_mlp": True}
    vocab_size = len(vocabulary.read_text(encoding="utf-8").splitlines())
    model = mlbert.new_model({**SIZES, **options, "vocab_size": vocab_size})
    write_huggingface(
        folder / "model",
        to_huggingface(model.core),
        model.config,
        model.core.architecture,
        {},
        vocabulary,
    )
    (folder / "bert_config.json").write_text(model.config.to_json())
    return folder

"""Embed sentences with the folder of `mlbert pretrain`, and print each one's nearest neighbor.

    python sentence_embeddings.py my-model/model sentences.txt

An embedding is the mean of a sentence's last hidden states: by sentence-transformers if it is
installed, or else by transformers alone. train_embeddings.py trains such a model on pairs.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer


def embed(folder, sentences):
    """Return float32 [sentences, hidden size], each of length 1."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        return embed_with_transformers(folder, sentences)
    model = SentenceTransformer(folder)  # with the mean, because the folder names no pooling
    return model.encode(sentences, convert_to_tensor=True, normalize_embeddings=True).cpu()


@torch.no_grad()
def embed_with_transformers(folder, sentences):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    parts = []
    for first in range(0, len(sentences), 32):
        batch = tokenizer(
            sentences[first : first + 32], padding=True, truncation=True, return_tensors="pt"
        )
        is_token = batch["attention_mask"][..., None]
        states = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).last_hidden_state
        parts.append((states * is_token).sum(1) / is_token.sum(1))
    return torch.nn.functional.normalize(torch.cat(parts))


def main(folder, file):
    sentences = Path(file).read_text(encoding="utf-8").splitlines()
    embeddings = embed(folder, sentences)
    likeness = embeddings @ embeddings.T - 2 * torch.eye(len(sentences))  # not itself
    for sentence, value, nearest in zip(sentences, *likeness.max(1), strict=True):
        print(f"{value:.2f}  {sentence}  <->  {sentences[nearest]}")


if __name__ == "__main__":
    main(*sys.argv[1:])

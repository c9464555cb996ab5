"""Small models of shapes that transformers lacks, whose classes travel in a folder, and a batch."""

import torch

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
}
FORMS = {
    "MosaicBERT": {"position_embedding_type": "alibi", "gated_mlp": True},
    "pre": {"norm_position": "pre"},
    "untied": {"position_embedding_type": "alibi", "tie_word_embeddings": False},
}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
LENGTHS = (9, 5)  # tokens of the batch's sequences


def padded_inputs() -> dict[str, torch.Tensor]:
    """Return the batch: token ids, and the mask of real ones, int64 [2, 9]."""
    is_token = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(5, 61, is_token.shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids.where(is_token, 0), "attention_mask": is_token.long()}

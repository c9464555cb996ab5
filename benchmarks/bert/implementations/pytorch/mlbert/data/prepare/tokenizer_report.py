"""Measure tokenizers on held-out text: unknown tokens, bytes per token, tokens per word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlbert.data.formats.tokenizer import Tokenizer
from mlbert.data.formats.wordpiece import clean_words


@dataclass(frozen=True)
class TokenizerMeasures:
    """Figures of a tokenizer on some text.

    Attributes:
        unknown_share: fraction of the tokens that are the unknown one.
        bytes_per_token: bytes of UTF-8; more is a shorter sequence.
        tokens_per_word: a word is what white space separates, and each Chinese character.
    """

    unknown_share: float
    bytes_per_token: float
    tokens_per_word: float


def measure(tokenizer: Tokenizer, texts: Sequence[str]) -> TokenizerMeasures:
    """Measure a tokenizer on texts, which must have words; special tokens are not added."""
    ids, _ = tokenizer.encode_all(texts)
    num_tokens = len(ids)
    unknown = tokenizer.unknown_id
    num_unknown = 0 if unknown is None else int((ids == unknown).sum())
    num_bytes = sum(len(text.encode()) for text in texts)
    num_words = sum(len(clean_words(text)) for text in texts)
    return TokenizerMeasures(
        unknown_share=num_unknown / max(1, num_tokens),
        bytes_per_token=num_bytes / max(1, num_tokens),
        tokens_per_word=num_tokens / max(1, num_words),
    )

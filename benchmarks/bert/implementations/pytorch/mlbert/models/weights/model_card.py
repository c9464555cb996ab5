"""The README.md of a run's weights."""

from __future__ import annotations

from collections.abc import Mapping

from mlbert.mlperf.rules import UNVERIFIED

_TAGS = {
    "BertForSequenceClassification": "bert, text-classification",
    "BertForTokenClassification": "bert, token-classification",
}


def model_card(architecture: str, facts: Mapping[str, object]) -> str:
    """Return the text: Hugging Face's header, a table of the facts,
    and a note that the result is unverified.

    ``architecture``: name of the Hugging Face class with these parameters.
    """
    lines = [
        "---",
        "library_name: transformers",
        f"tags: [{_TAGS.get(architecture, 'bert, masked-lm')}]",
        "---",
        "",
        f"# {architecture} trained by this run",
        "",
        "| what | value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in facts.items()),
        "",
        "Input: WordPiece tokens of `vocab.txt`, cased or not as `tokenizer_config.json` says. "
        "The weights carry the biases of the text that trained them.",
        "",
        UNVERIFIED,
        "",
    ]
    return "\n".join(lines)

"""The README.md that lies beside a run's weights."""

from __future__ import annotations

from collections.abc import Mapping

from mlbert.mlperf.rules import UNVERIFIED


def model_card(architecture: str, facts: Mapping[str, object], is_masked_lm: bool = True) -> str:
    """The text: Hugging Face's header, a table of the facts, and what the weights must not be taken for.

    ``architecture``: Hugging Face's name of the class with these parameters.
    """
    lines = [
        "---",
        "library_name: transformers",
        f"tags: [bert{', masked-lm' if is_masked_lm else ''}]",
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

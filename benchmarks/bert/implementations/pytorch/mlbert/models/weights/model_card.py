"""The README.md of a run's weights."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlbert.mlperf.rules import UNVERIFIED

_TASKS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
}
_MASKED_LM = "fill-mask"
_COMMAND = "command"
_PRIVATE = ("hosts",)  # facts about the owner's machines
_EMBEDDING_HEADER = """---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags: [sentence-transformers, feature-extraction, sentence-similarity]
---
"""


def model_card(architecture: str, facts: Mapping[str, object], classes: Sequence[str] = ()) -> str:
    """Return the text: Hugging Face's header, a table of the facts,
    and a note that the result is unverified.

    A card is published: paths are shortened to their last part, and names of machines left out.

    Args:
        architecture: name of the Hugging Face class with these parameters.
        facts: values by name.
        classes: names of a classifier's outputs.
    """
    found = [task for head, task in _TASKS.items() if architecture.endswith(head)]
    task = found[0] if found else _MASKED_LM
    public = {name: value for name, value in facts.items() if name not in _PRIVATE}
    if isinstance(command := public.get(_COMMAND), str):
        public[_COMMAND] = _command_without_folders(command)
    lines = [
        *header(task, ["bert"]),
        "",
        f"# {architecture} trained by this run",
        "",
        "| what | value |",
        "|---|---|",
        *(f"| {name} | {_without_folder(value)} |" for name, value in public.items()),
        "",
        *([f"Labels: {', '.join(classes)}.", ""] if classes else []),
        "Input: tokens of the tokenizer in this folder. "
        "The weights carry the biases of the text that trained them.",
        "",
        UNVERIFIED,
        "",
    ]
    return "\n".join(lines)


def header(task: str, tags: Sequence[str]) -> list[str]:
    """Return the lines of Hugging Face's header.

    Nothing here knows the license and the languages of the text, so they are left to the owner.

    Args:
        task: ``pipeline_tag``.
        tags: further tags.
    """
    return [
        "---",
        "library_name: transformers",
        f"pipeline_tag: {task}",
        f"tags: [{', '.join(tags)}]",
        "license: unknown  # of the weights; the text's license may limit it",
        "# language: [en]  # of the text, in codes of ISO 639",
        "---",
    ]


def _command_without_folders(command: str) -> str:
    """Return a shell's command; a path may also be the value of ``name=path``."""
    words = []
    for word in shlex.split(command):
        name, equals, value = word.rpartition("=")
        words.append(f"{name}{equals}{_without_folder(value)}")
    return shlex.join(words)


def _without_folder(value: object) -> object:
    path = Path(value) if isinstance(value, str | Path) else None
    return path.name if path is not None and path.is_absolute() else value


def embedding_card(card: str) -> str:
    """Return the text of a model's card with the header of a model for embeddings."""
    _, _, text = card.partition("\n---\n")
    return _EMBEDDING_HEADER + text

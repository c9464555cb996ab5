"""Options and output that several ``mlbert prepare`` commands share."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mlbert.data.prepare.instances import InstanceOptions
from mlbert.data.prepare.pipeline import TextOptions
from mlbert.programs.console import console

MOST_FILES = 99_999  # their names have five digits

Out = Annotated[Path, typer.Option("--out", help="Output folder; made when missing.", file_okay=False)]
Workers = Annotated[
    int,
    typer.Option(
        min=0,
        max=4096,
        help="Processes; 0: one for each core. The result is the same.",
        callback=lambda workers: workers or os.cpu_count() or 1,
    ),
]
Cased = Annotated[bool, typer.Option("--cased", help="Keep case and accents.")]


@dataclass(frozen=True, kw_only=True)
class InstanceArguments:
    """How text becomes instances, as said on the command line."""

    max_seq_length: Annotated[int, typer.Option(help="Longest sequence, tokens.")]
    max_predictions: Annotated[int, typer.Option(help="Most masked tokens of a sequence; 0: the masked share of it.")]
    masked_lm_prob: Annotated[float, typer.Option(help="Share of tokens to predict.")] = 0.15
    short_seq_prob: Annotated[float, typer.Option(help="Share of instances with a random shorter target length.")] = 0.1
    dupe_factor: Annotated[int, typer.Option(help="Passes over the text, each with its own masks.")] = 10
    seed: Annotated[int, typer.Option(help="Random seed of the instances of each part.")] = 12345
    cased: Cased = False

    def instances(self) -> InstanceOptions:
        """The same for the generator."""
        return InstanceOptions(
            max_seq_length=self.max_seq_length,
            max_predictions_per_seq=self.max_predictions or max(1, round(self.max_seq_length * self.masked_lm_prob)),
            masked_lm_prob=self.masked_lm_prob,
            short_seq_prob=self.short_seq_prob,
            dupe_factor=self.dupe_factor,
            random_seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class TextArguments(InstanceArguments):
    """How any text becomes a data folder, as said on the command line."""

    vocab_size: Annotated[int, typer.Option(help="Entries of the vocabulary to train.")] = 4096
    eval_share: Annotated[float, typer.Option(help="Part of the documents to hold out for evaluation.")] = 0.05
    eval_sequences: Annotated[int, typer.Option(help="Evaluation sequences to keep.")] = 2000
    split_seed: Annotated[int, typer.Option(help="Chooses the held-out documents.")] = 0
    max_document_sentences: Annotated[int, typer.Option(help="Longer documents are cut into pieces, sentences.")] = 32
    parts: Annotated[int, typer.Option(help="Training parts, one shard each.")] = 2

    def text(self) -> TextOptions:
        """The same for the pipeline."""
        return TextOptions(
            instances=self.instances(),
            vocab_size=self.vocab_size,
            lower_case=not self.cased,
            eval_share=self.eval_share,
            eval_sequences=self.eval_sequences,
            split_seed=self.split_seed,
            num_parts=self.parts,
            max_document_sentences=self.max_document_sentences,
        )


def with_options(kind: type, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command with an option for each field of the dataclass ``kind``; it is called with the whole as ``given``. Its
    fields are annotated as Typer wants parameters; ``defaults`` take the place of the dataclass's."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        fields = {
            name: field.replace(default=defaults.get(name, field.default))
            for name, field in inspect.signature(kind, eval_str=True).parameters.items()
        }
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for name, parameter in signature.parameters.items() if name != "given"]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(given=kind(**{name: values.pop(name) for name in fields}), **values)

        parameters = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in (*own, *fields.values())]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # Typer reads it
        return run

    return decorate


def say(line: str) -> None:
    """Print one line, never wrapped."""
    console.print(line, soft_wrap=True, highlight=False)


def counted(count: int, noun: str) -> str:
    """For example ``1 file`` or ``2,000 files``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"

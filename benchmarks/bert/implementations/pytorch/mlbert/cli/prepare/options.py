"""Options and output shared by ``mlbert prepare`` commands."""

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

MOST_FILES = 99_999  # file names have five digits

Out = Annotated[Path, typer.Option("--out", help="Output folder; created if missing.", file_okay=False)]
Workers = Annotated[
    int,
    typer.Option(
        min=0,
        max=4096,
        help="Worker processes; 0: one per core. Does not affect the result.",
        callback=lambda workers: workers or os.cpu_count() or 1,
    ),
]
ShareTask = Annotated[
    str | None,
    typer.Option("--task", metavar="I/N", help="Make share I (0 to N-1) only. N does not affect the result."),
]
Merges = Annotated[bool, typer.Option("--merge", help="Complete what the shares of --task made.")]
Cased = Annotated[bool, typer.Option("--cased", help="Keep case and accents.")]


@dataclass(frozen=True, kw_only=True)
class InstanceArguments:
    """Command-line options for turning text into instances."""

    max_seq_length: Annotated[int, typer.Option(help="Maximum sequence length, tokens.")]
    max_predictions: Annotated[int, typer.Option(help="Maximum masked tokens per sequence; 0: by --masked-lm-prob.")]
    masked_lm_prob: Annotated[float, typer.Option(help="Fraction of tokens to predict.")] = 0.15
    short_seq_prob: Annotated[float, typer.Option(help="Fraction of instances with a shorter random length.")] = 0.1
    dupe_factor: Annotated[int, typer.Option(help="Passes over the text, each with new masks.")] = 10
    seed: Annotated[int, typer.Option(help="Random seed of each text file's instances.")] = 12345
    cased: Cased = False

    def instances(self) -> InstanceOptions:
        """Return these options in the generator's form."""
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
    """Command-line options for turning any text into a data folder."""

    vocab_size: Annotated[int, typer.Option(help="Size of the vocabulary to train.")] = 4096
    eval_share: Annotated[float, typer.Option(help="Fraction of documents held out for evaluation.")] = 0.05
    eval_sequences: Annotated[int, typer.Option(help="Evaluation sequences to keep.")] = 2000
    split_seed: Annotated[int, typer.Option(help="Seed that selects the held-out documents.")] = 0
    max_document_sentences: Annotated[int, typer.Option(help="Longer documents are split; in sentences.")] = 32
    parts: Annotated[int, typer.Option(help="Number of training files, one shard each.")] = 2

    def text(self) -> TextOptions:
        """Return these options in the pipeline's form."""
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
    """Return a decorator that gives a command one option per field of the dataclass ``kind``.

    The command is called with the assembled dataclass as ``given``. Fields are annotated like Typer parameters;
    ``defaults`` override the dataclass's.
    """

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
    """Print one line without wrapping."""
    console.print(line, soft_wrap=True, highlight=False)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, such as ``1 file`` or ``2,000 files``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"

"""Options and output shared by ``mlbert prepare`` commands."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.instances import InstanceOptions
from mlbert.data.prepare.pipeline import TextOptions
from mlbert.data.prepare.shares import Share, parse_share
from mlbert.host.console import console, console_progress

MOST_FILES = 99_999  # file names have five digits

Out = Annotated[
    Path,
    typer.Option(
        "--out", metavar="DIR", help="Output folder; created if missing.", file_okay=False
    ),
]
Cased = Annotated[bool, typer.Option("--cased", help="Keep case and accents.")]


@dataclass(frozen=True, kw_only=True)
class PoolArguments:
    """Command-line options of steps that several processes run."""

    workers: Annotated[
        int,
        typer.Option(
            min=0,
            max=4096,
            help="Worker processes; 0: one per core. Does not affect the result.",
            callback=lambda workers: workers or os.cpu_count() or 1,
        ),
    ] = 0

    def executor(self, share: Share = Share()) -> Executor:
        """Return an executor that shows its progress."""
        return Executor(self.workers, console_progress(), share)


@dataclass(frozen=True, kw_only=True)
class ShareArguments(PoolArguments):
    """Command-line options of steps that several machines can share."""

    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            metavar="I/N",
            help="Make share I (0 to N-1) only. N does not affect the result.",
        ),
    ] = None
    merge: Annotated[
        bool, typer.Option("--merge", help="Complete what the shares of --task made.")
    ] = False

    def executor(self, share: Share = Share()) -> Executor:
        """See `PoolArguments`. Raises UserError as `parse_share`."""
        return super().executor(parse_share(self.task, self.merge))


@dataclass(frozen=True, kw_only=True)
class InstanceArguments:
    """Command-line options for turning text into instances."""

    max_seq_length: Annotated[int, typer.Option(help="Maximum sequence length, tokens.")]
    max_predictions: Annotated[
        int, typer.Option(help="Maximum masked tokens per sequence; 0: by --masked-lm-prob.")
    ]
    masked_lm_prob: Annotated[float, typer.Option(help="Fraction of tokens to predict.")] = 0.15
    short_seq_prob: Annotated[
        float, typer.Option(help="Fraction of instances with a shorter random length.")
    ] = 0.1
    dupe_factor: Annotated[int, typer.Option(help="Passes over the text, each with new masks.")] = (
        10
    )
    seed: Annotated[int, typer.Option(help="Random seed of each text file's instances.")] = 12345
    cased: Cased = False

    def instances(self) -> InstanceOptions:
        """Return these options as the generator takes them."""
        return InstanceOptions(
            max_seq_length=self.max_seq_length,
            max_predictions_per_seq=self.max_predictions
            or max(1, round(self.max_seq_length * self.masked_lm_prob)),
            masked_lm_prob=self.masked_lm_prob,
            short_seq_prob=self.short_seq_prob,
            dupe_factor=self.dupe_factor,
            random_seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class TextArguments(InstanceArguments):
    """Command-line options for turning any text into a data folder."""

    vocab_size: Annotated[int, typer.Option(help="Size of the vocabulary to train.")] = 4096
    eval_share: Annotated[
        float, typer.Option(help="Fraction of documents held out for evaluation.")
    ] = 0.05
    eval_sequences: Annotated[int, typer.Option(help="Evaluation sequences to keep.")] = 2000
    split_seed: Annotated[int, typer.Option(help="Seed that selects the held-out documents.")] = 0
    max_document_sentences: Annotated[
        int, typer.Option(help="Longer documents are split; in sentences.")
    ] = 32
    parts: Annotated[int, typer.Option(help="Number of training files, one shard each.")] = 2

    def text(self) -> TextOptions:
        """Return these options as the pipeline takes them."""
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


def with_options(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces a command's dataclass parameters with one option per field,
    placed after its other options.

    Fields are annotated like Typer parameters; ``defaults`` override the dataclass's.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        plain: list[inspect.Parameter] = []  # options that the command declares itself
        expanded: list[inspect.Parameter] = []  # one option for each field of a dataclass
        groups: dict[str, tuple[Any, list[str]]] = {}  # parameter -> its dataclass and fields
        for parameter in signature.parameters.values():
            if not is_dataclass(parameter.annotation):
                plain.append(parameter)
                continue
            kind: Any = parameter.annotation
            fields = inspect.signature(kind, eval_str=True).parameters
            groups[parameter.name] = (kind, list(fields))
            for name, field in fields.items():
                expanded.append(field.replace(default=defaults.get(name, field.default)))

        @functools.wraps(command)
        def run(**values: Any) -> None:
            made = {
                parameter: kind(**{name: values.pop(name) for name in names})
                for parameter, (kind, names) in groups.items()
            }
            command(**made, **values)

        options = [one.replace(kind=one.KEYWORD_ONLY) for one in (*plain, *expanded)]
        run.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]  # Typer reads it
        return run

    return decorate


def say(line: str) -> None:
    """Print one line without wrapping."""
    console.print(line, soft_wrap=True, highlight=False)

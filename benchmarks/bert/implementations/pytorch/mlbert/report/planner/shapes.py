"""What a model's shape makes of the fitted numbers, which are BERT-large's on the benchmark's sequences."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlbert.config.bert_config import BertConfig
from mlbert.host.errors import UserError
from mlbert.host.provenance import shipped
from mlbert.models.flops import Work, training_flops

CONFIGS = shipped("configs")
# Sequences of the benchmark (public length histogram): of 1,000, all tokens, squared lengths, masked tokens.
BENCHMARK = Work(tokens=255_000, squared_lengths=98_826_000, masked=38_200, sequences=1_000)


@dataclass(frozen=True)
class Shape:
    """A model beside BERT-large."""

    config: BertConfig
    flops: float  # of one sequence, forward and backward
    work: float  # of BERT-large's FLOPs
    gradient: float  # of BERT-large's parameters

    @property
    def is_large(self) -> bool:
        """Whether the reference's samples to the target are this model's."""
        return self.work == 1.0


def of(config: BertConfig) -> Shape:
    """The shape's factors."""
    large = BertConfig.from_json(CONFIGS / "large.json")
    flops, usual = training_flops(config, BENCHMARK), training_flops(large, BENCHMARK)
    return Shape(config, flops / BENCHMARK.sequences, flops / usual, config.num_parameters / large.num_parameters)


def named(name: str) -> Shape:
    """A shape of the configs folder, or a ``bert_config.json``.

    Raises:
        UserError: there is none.
    """
    path = CONFIGS / f"{name}.json"
    if path.is_file():
        return of(BertConfig.from_json(path))
    if not Path(name).is_file():
        known = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.json")))
        raise UserError("config.choice", "--model", f"{name} is neither a known shape nor a file", f"Known: {known}")
    return of(BertConfig.from_json(Path(name)))

"""Sets that take the place of text in ``mlbert pretrain``: MDS sets of texts or token ids, prepared
before (docs/data.md) and read where they are.

    FOLDER/train/, FOLDER/val/   one of `HELD_OUT` is evaluated on, or the set of --eval
    FOLDER/train/SOURCE/, val/   as `mlbert prepare tokens --proportions` writes it
    FOLDER/                      a set itself, with --eval

A folder of `mlbert prepare tokens` also has the tokenizer, and the facts about its text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlbert.data.formats.mds_files import INDEX
from mlbert.data.formats.streams import Stream
from mlbert.data.formats.token_shards import TokenShards, describe_text, open_texts
from mlbert.data.formats.tokenizer import Tokenizer
from mlbert.data.prepare.baselines import Neighbors
from mlbert.data.prepare.corpus_sequences import choose_sentences, has_next
from mlbert.data.prepare.custom_corpus import MOST_PAIRS, Facts, mask_samples, read_facts
from mlbert.host.errors import UserError
from mlbert.programs.pretrain_rules import EVAL_MASK_RATE

TRAIN = "train"
HELD_OUT = ("val", "validation")
HELD_OUT_TOKENS = 200_000  # at most, of an evaluation
_SAMPLED = 2_000  # training texts that the baselines count


@dataclass(frozen=True)
class PreparedSets:
    """Sets to train on and one to evaluate on.

    Attributes:
        train: one set, or several with their parts of an epoch.
        held_out: folder of the set to evaluate on.
        home: folder of `mlbert prepare tokens`; None if another program wrote the sets.
        facts: in that folder.
    """

    train: Sequence[Stream]
    held_out: Path
    home: Path | None
    facts: Facts | None

    def identity(self, tokenizer: Tokenizer) -> list[str]:
        """Return what distinguishes the sets from others; reads only their indices.

        Raises UserError if one is missing, has no texts, or has tokens of another tokenizer.
        """
        sets = (self.train, [_stream(self.held_out)])
        return [describe_text(streams, tokenizer).identity for streams in sets]

    def settings(self, length: int) -> dict[str, Any]:
        """Return the settings of the data of a run with rows of ``length`` tokens, JSON-able."""
        found: dict[str, Any] = {
            "input_dir": str(self.train[0].folder),
            "eval_dir": str(self.held_out.resolve()),
            "long_texts": "split",
            "num_eval_examples": max(1, HELD_OUT_TOKENS // length),
        }
        if len(self.train) > 1:
            streams = [stream.model_dump(exclude_none=True) for stream in self.train]
            found["data_streams"] = json.dumps({"streams": streams})
        return found


def find_prepared(texts: Sequence[Path], held_out: Path | None) -> PreparedSets | None:
    """Return the sets that the TEXT of a command and --eval name; None if TEXT is not a set.

    Raises UserError if there is no set to evaluate on.
    """
    folder = texts[0]
    if len(texts) > 1:
        return None
    facts = read_facts(folder)
    home = None if facts is None else folder
    place = folder / TRAIN
    if facts is not None and facts.proportions:
        train = [_stream(place / name, share) for name, share in facts.proportions.items()]
    elif (place / INDEX).is_file():
        train = [_stream(place)]
    elif (folder / INDEX).is_file():
        train = [_stream(folder)]
    else:
        return None
    inside = [folder / name for name in HELD_OUT if (folder / name / INDEX).is_file()]
    found = held_out or next(iter(inside), None)
    if found is None:
        reason = "has no set to evaluate on"
        raise UserError("config.missing", folder, reason, "Name one: --eval FOLDER")
    return PreparedSets(train, found, home, facts)


def facts_of_sets(sets: PreparedSets, tokenizer: Tokenizer, length: int) -> Facts:
    """Return facts about the sets: those that were written with them, or what needs all of the
    training set estimated from its first texts.

    Raises UserError if a set cannot be read.
    """
    if sets.facts is not None:
        return sets.facts
    train = _Texts(sets.train, tokenizer)
    held_out = _Texts([_stream(sets.held_out)], tokenizer)
    sampled = train.first(_SAMPLED)
    mean = float(np.mean([len(one) for one in sampled]))
    neighbors = Neighbors(tokenizer.vocab_size, MOST_PAIRS, never_guessed=tokenizer.special_ids)
    for one in sampled:
        if len(one):
            neighbors.add(one, has_next(one, tokenizer))
    evaluated = held_out.upto(HELD_OUT_TOKENS)
    pieces = list(_pieces(evaluated, tokenizer, length))
    tokens = np.concatenate(evaluated)
    unknown = tokenizer.unknown_id
    special = list(tokenizer.special_ids)
    texts = [tokenizer.decode(one[~np.isin(one, special)].tolist()) for one in evaluated]
    return Facts(
        made_from={"sets": sets.identity(tokenizer), "length": length},
        characters=0,
        documents=train.count,
        train_sequences=train.count,
        train_tokens=round(mean * train.count),
        held_out_sequences=len(pieces),
        held_out_tokens=len(tokens),
        near_repeats=0,
        unknown_share=_share(np.concatenate(sampled), unknown),
        held_out_unknown=_share(tokens, unknown),
        inventory=[
            f"sets: {train.count:,} texts to train on, about {mean:,.0f} tokens each; "
            f"{held_out.count:,} to evaluate on"
        ],
        scripts="",
        baselines=neighbors.accuracies(mask_samples(pieces, tokenizer, EVAL_MASK_RATE)),
        sentences=choose_sentences(texts, tokenizer),
        is_estimate=True,
    )


class _Texts:
    """The texts of sets as token ids, in their order."""

    def __init__(self, streams: Sequence[Stream], tokenizer: Tokenizer) -> None:
        readers = open_texts(streams, tokenizer)
        self._shards = TokenShards(readers, tokenizer)
        self.count = int(self._shards.first[-1])

    def first(self, count: int) -> list[np.ndarray]:
        """Return the first texts, at most ``count``."""
        return self._shards.loose(range(min(count, self.count)))

    def upto(self, tokens: int) -> list[np.ndarray]:
        """Return the first texts until they have so many tokens; at least one."""
        found: list[np.ndarray] = []
        total = 0
        for number in range(self.count):
            if total >= tokens:
                break
            (one,) = self._shards.loose([number])
            found.append(one)
            total += len(one)
        return found


def _pieces(texts: Sequence[np.ndarray], tokenizer: Tokenizer, length: int) -> Iterator[np.ndarray]:
    """Yield pieces of texts between [CLS] and [SEP]."""
    special = (tokenizer.cls_id, tokenizer.sep_id)
    for text in texts:
        inside = text[~np.isin(text, special)]
        for start in range(0, len(inside), length - 2):
            yield np.r_[tokenizer.cls_id, inside[start : start + length - 2], tokenizer.sep_id]


def _share(tokens: np.ndarray, unknown: int | None) -> float:
    """Return the share of tokens that are unknown."""
    return 0.0 if unknown is None else float(np.mean(tokens == unknown))


def _stream(folder: Path, proportion: float | None = None) -> Stream:
    return Stream(local=str(folder.resolve()), proportion=proportion)

"""Masked language modeling on texts: training batches and the evaluation set.

The texts are one or more local or remote MDS sets (`mlbert.data.formats.token_shards`).
`mlbert.data.loading.text_lanes` chooses the pieces of text for each step,
`mlbert.data.formats.dynamic_masking` the tokens to predict.

Legend: B sequences per step over all ranks ("lanes").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlbert.config.batch_growth import BatchGrowth, Growth, TokenGrowth
from mlbert.data.batches import HostBatch, StaticShape
from mlbert.data.formats.checksums import sharers
from mlbert.data.formats.dynamic_masking import Masking
from mlbert.data.formats.mds import MdsReader
from mlbert.data.formats.order import RankSlice, even_parts
from mlbert.data.formats.ragged import offsets_of
from mlbert.data.formats.streams import Mixture, Stream, samples_of_epoch
from mlbert.data.formats.token_shards import TokenShards, describe_text, open_texts
from mlbert.data.formats.tokenizer import Tokenizer, load_tokenizer
from mlbert.data.formats.vocabulary_checks import unknown_share
from mlbert.data.loading.source import EvaluationBatches, MakeBatches, StepSource
from mlbert.data.loading.text_lanes import (
    KEPT_STEPS,
    Ahead,
    EpochOrders,
    Lanes,
    PieceLanes,
    Pieces,
    WholeLanes,
)
from mlbert.data.loading.text_steps import BySequences, ByTokens, Cut, RankStream
from mlbert.host.errors import UserError

SPLIT = "split"
TRUNCATE = "truncate"
_SEED = 9176  # Streaming's default, for the draws of evaluation sets
# In a position, of each rank: the number of the next sequence, and the tokens before it.
_STARTS = "starts"
_TOKENS = "tokens"


@dataclass(frozen=True)
class TextSet:
    """Sets of texts and how they are cut into sequences.

    Args:
        streams: the sets and their weights.
        max_seq_length: longest sequence, tokens.
        long_texts: "split" cuts a text into as many sequences as needed, none if it is empty.
            "truncate" makes one sequence from the start of each text; an empty text becomes [CLS]
            [SEP].
        cache_bytes: limit of the files in the sets' caches; None for no limit.
    """

    streams: Sequence[Stream]
    tokenizer: Tokenizer
    max_seq_length: int
    long_texts: str
    cache_bytes: int | None = None

    @property
    def name(self) -> str:
        """The sets' addresses, for messages."""
        return ", ".join(stream.name for stream in self.streams)

    def mixture(self, readers: Sequence[MdsReader], seed: int, is_shuffled: bool) -> Mixture:
        """Return what draws an epoch's texts from the opened sets."""
        samples = samples_of_epoch(self.streams, [len(reader) for reader in readers], seed)
        return Mixture([reader.shard_sizes for reader in readers], samples, seed, is_shuffled)


def count_sequences(
    streams: Sequence[Stream], tokenizer: str, max_seq_length: int, long_texts: str
) -> int:
    """Return the number of sequences of an epoch, of the first one if some texts are drawn for
    each. If texts are split, this tokenizes all of them.
    """
    texts = TextSet(streams, load_tokenizer(tokenizer), max_seq_length, long_texts)
    if texts.long_texts == TRUNCATE:
        return describe_text(streams, texts.tokenizer).num_texts
    readers = open_texts(streams, texts.tokenizer)
    pieces = Pieces(TokenShards(readers, texts.tokenizer), texts.tokenizer, texts.max_seq_length)
    counts = pieces.all_counts()
    mixture = texts.mixture(readers, _SEED, is_shuffled=True)
    return int((counts if mixture.is_whole else counts[mixture(0)[1]]).sum())


class TextSource(StepSource):
    """Endless optimizer steps over a set of texts; only the index is read before `open`.

    A rank has the lanes rank, rank + world_size, ... If world_size divides the number of canonical
    nodes, it therefore reads only its nodes' shards.

    Args:
        sequences_per_step: sequences per rank, including all micro-batches; with packing, rows of
            max_seq_length tokens.
        growth: of a batch that grows to ``sequences_per_step``; None for one of that size. One that
            grows with the tokens needs packing.
        packed: fill micro-batches up to their tokens, with at most so many sequences in a row's
            tokens; 1 for a sequence in each row.
        accumulation, rank, world_size: see `mlbert.data.formats.order.RankSlice`.
        shuffle, shuffle_seed, canonical_nodes: see `EpochOrders`.
        rate: step -> probability that a token is predicted.
        seed: of the masks.
        sum_over_ranks: collective that returns the sum of all ranks' arrays; for `state_dict`.
        threads: that mask and pack steps at the same time; the batches do not depend on it.
        local: this process's number on its machine, and the number of processes there.
        warn: called with one line if the cache of the set cannot be written,
            in one process for each such disk.
    """

    def __init__(
        self,
        texts: TextSet,
        *,
        sequences_per_step: int,
        growth: Growth | None = None,
        packed: int = 1,
        accumulation: int = 1,
        shuffle: str | None,
        shuffle_seed: int,
        canonical_nodes: int,
        rate: Callable[[int], float],
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        sum_over_ranks: Callable[[np.ndarray], np.ndarray] = lambda rows: rows,
        threads: int = 1,
        local: tuple[int, int] = (0, 1),
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.share = RankSlice(sequences_per_step, accumulation, rank, world_size)
        self.max_tokens = texts.max_seq_length
        self.info = describe_text(texts.streams, texts.tokenizer)
        lanes = self.share.global_units
        if self.info.num_texts < lanes:
            reason = f"has {self.info.num_texts} texts, but one step takes {lanes} sequences"
            raise UserError(
                "data.too-small", texts.name, reason, "Lower BATCHSIZE or give more text"
            )
        self._texts = texts
        self._growth = growth or BatchGrowth.constant(sequences_per_step)
        assert self._growth.last == sequences_per_step
        assert packed > 1 or isinstance(self._growth, BatchGrowth)
        self._packed = packed
        self._rate = rate
        self._sum_over_ranks = sum_over_ranks
        self._masking = Masking.of(texts.tokenizer, seed)
        self._local = local
        self._warn = warn
        self._order: dict[str, Any] = {
            "shuffle": shuffle,
            "seed": shuffle_seed,
            "canonical_nodes": canonical_nodes,
        }
        self._mine = np.arange(rank, lanes, world_size)
        self._opened: _Opened | None = None
        self._position: dict[str, Any] = {}  # loaded before `open`
        identity = {
            "seed": seed,
            "global_sequences": lanes,
            "max_tokens": self.max_tokens,
            "long_texts": texts.long_texts,
            "order": self._order,
            "data": self.info.identity,
        }
        if packed > 1 or not self._growth.is_constant:
            # Then a rank's position is not that of the other ranks, or not a whole round.
            identity["ranks"] = world_size
            identity["packed"] = packed
            identity["growth"] = [self._growth.first, *self._length_of_growth()]
        super().__init__(texts.name, identity, threads)

    def _length_of_growth(self) -> list[int | str]:
        if isinstance(self._growth, TokenGrowth):
            return [self._growth.tokens, _TOKENS]
        return [self._growth.steps]

    def open(self) -> None:
        """Open the set.

        Raises UserError if it is missing or has changed, or if the order is not available.
        """
        texts = self._texts
        readers = open_texts(texts.streams, texts.tokenizer)
        cache = readers[0].cache
        part, _ = sharers(cache, self.share.rank, self.share.world_size, *self._local)
        warn = self._warn if part == 0 else lambda line: None
        shards = TokenShards(readers, texts.tokenizer, warn, texts.cache_bytes)
        mixture = texts.mixture(readers, self._order["seed"], self._order["shuffle"] is not None)
        orders = EpochOrders(mixture, **self._order, folder=cache, warn=warn)
        pieces = Pieces(shards, texts.tokenizer, texts.max_seq_length)
        all_lanes = self.share.global_units
        lanes: Lanes = WholeLanes(orders, all_lanes, self._mine)
        if texts.long_texts == SPLIT:
            lanes = PieceLanes(
                orders,
                all_lanes,
                self._mine,
                pieces.counts,
                self._sum_over_ranks,
                kept_steps=KEPT_STEPS * self._packed,  # a packed step may take as many rounds
            )
        ahead = Ahead(
            shards, orders, self._order["canonical_nodes"], self.share.rank, self.share.world_size
        )
        stream = RankStream(lanes, pieces, self._mine, all_lanes)
        self._opened = _Opened(orders, lanes, stream, self._cut(stream), ahead)
        self._go_to(self._step, self._position)

    def _cut(self, stream: RankStream) -> Cut:
        micro_batch = self.share.units // self.share.accumulation
        if self._packed == 1:
            assert isinstance(self._growth, BatchGrowth)
            return BySequences(self._growth, micro_batch)
        return ByTokens(
            stream,
            self._growth,
            world_size=self.share.world_size,
            micro_batch=micro_batch,
            row_tokens=self.max_tokens,
            row_sequences=self._packed,
        )

    @property
    def is_preparing(self) -> bool:
        """See `StepSource.is_preparing`."""
        return self._opened is not None and self._opened.orders.is_computing

    def batches_of(self, step: int) -> list[HostBatch]:
        """See `StepSource.batches_of`."""
        return self.begin(step)()

    def begin(self, step: int) -> MakeBatches:
        """See `StepSource.begin`: reads the sequences; the rest masks and packs them."""
        opened = self._opened
        assert opened is not None, "open() first"
        origin = opened.round_of(step)
        opened.ahead.reach(*opened.lanes.front(origin))
        read = [opened.stream.read(bounds, origin) for bounds in opened.cut.bounds(step)]
        rate = self._rate(step)

        def make() -> list[HostBatch]:
            batches = []
            for tokens, offsets, numbers in read:
                rows = self._masking(tokens, offsets, step, numbers, rate)
                batches.append(
                    HostBatch.of_sequences(rows, numbers, self.max_tokens, self.locks_pages)
                )
            return batches

        return make

    def state_dict(self, back: int = 0) -> dict[str, Any]:
        """See `StepSource.state_dict`; if texts are split,
        includes the position of every lane: then a collective.
        """
        step = self._step - back
        position = self._position
        if self._opened is not None:
            position = self._opened.lanes.state(self._opened.round_of(step))
            if self._packed > 1:
                position[_STARTS] = self._of_all_ranks(self._opened.cut.position(step))
            if isinstance(self._growth, TokenGrowth):
                position[_TOKENS] = self._of_all_ranks(self._opened.cut.tokens(step))
        return {**super().state_dict(back), "lanes": position}

    def _of_all_ranks(self, number: int) -> list[int]:
        """Return the number that each rank gives; a collective."""
        numbers = np.zeros(self.share.world_size, np.int64)
        numbers[self.share.rank] = number
        found: list[int] = self._sum_over_ranks(numbers).tolist()
        return found

    def _own_of(self, position: dict[str, Any], name: str) -> int:
        """Return this rank's number in a saved position.

        Raises ValueError, TypeError or LookupError if there is none.
        """
        number = position[name][self.share.rank]
        if type(number) is not int or number < 0:
            raise ValueError(name)
        return number

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `StepSource.load_state_dict`."""
        super().load_state_dict(state)
        self._position = state.get("lanes", {})
        if self._opened is not None:
            self._go_to(self._step, self._position)

    def close(self) -> None:
        """See `StepSource.close`."""
        super().close()
        if self._opened is not None:
            self._opened.ahead.close()

    def _go_to(self, step: int, position: dict[str, Any]) -> None:
        assert self._opened is not None, "after open()"
        if not step and not position:
            return
        try:
            if self._packed > 1:
                start = self._own_of(position, _STARTS)
                is_counted = isinstance(self._growth, TokenGrowth)
                tokens = self._own_of(position, _TOKENS) if is_counted else 0
                self._opened.cut.go_to(step, start, tokens)
            self._opened.lanes.go_to(self._opened.round_of(step), position)
        except (ValueError, TypeError, LookupError):
            reason = "the saved position is damaged"
            raise UserError(
                "checkpoint.damaged", self._name, reason, "Resume from a different checkpoint"
            ) from None


@dataclass(frozen=True)
class _Opened:
    orders: EpochOrders
    lanes: Lanes
    stream: RankStream
    cut: Cut
    ahead: Ahead

    def round_of(self, step: int) -> int:
        """Return the round of the lanes in which a step begins."""
        return self.cut.position(step) // self.stream.round_length


class TextEvalSet(EvaluationBatches):
    """The interface of `mlbert.data.loading.pretraining.EvalSet` over texts in the order of the
    set, with fixed masks.

    Args:
        num_examples: maximum number of sequences, taken from the start of the set; None uses all.
        batch_size: maximum sequences per batch.
        rate: probability that a token is predicted.
        seed: of the masks.
        always_mask: show the model [MASK] for every token to predict, in place of BERT's mix.
    """

    def __init__(
        self,
        texts: TextSet,
        num_examples: int | None,
        batch_size: int,
        *,
        rate: float,
        seed: int,
        always_mask: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        assert 0 <= rank < world_size
        if batch_size < 1:
            reason = f"{batch_size} is not a number of sequences"
            raise UserError("config.range", "EVAL_BATCH_SIZE", reason, "Set it to 1 or more")
        self.info = describe_text(texts.streams, texts.tokenizer)
        self._texts = texts
        self._batch_size = batch_size
        self._rate = rate
        self._masking = Masking.of(texts.tokenizer, seed, always_mask)
        self._rank = rank
        self._world_size = world_size
        self._num_examples = num_examples
        if texts.long_texts == TRUNCATE:
            self._set_num_examples(self.info.num_texts)

    @property
    def num_examples(self) -> int:
        """Number of sequences over all ranks. If texts are split, available after `open`."""
        assert self._num_examples is not None, "open() first"
        return self._num_examples

    @property
    def static_shapes(self) -> tuple[StaticShape, ...]:
        """See `mlbert.data.loading.pretraining.EvalSet`."""
        whole = StaticShape.of_sequences(self._batch_size, self._texts.max_seq_length, self._rate)
        return (*whole.smaller_ones(), whole)

    def open(self) -> None:
        """Read and mask the texts.

        This is the first access to evaluation data. Raises UserError if a file is missing or
        damaged, there are no sequences, or most words are [UNK].
        """
        texts = self._texts
        readers = open_texts(texts.streams, texts.tokenizer)
        pieces = Pieces(
            TokenShards(readers, texts.tokenizer), texts.tokenizer, texts.max_seq_length
        )
        _, chosen_texts = texts.mixture(readers, _SEED, is_shuffled=False)(0)
        counts = np.ones(self.info.num_texts, np.int64)
        if texts.long_texts == SPLIT:
            counts = pieces.all_counts(self._rank, self._world_size)[chosen_texts]
        first = offsets_of(counts)  # first sequence of each text
        self._set_num_examples(int(first[-1]))
        parts = even_parts(self.num_examples, self._rank, self._world_size, self._batch_size)
        of_parts = [np.searchsorted(first, numbers, side="right") - 1 for numbers in parts]
        pieces.prepare(np.unique(chosen_texts[np.concatenate([np.empty(0, np.int64), *of_parts])]))
        self._batches = []
        read = [np.empty(0, texts.tokenizer.dtype)]
        for numbers, chosen in zip(parts, of_parts, strict=True):
            tokens, offsets = pieces.rows(chosen_texts[chosen], numbers - first[chosen])
            read.append(tokens)
            rows = self._masking(tokens, offsets, 0, numbers, self._rate)
            self._batches.append(HostBatch.of_sequences(rows, numbers, texts.max_seq_length))
        unknown = texts.tokenizer.unknown_id
        unknown_share(np.concatenate(read), unknown, texts.name, texts.tokenizer.name)

    def _set_num_examples(self, available: int) -> None:
        if available < 1:
            raise UserError(
                "data.empty", self._texts.name, "contains no text", "Give texts to evaluate on"
            )
        self._num_examples = min(available, self._num_examples or available)

"""Texts cut to sequences: [CLS], at most max_seq_length - 2 tokens, [SEP]. Sets that hold tokens have these already.

Legend: S sequences, T tokens, N texts of the set.
"""

from __future__ import annotations

import threading

import numpy as np

from mlbert.data.formats.ragged import offsets_of
from mlbert.data.formats.token_shards import TokenShards
from mlbert.data.formats.tokenizer import Tokenizer
from mlbert.data.loading.text_lanes import EpochOrders
from mlbert.host.errors import UserError

_WINDOW = 1 << 16  # places of an order whose shards are looked up together
_PATIENCE = 5.0  # seconds that the end of the thread is waited for
_PAUSE = 0.05  # seconds between attempts at a shard that another process is making


class Pieces:
    """Reads pieces of texts; from the tokenised shards where they are there, else from the texts themselves."""

    def __init__(self, shards: TokenShards, tokenizer: Tokenizer, max_seq_length: int) -> None:
        self._shards = shards
        self._before = np.asarray([tokenizer.cls_id] if shards.is_text else [], np.uint16)
        self._after = np.asarray([tokenizer.sep_id] if shards.is_text else [], np.uint16)
        self._most = max_seq_length - len(self._before) - len(self._after)  # tokens of a text in one piece
        assert self._most > 0, "room for a token"
        # Of each text 1 + its pieces, 0 where that is not known; pages of memory that are never written take none.
        self._counts = np.zeros(shards.first[-1], np.int32)

    def counts(self, texts: np.ndarray) -> np.ndarray:
        """int64 [n], pieces of each of ``texts`` (int64 [n]); 0 of an empty one. Raises UserError: see `rows`."""
        unknown = texts[self._counts[texts] == 0]
        for number in np.unique(self._shards.shards_of(unknown)).tolist():
            if (shard := self._shards.ready(number)) is not None:
                first, end = self._shards.first[number : number + 2]
                self._counts[first:end] = 1 + -(-np.diff(shard.offsets) // self._most)
        unknown = texts[self._counts[texts] == 0]
        if len(unknown):
            lengths = np.asarray([len(tokens) for tokens in self._shards.loose(unknown.tolist())])
            self._counts[unknown] = 1 + -(-lengths // self._most)
        return self._counts[texts].astype(np.int64) - 1

    def all_counts(self, rank: int = 0, world_size: int = 1) -> np.ndarray:
        """int64 [N] of the whole set, which is tokenised for it; each rank begins elsewhere."""
        count = len(self._shards.first) - 1
        for number in np.roll(np.arange(count), -(count * rank // world_size)).tolist():
            self._shards.prepare(number)
        for number in range(count):
            self._shards.shard(number)
        return self.counts(np.arange(self._shards.first[-1]))

    def prepare(self, texts: np.ndarray) -> None:
        """Tokenise shards of which ``texts`` (int64 [n], each once) are half or more. Raises UserError: see `rows`."""
        numbers, found = np.unique(self._shards.shards_of(texts), return_counts=True)
        for number in numbers[2 * found >= np.diff(self._shards.first)[numbers]].tolist():
            self._shards.shard(number)

    def rows(self, texts: np.ndarray, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sequences of these pieces (int64 [S]) of these texts (int64 [S]): tokens, uint16 [T], and offsets, int64
        [S+1]. Raises UserError: a shard is missing or damaged, or cannot be fetched."""
        numbers = self._shards.shards_of(texts)
        places = texts - self._shards.first[numbers]
        shards = {number: self._shards.ready(number) for number in np.unique(numbers).tolist()}
        made = np.asarray([shards[number] is not None for number in numbers.tolist()], bool)
        loose = iter(self._shards.loose(texts[~made].tolist()))
        parts: list[np.ndarray] = []
        lengths = []
        for number, place, piece in zip(numbers.tolist(), places.tolist(), pieces.tolist(), strict=True):
            shard = shards[number]
            tokens = next(loose) if shard is None else shard.text(place)
            cut = tokens[piece * self._most : (piece + 1) * self._most]
            parts += (self._before, cut, self._after)
            lengths.append(len(cut))
        added = len(self._before) + len(self._after)
        return np.concatenate(parts), offsets_of(np.asarray(lengths) + added)


class Ahead:
    """Tokenises shards in a background thread, in the order in which they are needed.

    Args:
        canonical_nodes: parts of the set that are read side by side: of each the next shard is made while one is read.
        first, stride: the places first, first + stride, ... of an order are read; ``stride`` divides the lanes.
    """

    def __init__(
        self, shards: TokenShards, orders: EpochOrders, canonical_nodes: int, first: int = 0, stride: int = 1
    ) -> None:
        self._shards, self._orders = shards, orders
        self._first, self._stride = first, stride
        self._distance = canonical_nodes * int(np.diff(shards.first).max())  # places
        self._front = 0  # places since the first epoch began
        self._done = 0  # places whose shards were looked at
        self._waiting: list[int] = []  # shards that another process is making
        self._moved, self._stopped = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def reach(self, epoch: int, place: int) -> None:
        """Tell how far reading is; the first time begins the thread."""
        self._front = epoch * self._orders.length + place
        self._moved.set()
        if self._thread is None:
            self._done, self._stopped = self._front, threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._stopped,), name="tokenise", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread, once the shard that it is at is made; one that takes longer is not waited for."""
        if self._thread is not None:
            self._stopped.set()
            self._moved.set()
            self._thread.join(_PATIENCE)
            self._thread = None

    def _run(self, stopped: threading.Event) -> None:
        while not stopped.is_set():
            try:
                idle = not self._look_on(stopped)
            except UserError:
                return  # who needs the shard is told
            if idle:
                self._moved.wait(_PAUSE if self._waiting else None)
                self._moved.clear()

    def _look_on(self, stopped: threading.Event) -> bool:
        """Make the shards of the next window of places; whether there was one within the distance."""
        self._waiting = [number for number in self._waiting if not self._shards.prepare(number)]
        self._done = max(self._done, self._front)
        if self._done > self._front + self._distance:
            return False
        epoch, place = divmod(self._done, self._orders.length)
        texts = self._orders(epoch)[place : place + _WINDOW]
        mine = texts[(self._first - place) % self._stride :: self._stride]
        numbers, first_use = np.unique(self._shards.shards_of(mine), return_index=True)
        for number in numbers[np.argsort(first_use)].tolist():
            if stopped.is_set():
                return False
            if not self._shards.prepare(number):
                self._waiting.append(number)
        self._done += len(texts)
        return True

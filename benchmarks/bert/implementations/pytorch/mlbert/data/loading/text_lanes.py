"""Chooses the pieces of text in each step, and reads them.

The global batch has B lanes. Lane k reads the texts at places k, k + B, k + 2B, ... of an epoch's order, one piece of a
text per step. When it has used its texts of an epoch it continues with the next epoch. A step therefore has the same
pieces for any number of ranks.

A piece is [CLS], at most max_seq_length - 2 tokens, [SEP]. Sets of tokens already include [CLS] and [SEP].

Legend: B lanes, N texts of the set, L places of an epoch's order (N, or slightly more if texts are repeated),
S sequences, T tokens.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from mlbert.data.formats.mds_order import sample_order
from mlbert.data.formats.ragged import offsets_of
from mlbert.data.formats.token_shards import TokenShards
from mlbert.data.formats.tokenizer import Tokenizer
from mlbert.host.errors import UserError

_KEPT_EPOCHS, _KEPT_BYTES = 3, 64 << 20  # cached orders: more epochs if they are small, because lanes drift apart
_KEPT_STEPS = 32  # cached positions, for returning from prefetched steps
_MOST_EPOCHS = 3  # that a lane searches for a text that is not empty


class EpochOrders:
    """The orders of epochs, as in MosaicML Streaming. Thread-safe.

    Args: see `mlbert.data.formats.mds_order.sample_order`.

    Attributes:
        is_computing: True while an order is being computed; all threads that request an order then wait.
    """

    def __init__(self, shard_sizes: np.ndarray, *, shuffle: str | None, seed: int, canonical_nodes: int) -> None:
        self._sizes, self._shuffle, self._seed, self._nodes = shard_sizes, shuffle, seed, canonical_nodes
        self._orders: OrderedDict[int, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()
        self.is_computing = False
        # Canonical nodes that are one text short repeat a place.
        self.length = canonical_nodes * -(-int(shard_sizes.sum()) // canonical_nodes)  # L

    def __call__(self, epoch: int) -> np.ndarray:
        """Return int [L], the text at each place of an epoch."""
        with self._lock:
            if epoch not in self._orders:
                self.is_computing = True
                try:
                    self._orders[epoch] = self._compute(epoch)
                finally:
                    self.is_computing = False
                most = max(_KEPT_EPOCHS, _KEPT_BYTES // self._orders[epoch].nbytes)
                while len(self._orders) > most:
                    self._orders.popitem(last=False)
            self._orders.move_to_end(epoch)
            return self._orders[epoch]

    def texts(self, epochs: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return int64 [n], the texts at these places (int64 [n]) of these epochs (int64 [n])."""
        texts = np.empty(len(places), np.int64)
        for epoch in np.unique(epochs).tolist():
            mine = epochs == epoch
            texts[mine] = self(epoch)[places[mine]]
        return texts

    def _compute(self, epoch: int) -> np.ndarray:
        order = sample_order(
            self._sizes, shuffle=self._shuffle, epoch=epoch, canonical_nodes=self._nodes, seed=self._seed
        )
        return order.astype(np.int32 if len(order) < 2**31 else np.int64)


class WholeLanes:
    """Lanes that use one piece of each text, computed from the step number alone."""

    def __init__(self, orders: EpochOrders, lanes: int) -> None:
        self._orders = orders
        numbers = np.arange(lanes)
        self._numbers, self._texts = numbers, (orders.length - numbers + lanes - 1) // lanes  # per lane and epoch

    def take(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the texts (int64 [B]) of step ``step`` and the number of the piece of each (int64 [B])."""
        epochs, indices = np.divmod(step, self._texts)
        texts = self._orders.texts(epochs, indices * len(self._numbers) + self._numbers)
        return texts, np.zeros_like(texts)

    def front(self, step: int) -> tuple[int, int]:
        """Return epoch and place of the lane that is furthest ahead."""
        epoch, place = divmod(step, int(self._texts[-1]))
        return epoch, place * len(self._numbers)

    def state(self, step: int) -> dict[str, Any]:
        """Return the JSON-serializable position before step ``step``: empty, as the step number suffices."""
        return {}

    def go_to(self, step: int, state: dict[str, Any]) -> None:
        """Continue from a position returned by `state`."""


class PieceLanes:
    """Lanes that use all pieces of each text and skip empty texts. Tracks the position of every lane.

    Args:
        pieces: maps texts (int64 [n]) to the number of pieces of each (int64 [n]).
    """

    _NAMES = ("epoch", "index", "piece")  # of a lane: index of its text in the epoch, and pieces of it already used

    def __init__(self, orders: EpochOrders, lanes: int, pieces: Callable[[np.ndarray], np.ndarray]) -> None:
        self._orders, self._pieces = orders, pieces
        numbers = np.arange(lanes)
        self._numbers, self._texts = numbers, (orders.length - numbers + lanes - 1) // lanes
        self._start = 0, np.zeros((len(self._NAMES), lanes), np.int64)
        self._known: OrderedDict[int, np.ndarray] = OrderedDict([self._start])
        self._lock = threading.Lock()

    def take(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """See `WholeLanes.take`. Raises UserError if a lane finds only empty texts."""
        with self._lock:
            texts, pieces, after = self._step(self._before(step))
            self._remember(step + 1, after)
        return texts, pieces

    def front(self, step: int) -> tuple[int, int]:
        """See `WholeLanes.front`."""
        with self._lock:
            epoch, index, _ = self._before(step)
        farthest = int(np.lexsort((index, epoch))[-1])
        return int(epoch[farthest]), int(index[farthest]) * len(self._numbers)

    def state(self, step: int) -> dict[str, Any]:
        """Return the JSON-serializable position of every lane before step ``step``."""
        with self._lock:
            position = self._before(step)
        return {name: row.tolist() for name, row in zip(self._NAMES, position, strict=True)}

    def go_to(self, step: int, state: dict[str, Any]) -> None:
        """Continue from a position returned by `state`. Raises ValueError if it does not match the lanes."""
        rows = np.asarray([state.get(name) for name in self._NAMES], np.int64)
        if rows.shape != (len(self._NAMES), len(self._numbers)) or (rows < 0).any() or (rows[1] >= self._texts).any():
            raise ValueError("lanes")
        with self._lock:
            self._start = step, rows
            self._known = OrderedDict([self._start])

    def _before(self, step: int) -> np.ndarray:
        """Return the position before a step, int64 [3, B], advancing from the latest cached one if necessary."""
        start = max((known for known in self._known if known <= step), default=None)
        if start is None:
            known, position = self._start if self._start[0] <= step else (0, np.zeros_like(self._start[1]))
        else:
            known, position = start, self._known[start]
        for number in range(known, step):
            position = self._step(position)[2]
            self._remember(number + 1, position)
        return position

    def _remember(self, step: int, position: np.ndarray) -> None:
        self._known[step] = position
        self._known.move_to_end(step)
        while len(self._known) > _KEPT_STEPS:
            self._known.popitem(last=False)

    def _step(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return texts and pieces of the step at a position (int64 [3, B]), and the position after it."""
        epoch, index, piece = position.copy()
        texts, counts = np.empty_like(index), np.empty_like(index)
        lanes = self._numbers
        while len(lanes):
            mine = self._orders.texts(epoch[lanes], index[lanes] * len(self._numbers) + lanes)
            texts[lanes], counts[lanes] = mine, self._pieces(mine)
            lanes = lanes[piece[lanes] >= counts[lanes]]
            self._next_text(lanes, epoch, index, piece)
            if len(lanes) and (epoch[lanes] - position[0, lanes]).max() > _MOST_EPOCHS:
                lane = int(lanes[np.argmax(epoch[lanes] - position[0, lanes])])
                reason = f"sequence {lane} of a global batch of {len(self._numbers)} finds empty texts only"
                raise UserError("data.too-small", "texts", reason, "Lower BATCHSIZE or give more text")
        given = piece.copy()
        piece += 1
        return texts, given, np.stack([epoch, index, piece])

    def _next_text(self, lanes: np.ndarray, epoch: np.ndarray, index: np.ndarray, piece: np.ndarray) -> None:
        """Advance these lanes to their next text, in place."""
        index[lanes] += 1
        piece[lanes] = 0
        over = lanes[index[lanes] >= self._texts[lanes]]
        epoch[over] += 1
        index[over] = 0


Lanes = WholeLanes | PieceLanes


_WINDOW = 1 << 16  # places of an order whose shards are looked up together
_JOIN_TIMEOUT = 5.0  # seconds to wait for the thread to end
_PAUSE = 0.05  # seconds between checks for a shard that another process is making


class Pieces:
    """Reads pieces of texts, from tokenized shards if they exist, otherwise from the texts."""

    def __init__(self, shards: TokenShards, tokenizer: Tokenizer, max_seq_length: int) -> None:
        self._shards = shards
        self._before = np.asarray([tokenizer.cls_id] if shards.is_text else [], np.uint16)
        self._after = np.asarray([tokenizer.sep_id] if shards.is_text else [], np.uint16)
        self._most = max_seq_length - len(self._before) - len(self._after)  # tokens of a text in one piece
        assert self._most > 0, "room for a token"
        # For each text 1 + its pieces, or 0 if unknown. Pages that are never written use no memory.
        self._counts = np.zeros(shards.first[-1], np.int32)

    def counts(self, texts: np.ndarray) -> np.ndarray:
        """Return int64 [n], the number of pieces of each text (int64 [n]), 0 if empty. Raises UserError as `rows`."""
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
        """Return `counts` of all texts, int64 [N]. Tokenizes the set; each rank starts at a different shard."""
        count = len(self._shards.first) - 1
        for number in np.roll(np.arange(count), -(count * rank // world_size)).tolist():
            self._shards.prepare(number)
        for number in range(count):
            self._shards.shard(number)
        return self.counts(np.arange(self._shards.first[-1]))

    def prepare(self, texts: np.ndarray) -> None:
        """Tokenize the shards of which at least half the texts are in ``texts`` (int64 [n], unique). Raises UserError
        as `rows`."""
        numbers, found = np.unique(self._shards.shards_of(texts), return_counts=True)
        for number in numbers[2 * found >= np.diff(self._shards.first)[numbers]].tolist():
            self._shards.shard(number)

    def rows(self, texts: np.ndarray, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sequences of these pieces (int64 [S]) of these texts (int64 [S]) as tokens, uint16 [T], and
        offsets, int64 [S+1]. Raises UserError if a shard is missing or damaged, or cannot be fetched."""
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
    """Tokenizes shards in a background thread, in the order in which they are needed.

    Args:
        canonical_nodes: parts of the set that are read in parallel; for each, the thread stays one shard ahead.
        first, stride: only places first, first + stride, ... of an order are read; ``stride`` divides the lanes.
    """

    def __init__(
        self, shards: TokenShards, orders: EpochOrders, canonical_nodes: int, first: int = 0, stride: int = 1
    ) -> None:
        self._shards, self._orders = shards, orders
        self._first, self._stride = first, stride
        self._distance = canonical_nodes * int(np.diff(shards.first).max())  # places
        self._front = 0  # places read, counted from the start of the first epoch
        self._done = 0  # places whose shards were processed
        self._waiting: list[int] = []  # shards that another process is making
        self._moved, self._stopped = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def reach(self, epoch: int, place: int) -> None:
        """Report the current reading position; the first call starts the thread."""
        self._front = epoch * self._orders.length + place
        self._moved.set()
        if self._thread is None:
            self._done, self._stopped = self._front, threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._stopped,), name="tokenise", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop the thread after its current shard, but wait only a few seconds for it."""
        if self._thread is not None:
            self._stopped.set()
            self._moved.set()
            self._thread.join(_JOIN_TIMEOUT)
            self._thread = None

    def _run(self, stopped: threading.Event) -> None:
        while not stopped.is_set():
            try:
                idle = not self._prepare_next(stopped)
            except UserError:
                return  # the reader of this shard raises the same error
            if idle:
                self._moved.wait(_PAUSE if self._waiting else None)
                self._moved.clear()

    def _prepare_next(self, stopped: threading.Event) -> bool:
        """Make the shards of the next window of places. Return False if the thread is far enough ahead."""
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

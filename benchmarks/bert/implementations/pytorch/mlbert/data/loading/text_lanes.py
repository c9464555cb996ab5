"""Which piece of which text a lane gives in which step.

The global batch has B lanes. Lane k reads the texts at the places k, k + B, k + 2B, ... of an epoch's order, and gives
one piece of a text a step. When its texts of an epoch are used up it goes on with the next epoch. So a step holds the
same pieces however many ranks share the lanes.

Legend: B lanes, N texts of the set, L places of an epoch's order (N, or a few more where texts come twice).

Texts cut to sequences: [CLS], at most max_seq_length - 2 tokens, [SEP]. Sets that hold tokens have these already.

Legend: S sequences, T tokens, N texts of the set.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from mlbert.data.formats.mds_order import StreamWorld, sample_order
from mlbert.data.formats.ragged import offsets_of
from mlbert.data.formats.token_shards import TokenShards
from mlbert.data.formats.tokenizer import Tokenizer
from mlbert.host.errors import UserError

_KEPT_EPOCHS, _KEPT_BYTES = 3, 64 << 20  # of orders: so many, and of small sets more, as lanes drift apart
_KEPT_STEPS = 32  # positions that are remembered, so that steps made ahead can be gone back on
_MOST_EPOCHS = 3  # that a lane searches for a text that is not empty


class EpochOrders:
    """The orders of epochs: those of MosaicML Streaming for one rank with a batch of B. Can be used by several threads.

    Args: as of `mlbert.data.formats.mds_order.sample_order`; ``lanes`` is B.

    Attributes:
        is_computing: an order is being computed, and every thread that asks for any order waits for it.
    """

    def __init__(
        self, shard_sizes: np.ndarray, lanes: int, *, shuffle: str | None, seed: int, canonical_nodes: int
    ) -> None:
        self._sizes, self._world = shard_sizes, StreamWorld(batch_size=lanes)
        self._shuffle, self._seed, self._nodes = shuffle, seed, canonical_nodes
        self._orders: OrderedDict[int, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()
        self.is_computing = False
        # Of the canonical nodes, rows that are one short repeat a place.
        self.length = canonical_nodes * -(-int(shard_sizes.sum()) // canonical_nodes)  # L

    def __call__(self, epoch: int) -> np.ndarray:
        """int [L], texts at the places of an epoch."""
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
        """int64 [n], texts at the places (int64 [n]) of their epochs (int64 [n])."""
        texts = np.empty(len(places), np.int64)
        for epoch in np.unique(epochs).tolist():
            mine = epochs == epoch
            texts[mine] = self(epoch)[places[mine]]
        return texts

    def _compute(self, epoch: int) -> np.ndarray:
        order = sample_order(
            self._sizes,
            self._world,
            shuffle=self._shuffle,
            epoch=epoch,
            canonical_nodes=self._nodes,
            seed=self._seed,
        ).ravel()[: self.length]
        return order.astype(np.int32 if len(order) < 2**31 else np.int64)


class WholeLanes:
    """One piece of each text: computed from the step's number alone."""

    def __init__(self, orders: EpochOrders, lanes: int) -> None:
        self._orders = orders
        numbers = np.arange(lanes)
        self._numbers, self._texts = numbers, (orders.length - numbers + lanes - 1) // lanes  # of each lane an epoch

    def take(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """int64 [B] texts of step ``step``, and int64 [B], which piece of each."""
        epochs, indices = np.divmod(step, self._texts)
        texts = self._orders.texts(epochs, indices * len(self._numbers) + self._numbers)
        return texts, np.zeros_like(texts)

    def front(self, step: int) -> tuple[int, int]:
        """Epoch and place of the lane that is farthest."""
        epoch, place = divmod(step, int(self._texts[-1]))
        return epoch, place * len(self._numbers)

    def state(self, step: int) -> dict[str, Any]:
        """Position before step ``step``, JSON-able; nothing beyond the step itself."""
        return {}

    def go_to(self, step: int, state: dict[str, Any]) -> None:
        """Continue from what `state` gave."""


class PieceLanes:
    """All pieces of each text, none of empty ones. Every lane is followed: by the number of pieces of its texts.

    Args:
        pieces: from int64 [n] texts to int64 [n], pieces of each.
    """

    _NAMES = ("epoch", "index", "piece")  # of a lane: its index-th text of the epoch, pieces given of it

    def __init__(self, orders: EpochOrders, lanes: int, pieces: Callable[[np.ndarray], np.ndarray]) -> None:
        self._orders, self._pieces = orders, pieces
        numbers = np.arange(lanes)
        self._numbers, self._texts = numbers, (orders.length - numbers + lanes - 1) // lanes
        self._start = 0, np.zeros((len(self._NAMES), lanes), np.int64)
        self._known: OrderedDict[int, np.ndarray] = OrderedDict([self._start])
        self._lock = threading.Lock()

    def take(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """As `WholeLanes.take`; raises UserError: a lane finds nothing but empty texts."""
        with self._lock:
            texts, pieces, after = self._step(self._before(step))
            self._remember(step + 1, after)
        return texts, pieces

    def front(self, step: int) -> tuple[int, int]:
        """As `WholeLanes.front`."""
        with self._lock:
            epoch, index, _ = self._before(step)
        farthest = int(np.lexsort((index, epoch))[-1])
        return int(epoch[farthest]), int(index[farthest]) * len(self._numbers)

    def state(self, step: int) -> dict[str, Any]:
        """Position of every lane before step ``step``, JSON-able."""
        with self._lock:
            position = self._before(step)
        return {name: row.tolist() for name, row in zip(self._NAMES, position, strict=True)}

    def go_to(self, step: int, state: dict[str, Any]) -> None:
        """Continue from what `state` gave. Raises ValueError: it is none of so many lanes."""
        rows = np.asarray([state.get(name) for name in self._NAMES], np.int64)
        if rows.shape != (len(self._NAMES), len(self._numbers)) or (rows < 0).any() or (rows[1] >= self._texts).any():
            raise ValueError("lanes")
        with self._lock:
            self._start = step, rows
            self._known = OrderedDict([self._start])

    def _before(self, step: int) -> np.ndarray:
        """Position before a step, int64 [3, B]: known, or gone to from the last known one before."""
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
        """Texts and pieces of the step at a position (int64 [3, B]), and the position after it."""
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
        """Moves these lanes on, in place."""
        index[lanes] += 1
        piece[lanes] = 0
        over = lanes[index[lanes] >= self._texts[lanes]]
        epoch[over] += 1
        index[over] = 0


Lanes = WholeLanes | PieceLanes


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

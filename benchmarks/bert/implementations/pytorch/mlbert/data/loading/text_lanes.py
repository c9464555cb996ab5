"""Chooses the pieces of text in each step, and reads them.

The global batch has B lanes. Lane k reads the texts at positions k, k + B, k + 2B, ... of an epoch,
one piece of a text per step. When it has used its texts of an epoch it continues with the next
epoch. A step therefore has the same pieces for any number of ranks.

A piece is [CLS], at most max_seq_length - 2 tokens, [SEP].
Sets of tokens already include [CLS] and [SEP].

Legend: B lanes, N texts of the set, L positions of an epoch (N, or slightly more if texts are
repeated), S sequences, T tokens. A rank has b of the lanes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import xxhash

from mlbert.data.formats.block_order import BLOCKS, BlockOrder
from mlbert.data.formats.mds_files import locked, other_disk
from mlbert.data.formats.mds_order import epoch_length, places_at, shuffle_into
from mlbert.data.formats.ragged import offsets_of
from mlbert.data.formats.streams import Mixture
from mlbert.data.formats.token_shards import TokenShards
from mlbert.data.formats.tokenizer import Tokenizer
from mlbert.host.errors import UserError
from mlbert.host.files import is_leftover, whole_file

# Cached orders: more epochs if they are small, because lanes drift apart.
_KEPT_EPOCHS = 3  # at least
_KEPT_BYTES = 64 << 20  # more epochs up to this total
# Texts of an epoch. Smaller orders are made by every process,
# in less time than opening a file may take.
_SHARED_TEXTS = 1 << 20
_STALE_SECONDS = 24 * 3600.0  # after which a file is deleted when another one is made
_CHECKSUM_BYTES = 8  # at the end of an order's file: XXH3-64 of the name and the order
_STORED_ORDERS = 2  # on disk at a time: this epoch's and the next one's
_MEGABYTE = 10**6
KEPT_STEPS = 32  # cached positions, for returning from prefetched steps
_MOST_EPOCHS = 3  # that a lane searches for a text that is not empty
_WINDOW = 1 << 16  # places of an order whose shards are looked up together
_JOIN_TIMEOUT = 5.0  # seconds to wait for the thread to end
_PAUSE = 0.05  # seconds between checks for a shard that another process is making


class EpochOrders:
    """The orders of epochs, as in MosaicML Streaming. Thread-safe.

    Of the processes on a machine, one makes an epoch's order, in a file that all of them map, and
    the next epoch's in the background. The file is the order and a checksum, which each process
    verifies.

    Args:
        mixture: draws the texts of each epoch.
        shuffle, seed, canonical_nodes: see `mlbert.data.formats.mds_order.shuffle_into`; without
            ``shuffle``, the order of the sets. `BLOCKS` is `mlbert.data.formats.block_order`,
            which needs no file; an epoch then must have each text once.
        folder: for the files; if they cannot be written there,
            each process makes its orders in memory.
        warn: called with one line if this process makes its orders in memory.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        shuffle: str | None,
        seed: int,
        canonical_nodes: int,
        folder: Path,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._mixture = mixture
        self._shuffle = shuffle
        self._nodes = canonical_nodes
        self._warn = warn
        self._has_warned = False
        self._options: dict[str, Any] = {
            "shuffle": shuffle,
            "seed": seed,
            "canonical_nodes": canonical_nodes,
        }
        self._sizes = np.concatenate(mixture.shard_sizes)
        self._num_texts = mixture.num_samples
        self._dtype = np.dtype("<i4" if int(self._sizes.sum()) < 2**31 else "<i8")
        self._num_bytes = self._num_texts * self._dtype.itemsize  # of an order
        self._orders: OrderedDict[int, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()
        self.length = epoch_length(self._num_texts, canonical_nodes)  # L
        made_from = (
            f"2 {shuffle} {seed} {canonical_nodes} ".encode() + self._sizes.astype("<i8").tobytes()
        )
        made_from += b"" if mixture.is_whole else repr(mixture.samples).encode()
        self._key = hashlib.sha256(made_from).hexdigest()[:16]
        self._folder = folder / "orders"
        self._block_order = lru_cache(_KEPT_EPOCHS)(self._make_block_order)
        if shuffle == BLOCKS and not mixture.is_whole:
            raise UserError(
                "config.conflict",
                f"SHUFFLE={BLOCKS}",
                "takes each text once an epoch, but the sets of DATA_STREAMS have weights",
                "Choose py1e, or remove the weights",
            )

    def _make_block_order(self, epoch: int) -> BlockOrder:
        return BlockOrder(self._num_texts, self._options["seed"], epoch)

    @property
    def is_computing(self) -> bool:
        """Return True while a thread computes an order or waits for it."""
        return self._lock.locked()

    def __call__(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return int64 [n], the texts at these positions (int64 [n], 0 to L - 1) of an epoch."""
        places = places_at(positions, self._num_texts, self._nodes)
        if self._shuffle is None and self._mixture.is_whole:
            return places
        if self._shuffle == BLOCKS:
            return self._block_order(epoch)(places)
        return self._ordered(epoch)[places].astype(np.int64)

    def texts(self, epochs: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return int64 [n], the texts at these positions (int64 [n]) of these epochs (int64
        [n]).
        """
        texts = np.empty(len(positions), np.int64)
        for epoch in np.unique(epochs).tolist():
            mine = epochs == epoch
            texts[mine] = self(epoch, positions[mine])
        return texts

    def _ordered(self, epoch: int) -> np.ndarray:
        """Return int [N], the text at each place of an epoch."""
        with self._lock:
            if epoch not in self._orders:
                self._orders[epoch] = self._make(epoch)
                most = max(_KEPT_EPOCHS, _KEPT_BYTES // self._orders[epoch].nbytes)
                while len(self._orders) > most:
                    self._orders.popitem(last=False)
            self._orders.move_to_end(epoch)
            return self._orders[epoch]

    def _make(self, epoch: int) -> np.ndarray:
        if self._num_texts >= _SHARED_TEXTS:
            try:
                made = self._shared(epoch, wait=True)
            except (UserError, OSError) as error:
                self._warn_of_memory(error)
            else:
                assert made is not None, "with wait=True there is always a result"
                threading.Thread(
                    target=self._make_ahead, args=(epoch + 1,), name="order", daemon=True
                ).start()
                return made
        made = np.empty(self._num_texts, self._dtype)
        self._fill(made, epoch)
        return made

    def _make_ahead(self, epoch: int) -> None:
        """Make an order's file unless another process is making it.

        If that fails, `_make` tries again.
        """
        with contextlib.suppress(UserError, OSError):
            self._shared(epoch, wait=False)

    def _warn_of_memory(self, error: UserError | OSError) -> None:
        """Warn, once, that the order is made in memory because of ``error``."""
        if self._has_warned:
            return
        self._has_warned = True
        subject = error.subject if isinstance(error, UserError) else str(self._folder)
        problem = error.problem if isinstance(error, UserError) else error.strerror or repr(error)
        needed = -(-_STORED_ORDERS * self._num_bytes // _MEGABYTE)
        of_process = -(-self._num_bytes // _MEGABYTE)
        self._warn(
            f"warning: {subject}: {problem}. Each process on this machine therefore makes the "
            "order of the texts "
            f"itself, in {of_process:,} MB of memory. "
            f"Free {needed:,} MB there, or {other_disk(self._folder)}."
        )

    def _fill(self, made: np.ndarray, epoch: int) -> None:
        """Fill int [N] with the text at each place of an epoch."""
        sizes, texts = (self._sizes, None) if self._mixture.is_whole else self._mixture(epoch)
        if self._shuffle is None:
            made[:] = np.arange(len(made))
        else:
            shuffle_into(made, sizes, epoch=epoch, **self._options)
        if texts is not None:
            made[:] = texts[made]

    def _shared(self, epoch: int, wait: bool) -> np.ndarray | None:
        """Return the map of an order's file, making it if necessary; None if ``wait`` is False and
        another process is making it. Raises UserError or OSError if there can be no file.
        """
        path = self._folder / f"{self._key}-{epoch}.order"
        found = self._stored(path)
        if found is not None:
            return found
        with locked(path.with_name(self._key), wait) as is_mine:
            if not is_mine:
                return None
            found = self._stored(path)  # another process may have made it in the meantime
            if found is not None:
                return found
            self._delete_old(path.parent, epoch)
            self._write(path, epoch)
        return self._mapped(path)[0]

    def _stored(self, path: Path) -> np.ndarray | None:
        """Return the map of an order's file; None if it does not exist or is damaged,
        as a crash of the machine can leave it.
        """
        with contextlib.suppress(OSError):
            if path.stat().st_size == self._num_bytes + _CHECKSUM_BYTES:
                order, checksum = self._mapped(path)
                if checksum == self._checksum(path, order):
                    return order
        return None

    def _mapped(self, path: Path) -> tuple[np.ndarray, bytes]:
        """Return the map of the order in a file, int [N], and the checksum after it.

        Raises OSError.
        """
        content = np.memmap(path, np.uint8, "r").view(np.ndarray)
        return content[: self._num_bytes].view(self._dtype), content[self._num_bytes :].tobytes()

    def _checksum(self, path: Path, order: np.ndarray) -> bytes:
        """Return the checksum of an order in the file of this name."""
        digest = xxhash.xxh3_64(path.name.encode())
        digest.update(order.data)
        return digest.digest()

    def _write(self, path: Path, epoch: int) -> None:
        """Make an order's file. Raises UserError if the disk is full or not writable."""
        with whole_file(path) as file:
            os.posix_fallocate(file.fileno(), 0, self._num_bytes + _CHECKSUM_BYTES)
            order = np.memmap(file.name, self._dtype, "r+", shape=(self._num_texts,))
            self._fill(order.view(np.ndarray), epoch)
            file.seek(self._num_bytes)
            file.write(self._checksum(path, order.view(np.ndarray)))

    def _delete_old(self, folder: Path, epoch: int) -> None:
        past = {f"{self._key}-{earlier}.order" for earlier in range(epoch - 1)}
        for old in folder.glob("*.order*"):  # a process that has mapped one can still read it
            with contextlib.suppress(OSError):
                if (
                    old.name in past
                    or is_leftover(old)
                    or time.time() - old.stat().st_mtime > _STALE_SECONDS
                ):
                    old.unlink()


def _lane_texts(orders: EpochOrders, lanes: int, numbers: np.ndarray) -> np.ndarray:
    """Return the texts in an epoch of each of these of B ``lanes``."""
    return (orders.length - numbers + lanes - 1) // lanes


_ArrayFunction = Callable[[np.ndarray], np.ndarray]
Position = TypeVar("Position")


class WholeLanes:
    """Lanes that use one piece of each text, computed from the step number alone.

    Args:
        lanes: B.
        mine: int64 [b], the lanes of this rank, ascending.
    """

    def __init__(self, orders: EpochOrders, lanes: int, mine: np.ndarray) -> None:
        self._orders = orders
        self._lanes = lanes
        self._mine = mine
        self._texts = _lane_texts(orders, lanes, mine)

    def take(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return this rank's texts (int64 [b]) of step ``step``
        and the number of the piece of each (int64 [b]).
        """
        epochs, indices = np.divmod(step, self._texts)
        texts = self._orders.texts(epochs, indices * self._lanes + self._mine)
        return texts, np.zeros_like(texts)

    def front(self, step: int) -> tuple[int, int]:
        """Return epoch and position of the lane that is furthest ahead."""
        epoch, index = divmod(step, int(self._texts[-1]))
        return epoch, index * self._lanes

    def state(self, step: int) -> dict[str, Any]:
        """Return the JSON-serializable position before step ``step``:
        empty, as the step number suffices.
        """
        return {}

    def go_to(self, step: int, state: dict[str, Any]) -> None:
        """Continue from a position returned by `state`."""


class KnownPositions(Generic[Position]):
    """Positions before steps, for going back to a step without computing all before it again.

    Args:
        origin: the position before step 0.
        kept: number of positions that are kept, besides the origin and that of a restart.
    """

    def __init__(self, origin: Position, kept: int) -> None:
        self._origin = (0, origin)
        self._kept = kept
        self._start = self._origin
        self._recent: OrderedDict[int, Position] = OrderedDict()

    def restart(self, step: int, position: Position) -> None:
        """Forget the recent positions, and start from this one."""
        self._start = (step, position)
        self._recent.clear()

    def latest(self, step: int) -> tuple[int, Position]:
        """Return the latest known step up to ``step``, and the position before it."""
        known = (*self._recent.items(), self._start, self._origin)
        passed = [one for one in known if one[0] <= step]
        return max(passed, key=lambda one: one[0])

    def remember(self, step: int, position: Position) -> None:
        """Keep a position, and drop the one that was kept first if there are too many."""
        self._recent[step] = position
        self._recent.move_to_end(step)
        while len(self._recent) > self._kept:
            self._recent.popitem(last=False)


class PieceLanes:
    """Lanes that use all pieces of each text and skip empty texts.

    Tracks the position of each lane of this rank.

    Args:
        lanes, mine: see `WholeLanes`.
        pieces: maps texts (int64 [n]) to the number of pieces of each (int64 [n]).
        sum_over_ranks: collective that returns the sum of all ranks' arrays.
        kept_steps: positions to keep, for returning from prefetched steps.
    """

    # Of a lane: index of its text in the epoch, and pieces of it already used.
    _NAMES = ("epoch", "index", "piece")

    def __init__(
        self,
        orders: EpochOrders,
        lanes: int,
        mine: np.ndarray,
        pieces: _ArrayFunction,
        sum_over_ranks: _ArrayFunction,
        kept_steps: int = KEPT_STEPS,
    ) -> None:
        self._orders = orders
        self._lanes = lanes
        self._mine = mine
        self._pieces = pieces
        self._sum_over_ranks = sum_over_ranks
        self._texts = _lane_texts(orders, lanes, mine)
        origin = np.zeros((len(self._NAMES), len(mine)), np.int64)
        self._known = KnownPositions(origin, kept_steps)
        self._lock = threading.Lock()

    def take(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """See `WholeLanes.take`. Raises UserError if a lane finds only empty texts."""
        with self._lock:
            texts, pieces, after = self._step(self._before(step))
            self._known.remember(step + 1, after)
        return texts, pieces

    def front(self, step: int) -> tuple[int, int]:
        """See `WholeLanes.front`."""
        with self._lock:
            epoch, index, _ = self._before(step)
        farthest = int(np.lexsort((index, epoch))[-1])
        return int(epoch[farthest]), int(index[farthest]) * self._lanes

    def state(self, step: int) -> dict[str, Any]:
        """Return the JSON-serializable position of every rank's lanes before step ``step``.

        A collective.
        """
        rows = np.zeros((len(self._NAMES), self._lanes), np.int64)
        with self._lock:
            rows[:, self._mine] = self._before(step)
        return {
            name: row.tolist()
            for name, row in zip(self._NAMES, self._sum_over_ranks(rows), strict=True)
        }

    def go_to(self, step: int, state: dict[str, Any]) -> None:
        """Continue from a position returned by `state`.

        Raises ValueError if it does not match the lanes.
        """
        rows = np.asarray([state.get(name) for name in self._NAMES], np.int64)
        texts = _lane_texts(self._orders, self._lanes, np.arange(self._lanes))
        if (
            rows.shape != (len(self._NAMES), self._lanes)
            or (rows < 0).any()
            or (rows[1] >= texts).any()
        ):
            raise ValueError("lanes")
        with self._lock:
            self._known.restart(step, rows[:, self._mine])

    def _before(self, step: int) -> np.ndarray:
        """Return the position before a step, int64 [3, b],
        advancing from the latest cached one if necessary.
        """
        known, position = self._known.latest(step)
        for number in range(known, step):
            position = self._step(position)[2]
            self._known.remember(number + 1, position)
        return position

    def _step(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return texts and pieces of the step at a position (int64 [3, b]),
        and the position after it.
        """
        epoch, index, piece = position.copy()
        texts = np.empty_like(index)
        counts = np.empty_like(index)
        lanes = np.arange(len(self._mine))  # of this rank, those without a piece yet
        while len(lanes):
            found = self._orders.texts(epoch[lanes], index[lanes] * self._lanes + self._mine[lanes])
            texts[lanes] = found
            counts[lanes] = self._pieces(found)
            lanes = lanes[piece[lanes] >= counts[lanes]]
            self._next_text(lanes, epoch, index, piece)
            if len(lanes) and (epoch[lanes] - position[0, lanes]).max() > _MOST_EPOCHS:
                lane = self._mine[lanes[np.argmax(epoch[lanes] - position[0, lanes])]]
                reason = f"sequence {lane} of a batch of {self._lanes} would read only empty texts"
                raise UserError(
                    "data.too-small", "texts", reason, "Lower BATCHSIZE or give more text"
                )
        given = piece.copy()
        piece += 1
        return texts, given, np.stack([epoch, index, piece])

    def _next_text(
        self, lanes: np.ndarray, epoch: np.ndarray, index: np.ndarray, piece: np.ndarray
    ) -> None:
        """Advance these lanes to their next text, in place."""
        index[lanes] += 1
        piece[lanes] = 0
        over = lanes[index[lanes] >= self._texts[lanes]]
        epoch[over] += 1
        index[over] = 0


Lanes = WholeLanes | PieceLanes


class Pieces:
    """Reads pieces of texts, from tokenized shards if they exist, otherwise from the texts."""

    def __init__(self, shards: TokenShards, tokenizer: Tokenizer, max_seq_length: int) -> None:
        self._shards = shards
        self._dtype = tokenizer.dtype
        self._before = np.asarray([tokenizer.cls_id] if shards.is_text else [], tokenizer.dtype)
        self._after = np.asarray([tokenizer.sep_id] if shards.is_text else [], tokenizer.dtype)
        # Tokens of a text in one piece.
        self._most = max_seq_length - len(self._before) - len(self._after)
        assert self._most > 0, "room for a token"
        # For each text 1 + its pieces, or 0 if unknown. Pages that are never written use no memory.
        self._counts = np.zeros(shards.first[-1], np.int32)

    def counts(self, texts: np.ndarray) -> np.ndarray:
        """Return int64 [n], the number of pieces of each text (int64 [n]), 0 if empty.

        Raises UserError as `rows`.
        """
        unknown = texts[self._counts[texts] == 0]
        for number in np.unique(self._shards.shards_of(unknown)).tolist():
            if (shard := self._shards.ready(number)) is not None:
                first, end = self._shards.first[number : number + 2]
                self._counts[first:end] = 1 + -(-shard.lengths // self._most)
        unknown = texts[self._counts[texts] == 0]
        if len(unknown):
            lengths = np.asarray([len(tokens) for tokens in self._shards.loose(unknown.tolist())])
            self._counts[unknown] = 1 + -(-lengths // self._most)
        return self._counts[texts].astype(np.int64) - 1

    def all_counts(self, rank: int = 0, world_size: int = 1) -> np.ndarray:
        """Return `counts` of all texts, int64 [N].

        Tokenizes the set; each rank starts at a different shard.
        """
        count = len(self._shards.first) - 1
        for number in np.roll(np.arange(count), -(count * rank // world_size)).tolist():
            self._shards.prepare(number)
        for number in range(count):
            self._shards.shard(number)
        return self.counts(np.arange(self._shards.first[-1]))

    def prepare(self, texts: np.ndarray) -> None:
        """Tokenize the shards of which at least half the texts are in ``texts`` (int64 [n],
        unique). Raises UserError as `rows`.
        """
        numbers, found = np.unique(self._shards.shards_of(texts), return_counts=True)
        for number in numbers[2 * found >= np.diff(self._shards.first)[numbers]].tolist():
            self._shards.shard(number)

    def rows(self, texts: np.ndarray, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sequences of these pieces (int64 [S]) of these texts (int64 [S]) as tokens,
        uint16 or uint32 [T], and offsets, int64 [S+1]. Raises UserError if a shard is missing or
        damaged, or cannot be fetched.
        """
        numbers = self._shards.shards_of(texts)
        places = texts - self._shards.first[numbers]
        shards = {number: self._shards.ready(number) for number in np.unique(numbers).tolist()}
        made = np.asarray([shards[number] is not None for number in numbers.tolist()], bool)
        loose = iter(self._shards.loose(texts[~made].tolist()))
        parts: list[np.ndarray] = []
        lengths = []
        for number, place, piece in zip(
            numbers.tolist(), places.tolist(), pieces.tolist(), strict=True
        ):
            shard = shards[number]
            tokens = next(loose) if shard is None else shard.text(place)
            cut = tokens[piece * self._most : (piece + 1) * self._most]
            parts += (self._before, cut, self._after)
            lengths.append(len(cut))
        tokens = np.concatenate(parts)
        if not self._shards.is_text:
            self._shards.check_ids(texts, tokens)
        offsets = offsets_of(np.asarray(lengths) + len(self._before) + len(self._after))
        return tokens.astype(self._dtype, copy=False), offsets


class Ahead:
    """Tokenizes shards in a background thread, in the order in which they are needed.

    Args:
        canonical_nodes: parts of the set that are read in parallel;
            for each, the thread stays one shard ahead.
        first, stride: only positions first, first + stride, ...
            of an epoch are read; ``stride`` divides the lanes.
    """

    def __init__(
        self,
        shards: TokenShards,
        orders: EpochOrders,
        canonical_nodes: int,
        first: int,
        stride: int,
    ) -> None:
        self._shards = shards
        self._orders = orders
        self._first = first
        self._stride = stride
        self._distance = canonical_nodes * int(np.diff(shards.first).max())  # places
        self._front = 0  # places read, counted from the start of the first epoch
        self._done = 0  # places whose shards were processed
        self._waiting: list[int] = []  # shards that another process is making
        self._moved = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def reach(self, epoch: int, place: int) -> None:
        """Report the current reading position; the first call starts the thread."""
        self._front = epoch * self._orders.length + place
        self._moved.set()
        if self._thread is None:
            self._done = self._front
            self._stopped = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(self._stopped,), name="tokenize", daemon=True
            )
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
        """Make the shards of the next window of places.

        Return False if the thread is far enough ahead.
        """
        self._waiting = [number for number in self._waiting if not self._shards.prepare(number)]
        self._done = max(self._done, self._front)
        if self._done > self._front + self._distance:
            return False
        epoch, place = divmod(self._done, self._orders.length)
        end = min(place + _WINDOW, self._orders.length)
        mine = self._orders(
            epoch, np.arange(place + (self._first - place) % self._stride, end, self._stride)
        )
        numbers, first_use = np.unique(self._shards.shards_of(mine), return_index=True)
        for number in numbers[np.argsort(first_use)].tolist():
            if stopped.is_set():
                return False
            if not self._shards.prepare(number):
                self._waiting.append(number)
        self._done += end - place
        return True

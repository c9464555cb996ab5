"""Shuffle, pack or sample a set globally in bounded memory,
with positions from a keyed permutation.

Pass 1 runs one job per piece of the input (at most `PIECE` sequences). It orders the piece's
sequences by output shard and writes them to one spill file. Pass 2 runs one job per output shard.
It collects the shard's sequences from all spill files in order of their positions, packs them if
requested, and writes the shard. The spill files are removed once all shards exist. Every job writes
its file atomically and keeps a file that an interrupted run finished, so a rerun produces the same
bytes.

Bins (`split_bins`) use a permutation per bin, so the positions of a bin follow those of the bin
before.

`make_eval_set` picks evenly spaced sequences of a larger set in order, by the benchmark's rule.

Legend: N sequences, S sequences of a job.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from mlbert.data.formats.base import Store, StoreInfo
from mlbert.data.formats.bins import BinnedStore
from mlbert.data.formats.manifest import Manifest, json_sha256, make_folder
from mlbert.data.formats.open import describe, open_store
from mlbert.data.formats.packing import pack_lengths
from mlbert.data.formats.permutation import Permutation
from mlbert.data.formats.prepared import ShardEntry, ShardSet, ShardWriter, verified_shard
from mlbert.data.formats.ragged import Ragged, offsets_of
from mlbert.data.formats.shard_file import is_written, map_file, write_shard_file
from mlbert.data.prepare.code_identity import tool_name
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.finished_output import finished_manifest, keep_apart
from mlbert.data.prepare.step_tasks import StepTasks
from mlbert.host.errors import UserError
from mlbert.host.progress import Progress

PIECE = 250_000  # sequences that a job holds in memory: about 200 MB at 512 tokens
SHARD = 300_000  # sequences per output shard without --shards
SPILL = "spill"


@dataclass(frozen=True)
class Packing:
    """Options of packing."""

    max_tokens: int | None = None  # slots per pack (None: the data's max_seq_length)
    max_sequences: int = 3  # maximum sequences per pack


@dataclass(frozen=True)
class Target:
    """One output set: bin ``number`` of a folder of bins, or the only set."""

    folder: Path
    shortest: int  # minimum tokens of its sequences
    longest: int  # maximum tokens of its sequences


@dataclass(frozen=True)
class ShufflePiece:
    """Consecutive input sequences."""

    number: int
    first: int  # first sequence
    end: int
    # The shard that holds them, counted over all `prepared_sets`; None for other stores.
    shard: int | None = None
    row: int = 0  # row of the first sequence in that shard
    before: tuple[
        int, ...
    ] = ()  # sequences of each target in earlier pieces; empty until they are counted


@dataclass(frozen=True)
class Shuffle:
    """Input and output of a shuffle: picklable, and all that a job needs.

    Spill files are stored in a folder below ``out``.
    """

    source: Path
    identity: str  # identity of the source's data
    out: Path
    targets: tuple[Target, ...]
    num_shards: int  # of each target
    counts: tuple[int, ...]  # sequences of each target
    seed: int  # for positions and packing
    packing: Packing | None = None  # None for single sequences

    @property
    def fingerprint(self) -> str:
        """Hash of input and options."""
        shards = [[self.num_shards, target.shortest, target.longest] for target in self.targets]
        packing = [self.packing.max_tokens, self.packing.max_sequences] if self.packing else None
        return json_sha256([self.identity, shards, self.counts, self.seed, packing, PIECE])

    @property
    def bounds(self) -> np.ndarray:
        """int64 [outputs + 1]: first position of every output shard, target by target, then N."""
        first = offsets_of(self.counts)
        within = np.outer(self.counts, np.arange(self.num_shards)) // self.num_shards
        return np.append(first[:-1, None] + within, first[-1])

    def spill(self, piece: ShufflePiece) -> Path:
        """Return the path of a piece's spill file."""
        return self.out / SPILL / f"piece-{piece.number:05d}.h5"

    def output(self, number: int) -> tuple[ShardWriter, int]:
        """Return the writer of output shard ``number`` (counted target by target)
        and the shard's index in its target.
        """
        target, index = divmod(number, self.num_shards)
        return ShardWriter(self.targets[target].folder, self.num_shards, self.fingerprint), index

    def places(self, lengths: np.ndarray, before: tuple[int, ...]) -> np.ndarray:
        """Return int64 [S], the new positions of sequences with these ``lengths``;
        ``before`` as in `ShufflePiece`.
        """
        first = offsets_of(self.counts)
        places = np.empty(len(lengths), np.int64)
        for number, target in enumerate(self.targets):
            mine = np.flatnonzero((lengths >= target.shortest) & (lengths <= target.longest))
            order = Permutation(self.counts[number], (self.seed, number))
            places[mine] = first[number] + order(before[number] + np.arange(len(mine)))
        return places

    def write_spill(self, piece: ShufflePiece) -> None:
        """Run pass 1 for one piece."""
        path = self.spill(piece)
        if is_written(path, self.fingerprint):
            return
        rows = piece_rows(opened(self.source, self.identity), piece)
        places = self.places(rows.lengths, piece.before)
        order = np.argsort(places, kind="stable")
        rows = rows.take(order)
        places = places[order]
        extra = {"places": places, "piece_offsets": np.searchsorted(places, self.bounds)}
        write_shard_file(path, rows, self.fingerprint, extra)

    def write_output(self, job: tuple[int, tuple[ShufflePiece, ...]]) -> ShardEntry:
        """Run pass 2: write output shard ``job[0]`` from the spill files of the pieces ``job[1]``,
        unless an earlier run has done so.
        """
        number, pieces = job
        writer, index = self.output(number)
        if not writer.is_written(index):
            rows, pack_offsets = self._collect(number, pieces)
            writer.write_shard(index, rows, pack_offsets)
        return writer.entry(index)

    def _collect(
        self, number: int, pieces: tuple[ShufflePiece, ...]
    ) -> tuple[Ragged, np.ndarray | None]:
        parts = []
        places = []
        for piece in pieces:
            spill = map_file(self.spill(piece))
            first, end = spill.extra["piece_offsets"][number : number + 2].tolist()
            parts.append(spill.rows.slice(first, end))
            places.append(spill.extra["places"][first:end])
        rows = Ragged.concatenate(parts)
        del parts
        order = np.argsort(np.concatenate([np.empty(0, np.int64), *places]), kind="stable")
        if self.packing is None:
            return rows.take(order), None
        max_tokens = self.packing.max_tokens
        max_sequences = self.packing.max_sequences
        assert max_tokens is not None
        packs = pack_lengths(rows.lengths[order], max_tokens, max_sequences, (self.seed, number))
        return rows.take(order[packs.order]), packs.offsets


@lru_cache(maxsize=1)
def opened(source: Path, identity: str) -> Store:
    """Return the input, opened once per process. The jobs that read its shards verify them."""
    store = open_store(source, verify=False)
    if store.info.identity != identity:
        raise UserError("data.changed", source, "changed while it was being read", "Start again")
    return store


def prepared_sets(store: Store) -> list[ShardSet]:
    """Return the prepared sets of a store: itself, or its bins; none for other kinds."""
    parts = store.bins if isinstance(store, BinnedStore) else [store]
    return [part for part in parts if isinstance(part, ShardSet)]


def piece_rows(store: Store, piece: ShufflePiece) -> Ragged:
    """Return the sequences of a piece; if it begins a shard, verify the shard first."""
    if piece.shard is None:
        return store.gather(np.arange(piece.first, piece.end))
    shards = [
        (part, index) for part in prepared_sets(store) for index in range(len(part.manifest.shards))
    ]
    part, index = shards[piece.shard]
    shard = part.shard(index) if piece.row else verified_shard(part.manifest, index)
    return shard.rows.slice(piece.row, piece.row + piece.end - piece.first)


def known_vocabulary(info: StoreInfo) -> dict[str, Any]:
    """Return the vocabulary in a manifest's format.

    Raises UserError: this kind of data does not name it.
    """
    if info.vocab_size is None or info.vocabulary_sha256 is None:
        reason = "does not name its vocabulary"
        remedy = "Import it with `mlbert prepare import --vocab vocab.txt` first"
        raise UserError("vocabulary.mismatch", info.folder, reason, remedy)
    return {"sha256": info.vocabulary_sha256, "size": info.vocab_size}


def make_pieces(store: Store, most: int = PIECE) -> list[ShufflePiece]:
    """Cut the input at the borders of prepared shards,
    and within shards of more than ``most`` sequences.
    """
    prepared = prepared_sets(store)
    counts = [entry.num_sequences for part in prepared for entry in part.manifest.shards]
    pieces: list[ShufflePiece] = []
    start = 0
    for shard, count in enumerate(counts or [len(store)]):
        for row in range(0, count, most):
            end = start + min(row + most, count)
            pieces.append(
                ShufflePiece(len(pieces), start + row, end, shard if prepared else None, row)
            )
        start += count
    return pieces


def default_shards(num_sequences: int) -> int:
    """Return the number of shards of about `SHARD` sequences."""
    return max(1, round(num_sequences / SHARD))


def remove_spill(out: Path) -> None:
    """Remove the folder of spill files."""
    shutil.rmtree(out / SPILL, ignore_errors=True)


def describe_input(source: Path, out: Path) -> StoreInfo:
    """Return the properties of the input.

    Raises UserError: it does not name its vocabulary, or is the output folder.
    """
    keep_apart(out, [source])
    info = describe(source)
    known_vocabulary(info)
    return info


def check_shards(num_shards: int, num_sequences: int, where: str = "") -> None:
    """Raise UserError if shards would stay empty; a single shard may be."""
    if num_shards > max(1, num_sequences):
        reason = f"{num_shards} shards cannot be filled with {num_sequences} sequences{where}"
        raise UserError("config.range", "--shards", reason, "Use fewer")


def say_what_is_undone(info: StoreInfo, progress: Progress) -> None:
    """Report that the output does not keep the input's packs or bins."""
    if info.max_pack_tokens is not None:
        progress(f"{info.folder} contains packs: they are unpacked into single sequences")
    elif info.kind == "bins":
        progress(f"{info.folder} contains bins: their sequences are merged again")


def run_shuffle(
    shuffle: Shuffle,
    pieces: list[ShufflePiece],
    tasks: StepTasks,
    store: Store,
    options: dict[str, Any],
) -> list[Manifest]:
    """Run both passes and finish every target with provenance."""
    make_folder(shuffle.out / SPILL)
    each = shuffle.num_shards
    total = shuffle.num_shards * len(shuffle.targets)
    if tasks.share.merges:
        for start in range(0, total, each):
            shuffle.output(start)[0].clear_leftovers()
    sizes = [piece.end - piece.first for piece in pieces]
    tasks.run("spreading", shuffle.write_spill, pieces, sizes, unit="sequences", is_last=False)
    jobs = [(number, tuple(pieces)) for number in range(total)]
    name = "packing" if shuffle.packing else "ordering"
    entries = tasks.run(
        name, shuffle.write_output, jobs, np.diff(shuffle.bounds).tolist(), unit="sequences"
    )
    more: dict[str, Any] = {"packs": asdict(shuffle.packing)} if shuffle.packing else {}
    return [
        finish(
            shuffle.output(a)[0],
            store,
            options,
            max_seq_length=target.longest,
            entries=entries[a : a + each],
            **more,
        )
        for a, target in zip(range(0, total, each), shuffle.targets, strict=True)
    ]


def shuffle_set(
    source: Path,
    out: Path,
    *,
    seed: int = 0,
    num_shards: int | None = None,
    packing: Packing | None = None,
    executor: Executor = Executor(),
) -> Manifest:
    """Shuffle any store that names its vocabulary into a prepared set of ``num_shards`` (None: one
    per `SHARD` sequences), packed if ``packing`` is given. The same input and seed produce the same
    bytes. Raises UserError: input bad or of unknown vocabulary, packs too short, output finished
    with other options or not writable.
    """
    info = describe_input(source, out)
    if packing:
        packing = replace(packing, max_tokens=packing.max_tokens or info.max_seq_length)
    if packing and (packing.max_tokens or 0) < info.max_seq_length:
        reason = (
            f"{packing.max_tokens} is less than the data's max_seq_length {info.max_seq_length}"
        )
        raise UserError(
            "data.too-long",
            "--max-tokens",
            reason,
            "Use longer packs or data with shorter sequences",
        )
    options: dict[str, Any] = {
        "step": "pack" if packing else "shuffle",
        "input": info.identity,
        "seed": seed,
    }
    options |= asdict(packing) if packing else {}
    options["shards"] = num_shards or default_shards(
        info.num_sequences or len(open_store(source, verify=False))
    )
    if found := finished_manifest(out, options, executor.progress):
        remove_spill(out)
        return found
    store = open_store(source, verify=False)
    check_shards(options["shards"], len(store))
    say_what_is_undone(info, executor.progress)
    target = Target(out, 0, info.max_seq_length)
    shuffle = Shuffle(
        source, info.identity, out, (target,), options["shards"], (len(store),), seed, packing
    )
    pieces = [replace(piece, before=(piece.first,)) for piece in make_pieces(store)]
    tasks = StepTasks(out, options, executor)
    (manifest,) = run_shuffle(shuffle, pieces, tasks, store, options)
    remove_spill(out)
    tasks.finish()
    return manifest


def finish(writer: ShardWriter, store: Store, options: dict[str, Any], **more: Any) -> Manifest:
    """Finish a set made of sequences of ``store``, with provenance; see `ShardWriter.finish`."""
    foreign = {"kind": store.info.kind, "lower_case": store.info.lower_case}
    inherited = dict(store.manifest.provenance) if isinstance(store, ShardSet) else foreign
    limits = {
        "max_seq_length": store.info.max_seq_length,
        "max_predictions": store.info.max_predictions,
    }
    return writer.finish(
        vocabulary=known_vocabulary(store.info),
        provenance={"tool": tool_name(), "options": options, "input": inherited},
        **(limits | more),
    )


def pick_evenly(available: int, wanted: int) -> np.ndarray:
    """Return int64 [wanted] indices by the benchmark's rule:
    example i is int(i * available / wanted).
    """
    return np.asarray([int(i * available / wanted) for i in range(wanted)], np.int64)


def make_eval_set(
    source: Path, out: Path, *, num: int = 10_000, progress: Progress = Progress()
) -> Manifest:
    """Pick ``num`` sequences of any store that names its vocabulary into a prepared set of one
    shard. Raises UserError: the input is bad or smaller than ``num``, or the output was finished
    with other options.
    """
    info = describe_input(source, out)
    options = {"step": "eval-set", "input": info.identity, "num": num}
    if found := finished_manifest(out, options, progress):
        return found
    store = open_store(source, verify=True)
    if not 1 <= num <= len(store):
        reason = f"{num} examples cannot be picked from {len(store)}"
        raise UserError("config.range", "--num", reason, f"Use 1 to {len(store)}")
    writer = ShardWriter(out, 1, "")
    writer.clear_leftovers()
    writer.write_shard(0, store.gather(pick_evenly(len(store), num)))
    return finish(writer, store, options)

"""The evaluation set: evenly picked sequences of a larger set, in order, by the benchmark's rule."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mlbert.data.formats.manifest import Manifest
from mlbert.data.formats.open import open_store
from mlbert.data.formats.prepared import ShardWriter
from mlbert.data.prepare.finished import finished_manifest
from mlbert.data.prepare.jobs import SILENT, Progress
from mlbert.data.prepare.shuffle import describe_input, finish
from mlbert.host.errors import UserError


def pick_evenly(available: int, wanted: int) -> np.ndarray:
    """int64 [wanted]: the benchmark's rule, example int(i * available / wanted)."""
    return np.asarray([int(i * available / wanted) for i in range(wanted)], np.int64)


def make_eval_set(source: Path, out: Path, *, num: int = 10_000, progress: Progress = SILENT) -> Manifest:
    """Pick ``num`` sequences of any kind of store that knows its vocabulary into a prepared set of one shard.
    Raises UserError: the input is bad or smaller than ``num``, or the output finished with other options."""
    info = describe_input(source, out)
    options = {"step": "eval-set", "input": info.identity, "num": num}
    if found := finished_manifest(out, options, progress):
        return found
    store = open_store(source, verify=True)
    if not 1 <= num <= len(store):
        raise UserError(
            "config.range", "--num", f"{num} examples cannot be picked from {len(store)}", f"Use 1 to {len(store)}"
        )
    writer = ShardWriter(out, 1, "")
    writer.clear_leftovers()
    writer.write_shard(0, store.gather(pick_evenly(len(store), num)))
    return finish(writer, store, options)

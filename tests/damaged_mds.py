"""A small MDS set in three shards, and damages of its index and its last shard."""

import json
from pathlib import Path

from mds_samples import write_samples

COLUMNS = {"text": "str", "ids": "bytes", "number": "str"}


def write_set(folder: Path, **options: object) -> Path:
    samples = ({"text": f"sample {n}", "ids": bytes(12), "number": f"{n:08}"} for n in range(60))
    write_samples(folder, COLUMNS, samples, size_limit=1200, **options)
    assert len(list(folder.glob("shard*"))) == 3
    return folder


def change_index(change: object) -> object:
    """Return a damage of the index: ``change`` edits its shards, or is its new text."""

    def damage(folder: Path) -> None:
        path = folder / "index.json"
        if isinstance(change, str):
            path.write_text(change)
            return
        document = json.loads(path.read_bytes())
        change(document["shards"])
        path.write_text(json.dumps(document))

    return damage


def change_shard(place: int, content: bytes) -> object:
    """Return a damage of the last shard: other bytes at ``place``."""

    def damage(folder: Path) -> None:
        path = folder / "shard.00002.mds"
        data = bytearray(path.read_bytes())
        first = int.from_bytes(data[4:8], "little")  # of its first sample
        start = place if place < 1000 else first + place - 1000
        data[start : start + len(content)] = content
        path.write_bytes(data)

    return damage

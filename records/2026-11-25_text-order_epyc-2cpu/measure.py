"""Time and memory of the orders of two epochs of texts: measure.py lean|old TEXTS CANONICAL_NODES SHUFFLE FOLDER

lean: `EpochOrders` of this commit, and a second process that maps what the first one made. old: `sample_order` of
commit 5778430d, from that tree. Each line is a JSON object; memory is of the process, in bytes.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

TEXTS_PER_SHARD = 30_662  # of a 64 MiB shard of C4, 2.19 KB a text
SEED = 9176


def status(name: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def report(what: str, begun: tuple[float, float], **more: object) -> None:
    seconds, cpu = time.monotonic() - begun[0], time.process_time() - begun[1]
    memory = {name: status(name) for name in ("VmHWM", "RssAnon", "RssFile", "RssShmem")}
    print(json.dumps({"what": what, "seconds": round(seconds, 3), "cpu": round(cpu, 3), **memory, **more}), flush=True)


def main() -> None:
    form, texts, nodes, shuffle, folder, *second = sys.argv[1:]
    sizes = np.full(-(-int(texts) // TEXTS_PER_SHARD), TEXTS_PER_SHARD)
    sizes[-1] -= sizes.sum() - int(texts)
    options = {"shuffle": shuffle, "seed": SEED, "canonical_nodes": int(nodes)}
    now = lambda: (time.monotonic(), time.process_time())  # noqa: E731
    if form == "old":
        from mlbert.data.formats.mds_order import sample_order

        report("begin", now())
        for epoch in (0, 1):
            begun = now()
            kept = sample_order(sizes, epoch=epoch, **options).astype(np.int32)
            report(f"order of epoch {epoch}", begun, first=kept[:3].tolist())
        return
    from mlbert.data.loading.text_lanes import EpochOrders

    orders = EpochOrders(sizes, **options, folder=Path(folder))
    report("begin, second process" if second else "begin", now())
    begun = now()
    first = orders(0, np.arange(4096))
    report("first step of epoch 0", begun, first=first[:3].tolist())
    if second:
        return
    subprocess.run([sys.executable, __file__, *sys.argv[1:], "second"], check=True)
    begun = now()
    while len(list(Path(folder, "orders").glob("*-1.order"))) < 1:
        time.sleep(0.1)
    report("until the next order is there, in the background", begun)
    begun = now()
    first = orders(1, np.arange(4096))
    report("first step of epoch 1", begun, first=first[:3].tolist())


main()

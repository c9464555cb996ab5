"""How fast training data can be read: sequences a second of one process, without a model.

``mlbert bench prepare`` prints it. What counts is CPU time, so a busy machine does not make it look slower; reading
from a disk shows in the time by the clock.
"""

from __future__ import annotations

import time
from pathlib import Path

from mlbert.data.packed import PackedSource


def loader_rate(
    folder: Path,
    *,
    packs_per_step: int = 48,
    max_sequences_per_pack: int = 3,
    seconds: float = 3.0,
    seed: int = 0,
    vocab_size: int | None = None,
) -> dict[str, float]:
    """Make optimizer steps from a data set for some time, in this thread.

    Args:
        folder: any kind of data set.
        packs_per_step: packs of one micro-batch.
        max_sequences_per_pack: 1 for single sequences.
        seconds: CPU time to measure.
        seed: of packing and order.
        vocab_size: see `mlbert.data.packed.PackedSource`.

    Returns:
        ``open_seconds`` by the clock, ``sequences_per_second`` and ``tokens_per_second`` of CPU time,
        ``sequences_per_second_by_clock``, ``mean_length`` in tokens.
    """
    source = PackedSource(
        folder,
        packs_per_step=packs_per_step,
        max_sequences_per_pack=max_sequences_per_pack,
        seed=seed,
        vocab_size=vocab_size,
    )
    started = time.perf_counter()
    source.open()
    opened = time.perf_counter() - started
    for step in range(3):  # first touch of files and buffers
        source.batches_of(step)
    step = sequences = tokens = 0
    cpu, clock = time.thread_time(), time.perf_counter()
    while time.thread_time() - cpu < seconds:
        for batch in source.batches_of(step):
            sequences += batch.num_samples
            tokens += batch.num_tokens
        step += 1
    cpu, clock = time.thread_time() - cpu, time.perf_counter() - clock
    return {
        "open_seconds": opened,
        "sequences_per_second": sequences / cpu,
        "tokens_per_second": tokens / cpu,
        "sequences_per_second_by_clock": sequences / clock,
        "mean_length": tokens / sequences,
    }

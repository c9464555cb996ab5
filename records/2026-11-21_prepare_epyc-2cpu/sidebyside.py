"""The published instance generator and ours, in turn on the same text part, in one process on one core.

    pip download --no-deps bert-tensorflow==1.0.1 && unzip bert_tensorflow-1.0.1-*.whl -d wheel
    python sidebyside.py wheel part-00000-of-00002 vocab.txt

Needs TensorFlow 2 and mlbert. "made": from the text to all instances; "all": to files on disk, for the published one
TFRecords, for ours a prepared set with its checksums and fsync. Start-up and the vocabulary are outside both for the
published one; ours begins every round with a new generator that remembers no word, and "all" reads the vocabulary, too.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import tensorflow.compat.v1 as tensorflow_1

sys.modules["tensorflow"] = tensorflow_1  # the wheel was written for TensorFlow 1
sys.path.insert(0, sys.argv[1])
from bert import create_pretraining_data, tokenization  # noqa: E402
from mlbert.prepare import instance_set  # noqa: E402
from mlbert.prepare.generator import make_generator  # noqa: E402
from mlbert.prepare.instances import InstanceOptions  # noqa: E402
from mlbert.store.wordpiece import load_vocabulary  # noqa: E402

ROUNDS = 3
TEXT, VOCAB = Path(sys.argv[2]), Path(sys.argv[3])
OPTIONS = InstanceOptions()
tensorflow_1.logging.set_verbosity(tensorflow_1.logging.ERROR)


def clock() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def since(begin: tuple[float, float]) -> tuple[float, float]:
    now = clock()
    return now[0] - begin[0], now[1] - begin[1]


def published(tokenizer, folder: Path):
    begin = clock()
    instances = create_pretraining_data.create_training_instances(
        [str(TEXT)], tokenizer, 512, 10, 0.1, 0.15, 76, random.Random(12345)
    )
    made = since(begin)
    create_pretraining_data.write_instance_to_example_files(instances, tokenizer, 512, 76, [str(folder / "file")])
    return len(instances), made, since(begin)


def ours(folder: Path):
    generator = make_generator(load_vocabulary(VOCAB))
    assert generator.name == "native", "nothing was compiled"
    begin = clock()
    rows = generator.rows(generator.read(TEXT), OPTIONS)
    made, count = since(begin), len(rows)
    del rows, generator
    instance_set._generator.cache_clear()
    begin = clock()
    result = instance_set.make_instances(instance_set.InstanceJob((TEXT,), VOCAB, folder / "set", OPTIONS), {})
    everything = since(begin)
    assert result.num_sequences == count
    return count, made, everything


def main() -> None:
    tokenizer = tokenization.FullTokenizer(vocab_file=str(VOCAB), do_lower_case=True)
    megabytes = TEXT.stat().st_size / 1e6
    print(f"{TEXT.name}, {megabytes:.3f} MB, load {os.getloadavg()[0]:.2f}; seconds; rates by CPU time")
    print(f"{'':10}{'made CPU':>10}{'clock':>8}{'all CPU':>10}{'clock':>8}{'inst/s made':>13}{'inst/s all':>12}")
    ratios = []
    with tempfile.TemporaryDirectory() as first:
        ours(Path(first))  # compiles the library
    for _ in range(ROUNDS):
        pair = []
        for name in ("published", "ours"):
            with tempfile.TemporaryDirectory() as folder:
                count, made, everything = (
                    published(tokenizer, Path(folder)) if name == "published" else ours(Path(folder))
                )
            pair.append((count, [*made, *everything]))
            times = f"{made[0]:10.3f}{made[1]:8.3f}{everything[0]:10.3f}{everything[1]:8.3f}"
            print(f"{name:10}{times}{count / made[0]:13,.0f}{count / everything[0]:12,.0f}", flush=True)
        (count, theirs), (same, own) = pair
        assert count == same, "other numbers of instances"
        ratios.append([a / b for a, b in zip(theirs, own, strict=True)])
    medians = [statistics.median(column) for column in zip(*ratios, strict=True)]
    print(f"published / ours, median of {ROUNDS} pairs: made {medians[0]:.1f} (CPU) {medians[1]:.1f} (clock); ", end="")
    print(f"all {medians[2]:.1f} (CPU) {medians[3]:.1f} (clock)")


main()

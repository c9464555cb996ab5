"""Compare the library's CPU time in the main thread with that in one thread of its own, in turns.

RAYON_NUM_THREADS=1 python one_thread.py TOKENIZER TEXT.jsonl
"""

import json
import os
import statistics
import sys
import time
from itertools import islice
from pathlib import Path

from mlbert.data.formats.tokenizer import load_tokenizer

TEXTS = 500
TOGETHER = 250
TURNS = 30

library = load_tokenizer(Path(sys.argv[1])).library
assert library is not None
with Path(sys.argv[2]).open() as file:
    texts = [json.loads(line)["text"] for line in islice(file, TEXTS)]


def cpu_seconds(is_parallel: str) -> float:
    """Return the CPU seconds of tokenizing the texts."""
    os.environ["TOKENIZERS_PARALLELISM"] = is_parallel
    began = time.process_time()
    for first in range(0, len(texts), TOGETHER):
        some = texts[first : first + TOGETHER]
        encodings = library.encode_batch_fast(some, add_special_tokens=False)
        [encoding.ids for encoding in encodings]
    return time.process_time() - began


cpu_seconds("true")
cpu_seconds("false")
ratios = []
for _ in range(TURNS):
    before = cpu_seconds("false")
    in_thread = cpu_seconds("true")
    after = cpu_seconds("false")
    ratios.append((before + after) / 2 / in_thread)
print("CPU seconds in the main thread to those in the library's, median and all:")
print(f"{statistics.median(ratios):.2f}", *(f"{ratio:.2f}" for ratio in sorted(ratios)))

"""Time MinHash with LSH (128 permutations, threshold 0.8) over the articles of a file, of runs of five words.

minhash.py FILE shingles|datasketch|rensa
"""

import re
import sys
import time
from pathlib import Path

path, library = sys.argv[1:]
articles = [text for text in Path(path).read_text().split("\n\n") if text.strip()]
begun, found = time.process_time(), 0
if library == "datasketch":
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(threshold=0.8, num_perm=128)
elif library == "rensa":
    from rensa import RMinHash, RMinHashLSH

    index = RMinHashLSH(threshold=0.8, num_perm=128, num_bands=16)
for number, text in enumerate(articles):
    words = re.findall(r"\w+", text.lower())
    runs = {" ".join(words[place : place + 5]) for place in range(max(1, len(words) - 4))}
    if library == "shingles":
        continue
    if library == "datasketch":
        sketch = MinHash(num_perm=128)
        sketch.update_batch([run.encode() for run in runs])
    else:
        sketch = RMinHash(num_perm=128, seed=1)
        sketch.update(list(runs))
    found += bool(index.query(sketch))
    index.insert(number, sketch)
print(f"{library}: {len(articles)} articles, {found} near copies, processor {time.process_time() - begun:.2f} s")

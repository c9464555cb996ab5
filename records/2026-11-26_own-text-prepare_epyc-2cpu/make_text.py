"""Write text of a size in MB: halves of sentences of other text, joined at random, in articles of 25 lines.

make_text.py SIZE FILE PART...
"""

import random
import sys
from pathlib import Path

size, out, *parts = sys.argv[1:]
lines = [line.split() for part in parts for line in Path(part).read_text().splitlines() if len(line.split()) >= 6]
heads = [" ".join(words[: len(words) // 2]) for words in lines]
tails = [" ".join(words[len(words) // 2 :]) for words in lines]
draw, written = random.Random(1), 0
with open(out, "w") as file:
    while written < int(size) * 10**6:
        text = "\n".join(f"{draw.choice(heads)} {draw.choice(tails)}" for _ in range(25)) + "\n\n"
        written += len(text.encode())
        file.write(text)

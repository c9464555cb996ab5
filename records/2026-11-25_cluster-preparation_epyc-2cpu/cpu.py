"""Processor seconds of converting compressed JSON lines to MDS sets, the former code and this, in turns.

python cpu.py FORMER_TREE WORK_FOLDER
"""

import gzip
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

CALL = """
import sys, time
from pathlib import Path
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.prepare import streaming
source, out, tokens, kind, *share = sys.argv[1:]
tokenizer = load_tokenizer("bert-base-uncased")
tokenizer.encode_all(["load the compiled code"])
how = streaming.Concatenation(int(tokens), "", "", True) if int(tokens) else None
splits, began = kind.split("+"), time.process_time()
if share:
    streaming.GROUP = 1  # a task for each file, as for files of C4's size
    from mlbert.data.prepare.step_tasks import ShareDone, parse_share
    share = parse_share(None if share == ["merge"] else share[0], share == ["merge"])
    try:
        streaming.convert_files(Path(source), splits, Path(out), tokenizer=tokenizer, concatenation=how, share=share)
    except ShareDone:
        pass
else:
    streaming.convert(streaming.own_texts(Path(source)), splits, Path(out), tokenizer=tokenizer, concatenation=how)
print(time.process_time() - began)
"""


def write_input(folder: Path) -> int:
    """Write 4 files like C4's of text drawn from Python's documentation; return the characters."""
    from mlbert.data.prepare import python_text

    words = [word for document in python_text.documents() for sentence in document for word in sentence.split()]
    draw, total = random.Random(0), 0
    folder.mkdir(parents=True)
    for number in range(4):
        with gzip.open(folder / f"c4-train.{number:05d}-of-00004.json.gz", "wt", compresslevel=6) as file:
            size = 0
            while size < 16e6:
                length = min(8000, int(draw.lognormvariate(5.6, 0.9)) + 5)
                first = draw.randrange(len(words) - length)
                text = " ".join(words[first : first + length])
                row = {"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "https://example.org"}
                file.write(json.dumps(row) + "\n")
                size += len(text)
            total += size
    return total


def seconds(tree: Path, *words: object) -> float:
    """Return the processor seconds of one process that imports the package from ``tree``."""
    command = [sys.executable, "-c", CALL, *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def compare(trees: tuple[Path, Path], work: Path, tokens: int, splits: str, size: float) -> None:
    """Print five pairs of one setting, and the medians."""
    pairs = []
    for turn in range(5):
        outs = [work / name for name in ("former", "shares")]
        old = seconds(trees[0], work / "in", outs[0], tokens, splits)
        parts = ("0/2", "1/2", "0/2", "1/2", "merge")  # two passes
        new = [seconds(trees[1], work / "in", outs[1], tokens, splits, part) for part in parts]
        is_equal = subprocess.run(["diff", "-r", *outs], check=False).returncode == 0
        pairs.append((old, sum(new)))
        listed = " + ".join(f"{one:.2f}" for one in new)
        print(f"  turn {turn}: former {old:.2f} s, shares {listed} s, equal bytes: {is_equal}", flush=True)
        for out in outs:
            shutil.rmtree(out)
    ratios = [new / old for old, new in pairs]
    former, shares = (statistics.median(size / value for value in values) for values in zip(*pairs, strict=True))
    print(f"  shares / former: median {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"  MB of text a processor second, median: former {former:.1f}, shares {shares:.1f}", flush=True)


def main() -> None:
    """Compare four settings."""
    import mlbert

    trees, work = (Path(sys.argv[1]), Path(mlbert.__file__).parents[1]), Path(sys.argv[2])
    size = write_input(work / "in") / 1e6
    print(f"{size:.1f} MB of text in 4 files")
    for tokens, splits in ((0, "train"), (0, "train+val"), (128, "train"), (128, "train+val")):
        print(f"{f'samples of {tokens} tokens' if tokens else 'texts'}, {splits}")
        compare(trees, work, tokens, splits, size)


if __name__ == "__main__":
    main()

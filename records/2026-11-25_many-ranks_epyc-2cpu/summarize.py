"""Print one line for each mark of a run of tests/dist/many_ranks_program.py: python summarize.py <folder>"""

import json
import statistics
import sys
from collections import Counter
from pathlib import Path

folder = Path(sys.argv[1])
codes = json.loads((folder / "codes.json").read_text())
ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(codes))]
print(f"{len(codes)} ranks, exit codes {dict(Counter(codes))}")
print("mark         CPU s: sum  rank 0  median  most | descriptors: rank 0  most of the others")
for name in ranks[0]:
    marks = [rank[name] for rank in ranks if name in rank]
    cpu, files = ([mark[key] for mark in marks] for key in ("cpu_seconds", "descriptors"))
    columns = f"{sum(cpu):12.2f} {cpu[0]:7.3f} {statistics.median(cpu):7.4f} {max(cpu[1:]):5.3f}"
    print(f"{name:12s} {columns} | {files[0]:6d} {max(files[1:]):6d}")
for story in folder.glob("story_*"):
    reported, words = story.read_text().split(" ", 1)
    killed = next(rank["end"]["time"] for rank in ranks if "end" in rank)
    print(f"{story.stem}: {words}; {float(reported) - killed:.2f} s after the kill")

"""Run `mlbert bench step` of two checkouts in turn, in both orders; print each round and the pooled ratios.

python paired.py OLD NEW ROUNDS [arguments of bench step]
"""

import json
import os
import statistics
import subprocess
import sys

old, new, rounds, *arguments = sys.argv[1:]
TREES = {"old": old, "new": new}


def seconds_of(tree):
    """Return the seconds of each step in one process."""
    env = {**os.environ, "PYTHONPATH": f"{tree}/benchmarks/bert/implementations/pytorch"}
    words = [sys.executable, "-m", "mlbert", "bench", "step", *arguments, "--json", "-"]
    text = subprocess.run(words, env=env, cwd=tree, capture_output=True, text=True, check=True).stdout
    return json.loads(text[text.index("{") :])["sides"]["mlbert"]["seconds"]


pooled = {"old": [], "new": []}
ratios = []
for number in range(int(rounds)):
    found = {}
    for name in ("old", "new") if number % 2 == 0 else ("new", "old"):
        found[name] = seconds_of(TREES[name])
        pooled[name] += found[name]
    median = {name: statistics.median(found[name]) for name in found}
    least = {name: min(found[name]) for name in found}
    ratios.append(median["old"] / median["new"])
    print(json.dumps({"round": number, "median": median, "least": least, "old_over_new": ratios[-1]}), flush=True)
print(
    json.dumps(
        {
            "rounds": len(ratios),
            "median_of_round_ratios": statistics.median(ratios),
            "ratio_of_medians": statistics.median(pooled["old"]) / statistics.median(pooled["new"]),
            "ratio_of_least": min(pooled["old"]) / min(pooled["new"]),
        }
    )
)

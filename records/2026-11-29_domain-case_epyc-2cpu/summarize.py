"""Print the case's table from the outputs of mlbert finetune: summarize.py FOLDER"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from statistics import mean

SIDES = {
    "TF-IDF + logistic regression": "domain",  # printed by every side, the same for all
    "random": "random",
    "general": "general",
    "modernbert": "modernbert",
    "domain": "domain",
}
RUNS = ("120_10", "120_80", "1200_10")  # labeled rows and passes over them
SEEDS = (1, 2, 3)
OWN = "this model"


def accuracy(output: str, name: str) -> float:
    """Return the accuracy in the line of a method in an output."""
    match = re.search(rf"{re.escape(name)} +(0\.\d+|1\.0+)", output)
    if match is None:
        sys.exit(f"no line {name!r}")
    return float(match[1])


def cell(folder: Path, name: str, side: str, run: str) -> str:
    """Return mean, least and most over the seeds whose output is there."""
    line = name if name.startswith("TF-IDF") else OWN
    paths = [folder / "finetuned" / f"{side}_{run}_{seed}.log" for seed in SEEDS]
    outputs = [path.read_text(encoding="utf-8") for path in paths if path.exists()]
    found = [accuracy(output, line) for output in outputs if "next:" in output]
    if not found:
        return "not measured"
    seeds = "" if len(found) == len(SEEDS) else f", {len(found)} of {len(SEEDS)} seeds"
    return f"{mean(found):.3f} ({min(found):.3f} to {max(found):.3f}{seeds})"


def main(folder: Path) -> None:
    """Print the table's rows."""
    for name, side in SIDES.items():
        cells = [cell(folder, name, side, run) for run in RUNS]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

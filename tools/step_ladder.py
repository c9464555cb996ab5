"""Time one training step from reference to fast, op by op, or profile the fastest step.

python tools/step_ladder.py [--config large] [--packs 448] [--precision bf16] [--profile] [--device cpu] [--json FILE]

Like `tools/gpu_check.sh --parts step,profile`, which measures BERT-large on a GPU, but for any model and device.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from gpu_check.hardware import environment_facts
from gpu_check.ladder import Ladder, Sizes, rungs
from gpu_check.parts import CONFIGS, profiled
from gpu_check.tables import TABLES, aligned, budget_section
from mlbert.config.bert_config import BertConfig
from mlbert.ops import api as ops
from mlbert.ops.precision import compute_dtype

# Maximum sequences if memory grows fast (reference attention, Hugging Face), and those of a small step.
MOST_PLAIN, MOST_HUGGINGFACE, SMALL = 32, 96, 16


def measure(ladder: Ladder, profile: bool) -> dict[str, dict[str, Any]]:
    """Return the rows by name."""
    if not profile:
        return {name: row() for name, row in ladder.rows()}
    best = rungs(ladder.device, ladder.sizes)[-1]
    return {best.name: profiled(ladder, best)}


def main(words: list[str]) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description="Times one training step, one fast op after the other.")
    parser.add_argument("--config", default="demo", help="a name in configs/ or a bert_config.json")
    parser.add_argument("--packs", type=int, default=32, help="sequences of the fast steps")
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=3.0, help="measuring time of a row")
    parser.add_argument("--profile", action="store_true", help="where the fastest step's time goes, by groups")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args(words)
    device, named = torch.device(options.device), CONFIGS / f"{options.config}.json"
    config = BertConfig.from_json(named if named.exists() else Path(options.config))
    ops.select("auto", device)
    packs = options.packs
    sizes = Sizes(packs, min(packs, MOST_PLAIN), min(packs, MOST_HUGGINGFACE), min(packs, SMALL))
    dtype = compute_dtype(options.precision, device)
    rows = measure(Ladder(config, device, dtype, sizes, options.seconds), options.profile)
    if options.json:
        record = {**environment_facts(device), "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    part = "profile" if options.profile else "step"
    for _, table in [(part, TABLES[part](rows)), *budget_section(rows)]:
        print("\n".join(aligned(table)), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Count the launches, bytes and memory of a BERT-large step with 48 packs, without a GPU.

    PYTHONPATH=benchmarks/bert/implementations/pytorch:tools python count.py [OPS...]

Runs in the repository before and after the change: before, `count` had no choice of OPS.
"""

import functools
import sys
from collections import Counter

from counted import parts, steps
from counted.gpus import GPUS
from counted.steps import count
from mlbert.config.bert_config import BertConfig
from mlbert.host.provenance import shipped
from mlbert.ops.precision import fp8_products

LARGE = BertConfig.from_json(shipped("configs") / "large.json")
PACKS = 48
# As in the published FP8 configurations, accumulation is fast in all products.
steps.fp8_products = functools.partial(fp8_products, fast_accumulation="all")


def show(precision: str, choice: str | None) -> None:
    options = {} if choice is None else {"choice": choice}
    counted = count(LARGE, PACKS, precision, GPUS["h200"], "full_iteration", **options)
    sums = parts.totals(counted.step, counted, LARGE)
    launches = sum(total.launches for total in sums.values())
    gigabytes = sum(total.moved for total in sums.values()) / 1e9
    print(f"\n{precision}, OPS={choice or 'auto'}, full_iteration:")
    print(f"    {launches} launches, {gigabytes:.2f} GB, peak {counted.memory.peak / 1e9:.2f} GB")
    for part, total in sums.items():
        print(f"    {part:38}{total.launches:6}{total.moved / 1e9:10.3f} GB")
    names = Counter((operation.kind, operation.name) for operation in counted.step)
    for (kind, name), number in sorted(names.items(), key=lambda item: (-item[1], item[0])):
        print(f"        {number:5} {kind} {name}")


for chosen in sys.argv[1:] or [None]:
    for number_format in ("fp8", "bf16"):
        if not (chosen in ("fused", "slopes") and number_format == "bf16"):
            show(number_format, chosen)

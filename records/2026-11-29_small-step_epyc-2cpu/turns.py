"""Time the steps of two checkouts in short turns: python turns.py OLD NEW CONFIG PACKS STEPS ROUNDS THREADS

Each checkout has its own process, which waits while the other one runs. In a round each runs STEPS steps, in random
order. Prints the median and the fastest step of each side, and the median of the rounds' ratios.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time

PACKAGE = "benchmarks/bert/implementations/pytorch"


def serve(config_name: str, packs: str, threads: str) -> None:
    """Run as many steps as each line of the input says, and print their seconds."""
    import torch

    from mlbert.config.bert_config import BertConfig
    from mlbert.host.provenance import shipped
    from mlbert.models.bert import BertForPreTraining
    from mlbert.ops import api as ops
    from mlbert.programs.bench.sides import make_batch, our_side

    try:
        from mlbert.host.freed_memory import keep_freed_memory
    except ImportError:
        print("no freed_memory", file=sys.stderr)
    else:
        keep_freed_memory()  # as in a training run
    torch.set_num_threads(int(threads))
    config = BertConfig.from_json(shipped("configs") / f"{config_name}.json")
    ops.select("auto", "cpu")
    batch = make_batch(config, int(packs), None, 1)
    model = BertForPreTraining(config, torch.float32)
    model.initialize(1)
    side = our_side(batch, model, 1)
    for line in sys.stdin:
        taken = []
        for _ in range(int(line)):
            started = time.perf_counter()
            side.step()
            taken.append(time.perf_counter() - started)
        print(json.dumps(taken), flush=True)


def main() -> None:
    old, new, config, packs, steps, rounds, threads = sys.argv[1:]
    sides = {}
    for name, checkout in (("old", old), ("new", new)):
        environ = {**os.environ, "PYTHONPATH": f"{checkout}/{PACKAGE}"}
        words = [sys.executable, __file__, "serve", config, packs, threads]
        sides[name] = subprocess.Popen(
            words, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def turn(name: str, count: int) -> list[float]:
        process = sides[name]
        process.stdin.write(f"{count}\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    for name in sides:
        turn(name, min(5, int(steps)))
    taken = {name: [] for name in sides}
    ratios = []
    for _ in range(int(rounds)):
        order = list(sides)
        random.shuffle(order)
        medians = {}
        for name in order:
            seconds = turn(name, int(steps))
            taken[name] += seconds
            medians[name] = statistics.median(seconds)
        ratios.append(medians["old"] / medians["new"])
    for name, seconds in taken.items():
        low, middle, high = statistics.quantiles(seconds, n=4)
        print(
            f"{name}: fastest {1e3 * min(seconds):.2f} ms, quartiles {1e3 * low:.2f} {1e3 * middle:.2f}"
            f" {1e3 * high:.2f}, {len(seconds)} steps"
        )
    low, middle, high = statistics.quantiles(ratios, n=4)
    fastest = min(taken["old"]) / min(taken["new"])
    print(f"old / new: rounds' quartiles {low:.3f} {middle:.3f} {high:.3f}; of the fastest steps {fastest:.3f}")
    for process in sides.values():
        process.stdin.close()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    else:
        main()

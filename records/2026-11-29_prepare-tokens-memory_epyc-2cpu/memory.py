"""Memory of `mlbert prepare tokens` with any number of workers, also more than there are cores.

python memory.py TOKENIZER TEXT WORKERS,WORKERS... >FILE

Prints a line of JSON for each number: MB that `--dry-run` plans, and the most that was taken, each
page once; seconds; and of the processes at that moment, in MB: the main one, the server, and the
mean of the workers (pages of their own).
"""

import contextlib
import json
import multiprocessing
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

from mlbert.cli.main import main
from mlbert.cli.prepare import tokens
from mlbert.data.prepare import executor
from mlbert.host.process_memory import descendants_of, memory_of

MB = 1e6


def private(process: int) -> float:
    """Return the MB of a process that no other one shares."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    return 1024 * sum(map(int, re.findall(r"Private_\w+:\s+(\d+)", text))) / MB


def command(words: list[str], output: str) -> None:
    """Run the command without its limits on the number of processes."""
    executor._MOST_WORKERS = 1000
    tokens._PROCESS_BYTES = 1
    sys.argv = ["mlbert", "prepare", "tokens", *words]
    with open(output, "w") as file, contextlib.redirect_stdout(file):
        main()


def parts_of(process: int, others: set[int]) -> dict[str, object]:
    """Return the number of processes, and MB of the main one and of a worker on average.

    Empty if one of them has ended.
    """
    try:
        main_part = private(process)
        each = sorted((private(one) for one in others), reverse=True)
    except OSError:
        return {}
    found: dict[str, object] = {"processes": len(each) + 1, "main": round(main_part)}
    workers = each[: len(each) - 2]  # besides the server and Python's tracker of resources
    if workers:
        found["worker"] = round(statistics.mean(workers), 1)
    return found


def run(words: list[str]) -> tuple[float, float, dict[str, object], str]:
    """Return MB, seconds, the processes, and the output."""
    most = 0.0
    parts: dict[str, object] = {}
    with tempfile.NamedTemporaryFile() as output:
        process = multiprocessing.get_context("fork").Process(
            target=command, args=(words, output.name)
        )
        process.start()
        began = time.monotonic()
        while process.is_alive():
            others = descendants_of(process.pid)
            taken = memory_of({process.pid, *others}).pss / MB
            if taken > most:
                most = taken
                parts = parts_of(process.pid, others) or parts
            time.sleep(0.1)
        assert process.exitcode == 0
        return most, time.monotonic() - began, parts, Path(output.name).read_text()


def measure(tokenizer: str, text: str, numbers: str) -> None:
    """Print the lines."""
    for number in numbers.split(","):
        with tempfile.TemporaryDirectory() as folder:
            words = [text, "--tokenizer", tokenizer, "--out", f"{folder}/out", "--workers", number]
            _, _, _, plan = run([*words, "--dry-run"])
            most, seconds, parts, _ = run(words)
        planned = float(re.search(r"([\d.]+) GB of memory", plan)[1]) * 1000
        line = {"workers": int(number), "planned": planned, "taken": round(most)}
        print(json.dumps(line | {"seconds": round(seconds)} | parts), flush=True)


if __name__ == "__main__":
    measure(*sys.argv[1:])

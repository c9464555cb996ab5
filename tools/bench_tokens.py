"""Measure `mlbert prepare tokens` on made text: its rate next to that of the library `tokenizers`,
its peak memory, and what `--dry-run` had planned.

python tools/bench_tokens.py --tokenizer DIR [--bytes 2e9] [--workers 1,2] [--json FILE]

The text is English sentences of this Python installation in random order, in documents of
log-normal length, in JSON lines. After 50 MB, the documents return with another first word, so no
document repeats another. The library's rate is that of `encode_batch_fast` on all cores, with the
text in memory, measured before and after each run of the command; `ratio` is the command's rate,
start and end included, to the mean of these two. Memory is the sum over the command's processes,
sampled five times a second: resident pages (`rss`), and the same with a page that several processes
share divided among them (`pss`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import resource
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.prepare import python_text
from mlbert.host.files import write_atomically
from mlbert.host.process_memory import descendants_of, memory_of

DIFFERENT_BYTES = 50_000_000  # of documents that are not made from earlier ones
WORD_LETTERS = 12
MEAN_SENTENCES = 20  # of a document, about
MOST_SENTENCES = 2000
LIBRARY_BYTES = 20_000_000  # of text on which the library is timed, each time
TOGETHER = 1024  # texts in a call of the library
SAMPLE_SECONDS = 0.2
_PLAN = re.compile(r"([\d,.]+) GB of disk \(while it runs ([\d,.]+) GB\), ([\d,.]+) GB of memory")
_DURATION = re.compile(r"about (?:(\d+) h )?(?:(\d+) min)? ?(?:(\d+) s)?,")


def make_text(folder: Path, num_bytes: int, seed: int = 1) -> int:
    """Write documents of made text as JSON lines; return their bytes as UTF-8."""
    draw = random.Random(seed)
    sentences = [sentence for document in python_text.documents() for sentence in document]
    texts: list[str] = []
    made = 0
    while made < min(num_bytes, DIFFERENT_BYTES):
        wanted = min(MOST_SENTENCES, 1 + int(draw.lognormvariate(0, 1) * MEAN_SENTENCES))
        texts.append(" ".join(draw.choices(sentences, k=wanted)))
        made += len(texts[-1].encode())
    total = 0
    turns = -(-num_bytes // made)
    for turn in range(turns):
        word = "".join(draw.choices(string.ascii_lowercase, k=WORD_LETTERS))
        with (folder / f"{turn:03d}.jsonl").open("w", encoding="utf-8") as file:
            for text in texts:
                line = json.dumps({"text": f"{word} {text}"}, ensure_ascii=False)
                file.write(f"{line}\n")
        total += made + len(texts) * (WORD_LETTERS + 1)
    return total


@dataclass(frozen=True)
class Rate:
    """Bytes of text per second of the clock, and per CPU second."""

    by_clock: float
    by_cpu: float


def library_rate(tokenizer: Path, folder: Path) -> Rate:
    """Return the rate of the library on all cores."""
    library = load_tokenizer(tokenizer).library
    assert library is not None, "a tokenizer that the library runs"
    texts: list[str] = []
    total = 0
    with (folder / "000.jsonl").open(encoding="utf-8") as file:
        for line in file:
            texts.append(json.loads(line)["text"])
            total += len(texts[-1].encode())
            if total >= LIBRARY_BYTES:
                break
    library.encode_batch_fast(texts[:TOGETHER], add_special_tokens=False)
    began = time.perf_counter()
    began_cpu = time.process_time()
    for first in range(0, len(texts), TOGETHER):
        library.encode_batch_fast(texts[first : first + TOGETHER], add_special_tokens=False)
    return Rate(total / (time.perf_counter() - began), total / (time.process_time() - began_cpu))


def run_command(words: Sequence[str | Path]) -> dict[str, Any]:
    """Run `mlbert prepare tokens` and return its time, peak memory and output."""
    began = time.perf_counter()
    began_cpu = children_cpu_seconds()
    command = [sys.executable, "-m", "mlbert", "prepare", "tokens", *map(str, words)]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        most_rss = most_pss = 0
        while process.poll() is None:
            memory = memory_of({process.pid, *descendants_of(process.pid)})
            most_rss = max(most_rss, memory.rss)
            most_pss = max(most_pss, memory.pss)
            time.sleep(SAMPLE_SECONDS)
        seconds = time.perf_counter() - began
        output.seek(0)
        said = output.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{said}")
    cpu_seconds = children_cpu_seconds() - began_cpu
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "rss": most_rss,
        "pss": most_pss,
        "output": said,
    }


def children_cpu_seconds() -> float:
    """Return the CPU seconds of all ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def planned(output: str) -> dict[str, float]:
    """Return the figures of a `--dry-run`, in seconds and bytes."""
    hours, minutes, seconds = (int(part or 0) for part in _DURATION.search(output).groups())  # type: ignore[union-attr]
    disk, peak_disk, memory = _PLAN.search(output).groups()  # type: ignore[union-attr]
    return {
        "seconds": 3600 * hours + 60 * minutes + seconds,
        "disk": 1e9 * float(disk),
        "peak_disk": 1e9 * float(peak_disk),
        "memory": 1e9 * float(memory),
    }


def size_of(folder: Path) -> int:
    """Return the bytes of the files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def run(tokenizer: Path, num_bytes: int, workers: Sequence[int], work: Path) -> dict[str, Any]:
    """Measure and return a JSON-able record."""
    text = work / "text"
    text.mkdir()
    made = make_text(text, num_bytes)
    record: dict[str, Any] = {
        "bytes": made,
        "bytes_on_disk": size_of(text),
        "tokenizer": str(tokenizer.name),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "runs": [],
    }
    has_library = load_tokenizer(tokenizer).library is not None
    before = library_rate(tokenizer, text) if has_library else None
    for number in workers:
        out = work / f"out-{number}"
        words: list[str | Path] = [
            text,
            "--tokenizer",
            tokenizer,
            "--out",
            out,
            "--workers",
            str(number),
        ]
        plan = planned(run_command([*words, "--dry-run"])["output"])
        result = run_command(words)
        result |= {
            "workers": number,
            "disk": size_of(out),
            "rate": asdict(Rate(made / result["seconds"], made / result["cpu_seconds"])),
            "planned": plan,
        }
        if before is not None:
            after = library_rate(tokenizer, text)
            result["library"] = [asdict(before), asdict(after)]
            result["ratio"] = {
                name: rate / statistics.mean(one[name] for one in result["library"])
                for name, rate in result["rate"].items()
            }
            before = after
        record["runs"].append(result)
        print(json.dumps({key: value for key, value in result.items() if key != "output"}))
    return record


def main(words: list[str]) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description="Measure `mlbert prepare tokens`.")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--bytes", type=float, default=2e9, help="of text")
    parser.add_argument("--workers", default="1,2", help="numbers of processes, one run each")
    parser.add_argument("--json", type=Path, help="file for the record")
    options = parser.parse_args(words)
    workers = [int(number) for number in options.workers.split(",")]
    with tempfile.TemporaryDirectory(prefix="mlbert-bench-tokens-") as folder:
        record = run(options.tokenizer, int(options.bytes), workers, Path(folder))
    text = json.dumps(record, indent=2) + "\n"
    if options.json:
        write_atomically(options.json, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

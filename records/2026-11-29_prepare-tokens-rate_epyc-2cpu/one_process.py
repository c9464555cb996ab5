"""Print the memory that `mlbert prepare tokens` plans for one process, and what it takes.

python one_process.py FOLDER     with text; for example of `bench_tokens.make_text`
"""

import os
import subprocess
import sys
import tempfile

WORDS = ["--tokenizer", "bert-base-uncased", "--workers", "1"]


def run(*words: str) -> tuple[str, int]:
    """Return what a command printed, and its peak memory in bytes."""
    command = [sys.executable, "-m", "mlbert", "prepare", "tokens", sys.argv[1], *WORDS, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, output
    return output, 1024 * usage.ru_maxrss


with tempfile.TemporaryDirectory() as folder:
    print(run("--out", f"{folder}/out", "--dry-run")[0])
    print(f"peak memory: {run('--out', f'{folder}/out')[1] / 1e9:.3f} GB")

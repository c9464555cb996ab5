"""The allocator keeps the memory that a step frees."""

import subprocess
import sys

import pytest

from mlbert.host.freed_memory import keep_freed_memory

# Blocks as large as a small model's activations, freed from the end of the heap.
STEPS = """
import resource, sys
import numpy as np
from mlbert.host.freed_memory import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit("not glibc")

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    blocks = [np.ones(1 << 18) for _ in range(20)]

step()
before = faults()
for _ in range(10):
    step()
print(faults() - before)
"""


def page_faults(choice: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", STEPS, choice], capture_output=True, text=True, check=False
    )
    if done.stderr.strip() == "not glibc":
        pytest.skip("the C library is not glibc")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_later_steps_do_not_fault_memory_in_again():
    """Ten steps of 40 MiB have 102,400 pages."""
    assert page_faults("keep") < 1000
    assert page_faults("default") > 10 * page_faults("keep")


def test_it_can_be_repeated():
    assert keep_freed_memory() == keep_freed_memory()

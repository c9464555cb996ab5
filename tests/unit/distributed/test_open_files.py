"""The limit on open files is raised to what the ranks need, or the run ends before it starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

RAISE = """
import resource, sys
from mlbert.distributed.rendezvous import raise_open_files_limit
soft, hard, ranks = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
raise_open_files_limit(ranks)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def raised(soft: int, hard: int, ranks: int) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", RAISE, *map(str, (soft, hard, ranks))]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("soft", "hard", "ranks", "expected"),
    [
        pytest.param(1024, 4000, 8, "1024 4000", id="enough already"),
        pytest.param(1024, 4000, 400, "2112 4000", id="raised to twice the need"),
        pytest.param(1024, 1500, 400, "1500 1500", id="raised to the hard limit"),
    ],
)
def test_the_soft_limit_grows_with_the_ranks(soft: int, hard: int, ranks: int, expected: str) -> None:
    done = raised(soft, hard, ranks)
    assert done.stdout.strip() == expected, done.stderr


def test_a_hard_limit_that_is_too_low_is_named() -> None:
    done = raised(512, 1000, 400)
    assert done.returncode == 1
    words = "ulimit -n: the hard limit on open files is 1000, and 400 ranks need 1056. Raise it on every node"
    assert words in done.stderr.splitlines()[-1]

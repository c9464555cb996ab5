"""Run a share of a preparation step in this process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.shares import Share
from mlbert.data.prepare.step_tasks import ShareDone


def run_share(step: Callable[..., object], source: Path, out: Path, index: int, count: int) -> int:
    """Run a share and return its exit status."""
    with pytest.raises(ShareDone) as done:
        step(source, out, Executor(share=Share(index, count, merges=False)))
    return int(done.value.code)

"""What the shares of a step read of an earlier pass."""

from pathlib import Path

from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.finished_output import WORK_FOLDER
from mlbert.data.prepare.shares import Share
from mlbert.data.prepare.step_tasks import ALL_RESULTS, ShareDone, StepTasks

ITEMS = [3, 1, 4, 1, 5, 9, 2, 6]
PASSES = ("sizes", "copies")


def double(item: int) -> int:
    return 2 * item


def run_share(out: Path, number: int) -> list[int] | None:
    """Run a share's two passes; return the first one's results, or None if it has to wait."""
    tasks = StepTasks(out, {"items": ITEMS}, Executor(workers=1, share=Share(number, 2, False)))
    found = None
    try:
        found = tasks.run("sizes", double, ITEMS, ITEMS, is_last=False, keep=True)
        tasks.run("copies", double, ITEMS, ITEMS)
    except ShareDone:
        pass
    return found


def test_shares_of_a_later_pass_read_one_file(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run_share(out, 0) is None
    together = out / WORK_FOLDER / f"sizes{ALL_RESULTS}"
    assert not together.exists()
    expected = [2 * item for item in ITEMS]
    assert run_share(out, 1) == expected
    assert together.exists()
    for mark in (out / WORK_FOLDER).glob("sizes-0*.json"):
        mark.write_text("not read any more")
    assert run_share(out, 0) == expected
    together.write_text("damaged")
    assert run_share(out, 0) is None, "then the tasks run again"
    assert run_share(out, 1) == expected

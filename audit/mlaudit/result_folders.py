"""Find the folders of results in a log folder, a system, a submission,
or a round of submissions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlaudit.scratch_copy import logs_in

# From the given folder down to the folders with logs: the folder itself, a system's folder, the
# folder results, a submission, and a round, which holds one submission for each submitter.
_PATTERNS = (".", "*", "*/*", "results/*/*", "*/results/*/*")
_RESULTS = "results"


@dataclass(frozen=True)
class ResultFolder:
    """A folder with the logs of one result.

    Attributes:
        folder: ``results/<system>/<benchmark>`` in a submission, else any folder.
        logs: its logs by name.
    """

    folder: Path
    logs: tuple[Path, ...]

    @property
    def tree(self) -> Path | None:
        """Return the submitter's folder, or None outside a submission."""
        parents = self.folder.parents
        is_in_tree = len(parents) > 2 and parents[1].name == _RESULTS
        return parents[2] if is_in_tree else None

    @property
    def description(self) -> Path | None:
        """Return the path of the system description, or None outside a submission."""
        if self.tree is None:
            return None
        return self.tree / "systems" / f"{self.folder.parent.name}.json"


def find_results(path: Path) -> list[ResultFolder]:
    """Return the folders of results at a path, in order of their names; none if it holds no log.

    A path of one log gives its folder with this log only.
    """
    here = path.resolve()
    if here.is_file():
        return [ResultFolder(here.parent, (here,))]
    for pattern in _PATTERNS:
        folders = [here] if pattern == "." else sorted(here.glob(pattern))
        found = []
        for folder in folders:
            logs = tuple(log for log in logs_in(folder) if log.is_file())
            if logs:
                found.append(ResultFolder(folder, logs))
        if found:
            return found
    return []

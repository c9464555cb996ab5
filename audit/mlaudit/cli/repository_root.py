"""The repository that a command reads or extends: the one given,
or the one that contains the running package.
"""

from __future__ import annotations

from pathlib import Path

from mlbert.host.errors import UserError
from mlbert.host.provenance import tree_root
from mlbert.host.repository import repository


def repository_root(given: Path | None) -> Path:
    """Return the root of a repository.

    Raises UserError if ``--tree`` is missing or is not a folder.
    """
    if given is not None and not given.is_dir():
        raise UserError(
            "file.missing", "--tree", f"{given} is not a folder", "Name the root of a repository"
        )
    if given is None and repository() is None:
        reason = "is not given, and the installed package has no repository around it"
        raise UserError("config.missing", "--tree", reason, "Name the root of a repository")
    return (given or tree_root()).resolve()

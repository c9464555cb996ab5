"""Where this package is: in a checkout of the repository, or installed from a wheel."""

from __future__ import annotations

from pathlib import Path

PACKAGE_HOME = "benchmarks/bert/implementations/pytorch/mlbert"
PACKAGE = Path(__file__).resolve().parents[1]  # the folder of the package


def repository() -> Path | None:
    """Return the root of the repository that contains this package,
    or None if it was installed from a wheel.
    """
    return next((root for root in PACKAGE.parents if root / PACKAGE_HOME == PACKAGE), None)

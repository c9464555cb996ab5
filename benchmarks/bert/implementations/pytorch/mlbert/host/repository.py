"""Where the packages are: in a checkout of the repository, or installed from a wheel."""

from __future__ import annotations

from pathlib import Path

PACKAGE_HOME = "benchmarks/bert/implementations/pytorch/mlbert"
TENSORFLOW2_HOME = "benchmarks/bert/implementations/tensorflow2/tf2_bert"
# The packages of this distribution, and where each is in the repository.
HOMES = {
    "mlbert": PACKAGE_HOME,
    "tf2_bert": TENSORFLOW2_HOME,
    "mosaic_yaml": "benchmarks/mosaic_bert/mosaic_yaml",
    "mlaudit": "audit/mlaudit",
}
PACKAGE = Path(__file__).resolve().parents[1]  # the folder of the package


def repository() -> Path | None:
    """Return the root of the repository that contains this package,
    or None if it was installed from a wheel.
    """
    return next((root for root in PACKAGE.parents if root / PACKAGE_HOME == PACKAGE), None)

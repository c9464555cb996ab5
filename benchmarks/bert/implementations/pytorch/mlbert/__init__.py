"""BERT pre-training as an MLPerf-style benchmark; see ``benchmarks/bert/README.md``.

mlbert.__version__      of the installed distribution, or of the source checkout
"""

from __future__ import annotations


def __getattr__(name: str) -> str:
    """Return ``__version__``, which is looked up only when it is asked for."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mlbert.host.provenance import package_version

    return package_version()

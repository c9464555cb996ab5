"""Run one official tool with a faster parser: ``tools_worker.py TOOL ARGUMENTS...``.

This program needs only the standard library and is run by its path with ``python -P``; otherwise modules of this
package would shadow others of the same name. It does the same as ``python -m mlperf_logging.TOOL ARGUMENTS...``.
"""

from __future__ import annotations

import contextlib
import importlib
import runpy
import sys
from collections.abc import Iterable

_TOKEN = ":::MLLOG "
_PARSER = "mlperf_logging.compliance_checker.mlp_parser.ruleset_500"


def text_from_token(lines: Iterable[str]) -> list[str]:
    """Return the same as the parser's `strip_and_dedup`, which needs time quadratic in the length of a line."""
    return [_TOKEN + line.rpartition(_TOKEN)[2] for line in lines if _TOKEN in line]


if __name__ == "__main__":
    with contextlib.suppress(ImportError):  # the tool reports it when it runs
        vars(importlib.import_module(_PARSER))["strip_and_dedup"] = text_from_token
    del sys.argv[0]
    runpy.run_module(f"mlperf_logging.{sys.argv[0]}", run_name="__main__", alter_sys=True)

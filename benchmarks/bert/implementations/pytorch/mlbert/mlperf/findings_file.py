"""Findings for programs: one JSON object with the verdict, the versions of what judged, and every complaint."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlbert.host.errors import UserError
from mlbert.host.provenance import package_versions
from mlbert.mlperf.findings import Finding, failed
from mlbert.mlperf.rules import RULESET

STANDARD_OUTPUT = Path("-")


def write_json(target: Path, checked: Mapping[Path, Sequence[Finding]]) -> None:
    """Writes what was found at each path; `STANDARD_OUTPUT` prints it. Raises UserError where it cannot be written."""
    versions = package_versions()
    found = {
        "verdict": "failed" if any(failed(findings) for findings in checked.values()) else "passed",
        "versions": {name: versions.get(name) for name in ("mlbert", "mlperf-logging")} | {"ruleset": RULESET},
        "findings": [{"path": str(path), **row.as_json()} for path, rows in checked.items() for row in rows],
    }
    text = json.dumps(found, indent=2) + "\n"
    if target == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            "file.unwritable", target, f"cannot be written ({error.strerror})", "Name another file"
        ) from error

"""Entry point of every `run_pretraining.py`.

Programs report missing packages before anything imports them.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from mlbert.host.errors import UserError, install_words


def require_packages() -> None:
    """Exit with one line if a package is missing."""
    for package in ("tensorflow", "absl", "mlperf_logging"):
        if find_spec(package) is None:
            error = UserError("package.missing", package, "is not installed", install_words("tf"))
            print(f"mlbert: error: {error.as_line()}", file=sys.stderr)
            sys.exit(error.exit_status)


def main() -> None:
    """Run `tf2_bert.main`; never return."""
    require_packages()
    from tf2_bert.main import main as run

    run()

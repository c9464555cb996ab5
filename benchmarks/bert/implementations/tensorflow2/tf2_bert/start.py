"""Entry point of every `run_pretraining.py`: report missing packages before anything imports them."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from mlbert.host.errors import UserError, install_words


def main() -> None:
    """Run `tf2_bert.main`; never return."""
    for package in ("tensorflow", "absl", "mlperf_logging"):
        if find_spec(package) is None:
            error = UserError("package.missing", package, "is not installed", install_words("tf"))
            print(f"mlbert: error: {error.as_line()}", file=sys.stderr)
            sys.exit(error.exit_status)
    from tf2_bert.main import main as run

    run()

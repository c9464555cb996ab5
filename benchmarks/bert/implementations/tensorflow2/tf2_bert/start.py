"""Entry point of every `run_pretraining.py`: says what is not installed before anything needs it."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Runs `tf2_bert.main`; never returns."""
    for package in ("tensorflow", "absl", "mlperf_logging"):
        if find_spec(package) is None:
            print(f"mlbert: error: {package}: is not installed. Run: pip install 'mlbert[tf]'.", file=sys.stderr)
            sys.exit(2)
    from tf2_bert.main import main as run

    run()

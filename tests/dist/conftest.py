"""Puts this folder on the path: the tests and the ranks they start import the harness and the programs from it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

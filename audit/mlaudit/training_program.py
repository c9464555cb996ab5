"""Run mlbert's training program in a separate process: the auditor imports none of its code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from mlbert.host.errors import Refused

MLBERT = (sys.executable, "-m", "mlbert")


def ask(words: Sequence[str]) -> Any:
    """Return the JSON that a command of mlbert prints, such as ``train --print-settings``.

    Raises:
        Refused: the command refused its input, and has printed why on standard error.
    """
    done = subprocess.run([*MLBERT, *words], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise Refused(done.returncode)
    return json.loads(done.stdout)

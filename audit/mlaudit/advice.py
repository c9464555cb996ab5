"""What an honest explanation of a finding can be, and what would settle it, by check.

A complaint that knows better carries its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

OWN = "own: "


_CODE = "the code of the commit that the logs name, unpacked next to them"
_OUTPUT = "the complete output of the job, of all ranks"
_DESCRIPTION = "the administrator of the machine; its inventory"
# Check -> an honest explanation, and what would settle it.
_ADVICE: Mapping[str, tuple[str, str]] = {
    "lines": ("a rank's output was cut or mixed with another's", _OUTPUT),
    "division": ("a log of a trial was filed with the result", "the job's submission script"),
    "status": ("the run did not converge", "the accuracies of the run up to its end"),
    "order of events": (
        "ranks or an evaluating process write to one log, with clocks apart",
        _OUTPUT,
    ),
    "time stamps": ("the clock was set while the run went on", "the job's times in Slurm"),
    "clock": ("the logger writes another unit, or the clock was wrong", "the job's times"),
    "runs apart": ("the runs used several machines side by side", "the hosts of each job"),
    "speed": ("the machine was shared or throttled in one run", "a profile; the job's times"),
    "evaluation time": ("evaluation is asynchronous or cached", _OUTPUT),
    "same settings": ("one log is from another series", "the scripts of all ten jobs"),
    "plain numbers": ("the logger writes numbers as text", "the line that logs the key"),
    "seeds": ("the seed was logged wrongly or not set", "the command of each run"),
    "series": ("runs were repeated after a failure of the machine", "all logs of the series"),
    "evaluations": ("the last step ends after the evaluation point", "the data's packing"),
    "accuracies": ("the run diverged, or evaluation ran late", "the checkpoint, evaluated"),
    "rules": ("a key was logged with a default that was not used", _CODE),
    "values": ("a key was logged in another unit", "the call that sets the optimizer up"),
    "single lines": ("every rank logs the key", _OUTPUT),
    "code": ("the code was changed after the run", _CODE),
    "call sites": ("the code was changed after the run", _CODE),
    "writer": ("the log was joined from several parts", _OUTPUT),
    "submitter": ("a placeholder was not replaced", "the submitter"),
    "filed under": ("the machine was renamed", "the submitter"),
    "system description": ("a field was forgotten or comes from a spreadsheet", _DESCRIPTION),
    "machine": ("the description is of a sister machine", _DESCRIPTION),
}


class Advice(NamedTuple):
    """How to go on from a finding."""

    honest: str  # explanation without bad intent
    settle: str  # what shows which it is


def advice_of(check: str) -> Advice:
    """Return the advice for a check, empty for official tools, which know only their rule."""
    honest, settle = _ADVICE.get(check.removeprefix(OWN), ("", ""))
    return Advice(honest, settle)

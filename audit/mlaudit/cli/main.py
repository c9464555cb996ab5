"""The ``mlaudit`` command; see `mlbert.host.command_line`."""

from __future__ import annotations

from collections.abc import Sequence

from mlbert.host.command_line import Command, program, run_program
from mlbert.host.registry import Registry

# Also reached as ``mlbert submission COMMAND``.
FOR_SUBMISSIONS = Registry(
    {
        "check": Command(
            "mlaudit.cli.check",
            "Run the official tools and our own checks on a copy of the submission, "
            "by the rules of its round.",
        ),
        "trace": Command(
            "mlaudit.cli.trace",
            "Explain each value in a log and trace it to the code; "
            "exit with 1 if a link is broken.",
        ),
        "diff": Command(
            "mlaudit.cli.diff",
            "Compare two sets of runs: settings, code, system; speed, samples, time to target, "
            "with significance.",
        ),
        "repeat": Command(
            "mlaudit.cli.repeat",
            "Repeat the training in a log; exit with 1 if the results disagree, "
            "2 if it cannot be repeated.",
        ),
        "describe-system": Command(
            "mlaudit.cli.describe_system",
            "Write the description of this machine with the 33 fields that the official checker "
            "requires.",
        ),
        "new-system": Command(
            "mlaudit.cli.new_system",
            "Create a folder for another machine and a template of its description.",
        ),
        "seal": Command(
            "mlaudit.cli.seal",
            "Write SHA256SUMS over a system's logs, run files and description, for sha256sum -c.",
        ),
        "export": Command(
            "mlaudit.cli.export",
            "Export the repository without tests, tools, records, caches and dot files, "
            "and run the repository checker on it.",
        ),
    }
)
COMMANDS = Registry(
    {
        **FOR_SUBMISSIONS,
        "round": Command(
            "mlaudit.cli.round", "Audit every result of a round: one table for all submitters."
        ),
        "report": Command(
            "mlaudit.cli.report", "Report the results of runs, as text or a page with figures."
        ),
        "plan": Command("mlaudit.cli.plan", "Estimate the time, cost and memory of a run."),
    }
)

_root = program(
    "mlaudit",
    COMMANDS,
    summary="Judge MLPerf results: what official tools check, and what they miss.",
    epilog="Run mlaudit COMMAND --help for details. "
    "Exit codes: 0 success, 1 a check failed, 2 wrong input.",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; never returns."""
    run_program("mlaudit", _root, arguments)

"""Run commands of the installed `mlbert`, one after the other in one process, and print what each
did as JSON: its exit status, output and errors. The commands are lists of words, as JSON on the
standard input.
"""

import contextlib
import io
import json
import sys

from mlbert.cli.main import main


def run(words: list[str]) -> tuple[int, str, str]:
    """Run one command; return its exit status, output and errors."""
    out = io.StringIO()
    err = io.StringIO()
    status = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as end:
            status = end.code
    return int(status or 0), out.getvalue(), err.getvalue()


if __name__ == "__main__":
    print(json.dumps([run(words) for words in json.load(sys.stdin)]))

"""The ``mlbert`` command. A user's mistake is one line on stderr and exit code 2; ``--debug`` adds the traceback.

Sub-commands are imported when they are called, so that ``mlbert --help`` needs no torch.
"""

from __future__ import annotations

import errno
import importlib
import sys
import traceback
from collections.abc import Callable, Sequence

from typer import Typer
from typer.core import TyperGroup
from typer.main import get_command

from mlbert.core.errors import UserError
from mlbert.dist.lifecycle import FAILED, INTERRUPTED, SUCCEEDED, WRONG_INPUT

# name -> (module with a Typer `app`, line for the help)
COMMANDS = {
    "prepare": ("mlbert.cli.prepare", "Text to the shards that training reads."),
    "train": ("mlbert.cli.train", "One training run from exports, flags or YAML."),
    "pretrain": ("mlbert.cli.pretrain", "A masked-LM model from your own text, in one command."),
    "finetune": ("mlbert.cli.mosaic_bert.sequence_classification", "Fine-tuning on a task, and predictions of it."),
    "glue": ("mlbert.cli.mosaic_bert.glue", "Fine-tuning on GLUE's tasks side by side, and their scores."),
    "plan": ("mlbert.cli.plan", "Time, cost and memory of a run before it is made."),
    "report": ("mlbert.cli.report", "What runs reached, from their logs; a page with figures."),
    "convert": ("mlbert.cli.convert", "Checkpoints of TensorFlow, NVIDIA, Composer and Hugging Face."),
    "submission": ("mlbert.cli.submission", "Check, describe, extend, seal, export a submission tree."),
    "launch": ("mlbert.cli.launch", "Chains of Slurm jobs, and what the launchers call."),
    "bench": ("mlbert.cli.bench", "Speed as ratios measured in one run."),
}

HELP = """Usage: mlbert [--debug] COMMAND [ARGS]

BERT pre-training as an MLPerf-style benchmark.

Commands (mlbert COMMAND --help says more):
{commands}

--debug prints the traceback of an error. Exit codes: 0 done, 1 a run or check failed, 2 wrong input;
more in docs/how_a_run_ends.md.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; never returns."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [argument for argument in given if argument != "--debug"]
    help_command = " ".join(["mlbert", *given[:1], "--help"])
    sys.exit(exit_code(lambda: _dispatch(given), help_command, debug))


def exit_code(work: Callable[[], int], help_command: str, debug: bool = False) -> int:
    """What a program returns whose ``work`` returns or raises this; mistakes are told in one line."""
    try:
        return work()
    except UserError as error:
        return _tell(str(error), debug)
    except KeyboardInterrupt:
        print("mlbert: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return FAILED
    except PermissionError as error:
        return _tell(f"{error.filename or 'a file'}: {error.strerror}. Check its permissions.", debug)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
            raise
        place = error.filename or "a file"
        return _tell(f"{place}: could not be written ({error.strerror}). Free space or name another folder.", debug)
    except MemoryError:
        return _tell("memory: not enough for this configuration. Lower BATCHSIZE or the model.", debug)
    except Exception as error:
        # Typer's usage errors (an unknown option, a value out of range) have no public base class.
        if not hasattr(error, "format_message"):
            raise
        return _tell(f"{error.format_message().rstrip('.')}. See {help_command}.", debug)


def _tell(text: str, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"mlbert: error: {' '.join(text.split())}", file=sys.stderr)
    return WRONG_INPUT


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        commands = "\n".join(f"  {name:<11} {line}" for name, (_, line) in COMMANDS.items())
        print(HELP.format(commands=commands))
        return SUCCEEDED if arguments else WRONG_INPUT
    if arguments[0] in ("--version", "-V"):
        from mlbert.core.provenance import version

        print(version())
        return SUCCEEDED
    if arguments[0] not in COMMANDS:
        from mlbert.core.config_files import nearest

        guess = nearest(arguments[0], list(COMMANDS))
        hint = f"Did you mean mlbert {guess}? " if guess else ""
        raise UserError(f"mlbert {arguments[0]}", "no such command", f"{hint}See mlbert --help")
    name, words = f"mlbert {arguments[0]}", arguments[1:]
    app = importlib.import_module(COMMANDS[arguments[0]][0]).app
    # `mlbert train` reads its words itself, as flags and k=v.
    command = get_command(app).main if isinstance(app, Typer) else app
    is_bare_group = not words and isinstance(app, Typer) and isinstance(get_command(app), TyperGroup)
    words = ["--help"] if is_bare_group else words
    result = command(words, prog_name=name, standalone_mode=False, help_option_names=["--help", "-h"])
    if is_bare_group:
        return WRONG_INPUT
    if result == INTERRUPTED:  # Typer catches KeyboardInterrupt and returns this
        raise KeyboardInterrupt
    return result if isinstance(result, int) else SUCCEEDED

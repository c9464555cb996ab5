"""The ``mlbert`` command. A user's mistake is one line on stderr and exit code 2; ``--debug`` adds the traceback.

A command's module is imported when the command is called, so that ``mlbert --help`` needs no torch.
"""

from __future__ import annotations

import errno
import importlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer import completion
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from mlbert.distributed.lifecycle import FAILED, INTERRUPTED, SUCCEEDED, WRONG_INPUT
from mlbert.host.errors import UserError

# name -> (module with a Typer `app`, line for the help)
COMMANDS: Mapping[str, tuple[str, str]] = {
    "prepare": ("mlbert.cli.prepare", "Text to the shards that training reads."),
    "train": ("mlbert.cli.train", "One training run from exports, flags or YAML."),
    "mosaic": ("mlbert.cli.mosaic_bert.main", "Masked-LM pre-training on streamed text, from Mosaic's YAML."),
    "pretrain": ("mlbert.cli.pretrain", "A masked-LM model from your own text, in one command."),
    "finetune": ("mlbert.cli.mosaic_bert.sequence_classification", "Fine-tuning on a task, and predictions of it."),
    "glue": ("mlbert.cli.mosaic_bert.glue", "Fine-tuning on GLUE's tasks side by side, and their scores."),
    "plan": ("mlbert.cli.plan", "Time, cost and memory of a run before it is made."),
    "report": ("mlbert.cli.report", "What runs reached, from their logs; a page with figures."),
    "fill-mask": ("mlbert.cli.fill_mask", "What a model would put in the place of [MASK]."),
    "export": ("mlbert.cli.export", "A run or one of its checkpoints as a Hugging Face folder."),
    "convert": ("mlbert.cli.convert", "Checkpoints of TensorFlow, NVIDIA, Composer and Hugging Face."),
    "submission": ("mlbert.cli.submission", "Check, describe, extend, seal, export a submission tree."),
    "launch": ("mlbert.cli.launch", "Chains of Slurm jobs, and what the launchers call."),
    "bench": ("mlbert.cli.bench", "Speed as ratios measured in one run."),
}
_PROGRAM = "mlbert"
_NO_MEMORY = "memory: not enough for this configuration. Lower BATCHSIZE or the model."
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What the system may say of a place that the user named, where nothing below has a better line for it.
_REMEDIES = {
    **dict.fromkeys(_FULL, "Free space, or name another folder"),
    errno.EROFS: "Name another folder",
    errno.EACCES: "Check its permissions",
    errno.EPERM: "Check its permissions",
    errno.ENOENT: "Check the path",
    errno.ENOTDIR: "A part of the path is a file: name another folder",
    errno.EISDIR: "It is a folder: name a file",
    errno.EEXIST: "Name another place",
    errno.ELOOP: "Its links lead in a circle: name another place",
    errno.ENAMETOOLONG: "Name a shorter one",
}
COMPLETION = ("--install-completion", "--show-completion")
SHELLS = ("bash", "zsh", "fish")
HELP_WIDTH = 110  # columns, where the terminal has them


class _Lazy(TyperCommand):
    """A command by its name and line of help, as long as nobody calls it."""

    def __init__(self, name: str, module: str, line: str) -> None:
        super().__init__(name, help=line, short_help=line, rich_markup_mode=None)
        self._module = module

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of the command that the module has; a group alone shows its commands and fails."""
        command = get_command(importlib.import_module(self._module).app)
        for one in command.commands.values() if isinstance(command, TyperGroup) else ():
            one.short_help = (one.help or "").split("\n\n")[0]  # else it is cut at the width of the terminal
        is_bare = isinstance(command, TyperGroup) and not args
        context = command.make_context(info_name, args, parent, **extra)
        if is_bare and not context.resilient_parsing:
            _show_help(context)
        return context


class _Root(TyperGroup):
    """``mlbert``: `COMMANDS`, and the words that stand for options."""

    def __init__(self, **words: Any) -> None:
        super().__init__(**words)
        for name, (module, line) in COMMANDS.items():
            self.add_command(_Lazy(name, module, line))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """``help COMMAND`` is ``COMMAND --help``; a completion option alone is for the shell that calls."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        elif len(args) == 1 and args[0] in COMPLETION:
            args = [*args, _calling_shell()]
        return super().parse_args(ctx, args)


def _calling_shell() -> str:
    import shellingham  # Typer needs it, too

    try:
        return str(shellingham.detect_shell()[0])
    except shellingham.ShellDetectionFailure:
        raise UserError(
            "config.missing", "completion", "is for an unknown shell", f"Name it: {', '.join(SHELLS)}"
        ) from None


def _known_shell(shell: str | None) -> str | None:
    if shell is not None and shell not in SHELLS:
        raise UserError("config.choice", "completion", f"is not made for {shell}", f"Name one of {', '.join(SHELLS)}")
    return shell


_root = typer.Typer(
    cls=_Root,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": HELP_WIDTH},
    epilog="mlbert COMMAND --help says more. Exit codes: 0 done, 1 a run or check failed, 2 wrong input; more in "
    "docs/how_a_run_ends.md.",
)


@_root.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("-V", "--version", help="Show version and commit.")] = False,
    _debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error; at any place.")] = False,
    install: Annotated[
        str | None,
        typer.Option(
            COMPLETION[0], metavar="[SHELL]", help="Install completion for bash, zsh or fish.", callback=_known_shell
        ),
    ] = None,
    show: Annotated[
        str | None, typer.Option(COMPLETION[1], metavar="[SHELL]", help="Print it instead.", callback=_known_shell)
    ] = None,
) -> None:
    """BERT pre-training as an MLPerf-style benchmark."""
    if version:
        from mlbert.host.provenance import version as version_text

        typer.echo(version_text())
    elif install or show:
        if install:
            shell, path = completion.install(install)
            typer.echo(f"{shell} completion installed in {path}; new shells have it")
        else:
            variable = f"_{_PROGRAM.upper()}_COMPLETE"
            typer.echo(completion.get_completion_script(prog_name=_PROGRAM, complete_var=variable, shell=str(show)))
    elif context.invoked_subcommand is None:
        _show_help(context)
    else:
        return
    raise typer.Exit


def _show_help(context: Any) -> NoReturn:
    typer.echo(context.get_help())
    raise typer.Exit(WRONG_INPUT)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; never returns."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    words = [argument for argument in given if argument != "--debug"]
    sys.exit(exit_code(lambda: _run(words), debug=len(words) < len(given)))


def _run(words: list[str]) -> int:
    completion.completion_init()
    result = get_command(_root).main(words, prog_name=_PROGRAM, standalone_mode=False)
    if result == INTERRUPTED:  # Typer catches KeyboardInterrupt and returns this
        raise KeyboardInterrupt
    return result if isinstance(result, int) else SUCCEEDED


def exit_code(work: Callable[[], int], debug: bool = False) -> int:
    """What a program returns whose ``work`` returns or raises this; mistakes are told in one line."""
    try:
        return work()
    except UserError as error:
        _tell(error.as_line(), debug)
        return error.exit_status
    except KeyboardInterrupt:
        print("mlbert: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return FAILED
    except OSError as error:
        if error.errno not in _REMEDIES or (error.filename is None and error.errno not in _FULL):
            raise
        # Of a file that is open the system does not tell the name.
        place = error.filename or "a file that this command writes"
        return _tell(f"{place}: {error.strerror}. {_REMEDIES[error.errno]}.", debug)
    except MemoryError:
        return _tell(_NO_MEMORY, debug)
    except Exception as error:
        # Typer's usage errors (an unknown option, a value out of range) have no public base class.
        if isinstance(error, RuntimeError) and "allocate memory" in str(error):  # torch's MemoryError
            return _tell(_NO_MEMORY, debug)
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        command = _PROGRAM if context is None else context.command_path
        message = error.format_message().rstrip(".")
        return _tell(f"{message}{'' if message.endswith('?') else '.'} See {command} --help.", debug)


def _tell(text: str, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    from mlbert.programs.console import printable  # names of files may hold anything

    print(f"mlbert: error: {printable(' '.join(text.split()))}", file=sys.stderr)
    return WRONG_INPUT

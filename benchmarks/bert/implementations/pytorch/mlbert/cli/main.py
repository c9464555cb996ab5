"""The ``mlbert`` command.

A user error is one line on stderr and exit code 2; ``--debug`` adds the traceback.

Each command's module is imported only when that command runs,
so that ``mlbert --help`` does not need torch.
"""

from __future__ import annotations

import errno
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args

import typer
from typer import completion
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from mlbert.host.errors import UserError
from mlbert.host.exit_statuses import FAILED, INTERRUPTED, SUCCEEDED, WRONG_INPUT
from mlbert.host.machine import wait_passively_if_busy
from mlbert.host.packages import import_beside

# name -> (module with a Typer `app`, help line)
COMMANDS: Mapping[str, tuple[str, str]] = {
    "prepare": ("mlbert.cli.prepare", "Prepare text or data sets for training."),
    "train": ("mlbert.cli.train", "Train once, from exports, flags or YAML."),
    "mosaic": (
        "mosaic_yaml.commands.main_yaml",
        "Pre-train on streamed text, from Mosaic's YAML.",
    ),
    "pretrain": ("mlbert.cli.pretrain", "Pre-train a masked-LM model on your own text."),
    "finetune": (
        "mlbert.cli.finetune",
        "Fine-tune on a task, or predict with the result.",
    ),
    "glue": (
        "mosaic_yaml.commands.glue",
        "Fine-tune on all GLUE tasks in parallel, and score them.",
    ),
    "plan": ("mlbert.cli.plan", "Estimate the time, cost and memory of a run."),
    "report": ("mlbert.cli.report", "Report the results of runs, as text or a page with figures."),
    "fill-mask": ("mlbert.cli.fill_mask", "Predict the words behind [MASK]."),
    "export": ("mlbert.cli.export", "Export a run or checkpoint to a Hugging Face folder."),
    "convert": (
        "mlbert.cli.convert",
        "Convert TensorFlow, NVIDIA, Composer, Hugging Face checkpoints.",
    ),
    "submission": (
        "mlbert.cli.submission",
        "Check, describe, extend, seal, export a submission tree.",
    ),
    "launch": ("mlbert.cli.launch", "Submit job chains, start ranks, and run launcher helpers."),
    "bench": ("mlbert.cli.bench", "Compare speeds as ratios measured in one run."),
}
_COMPUTING = ("train", "mosaic", "pretrain", "finetune", "glue", "bench")
_SHOULD_BE = "Input should be "  # how pydantic begins its sentences
_WANTED = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
}
_PROGRAM = "mlbert"
_NO_MEMORY = "memory: not enough for this configuration. Use a smaller batch or model."
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Advice for the system's errors about a path that the user named,
# if no lower layer gave better advice.
_REMEDIES = {
    **dict.fromkeys(_FULL, "Free space, or name another folder"),
    errno.EROFS: "Name another folder",
    errno.EACCES: "Check its permissions",
    errno.EPERM: "Check its permissions",
    errno.ENOENT: "Check the path",
    errno.ENOTDIR: "A part of the path is a file: name another folder",
    errno.EISDIR: "It is a folder: name a file",
    errno.EEXIST: "Name another place",
    errno.EINVAL: "Name a plain file",
    errno.ELOOP: "Its links form a loop: name another place",
    errno.ENAMETOOLONG: "Name a shorter one",
}
COMPLETION = ("--install-completion", "--show-completion")
Shell = Literal["bash", "zsh", "fish"]
HELP_WIDTH = 110  # columns, if the terminal is that wide


class _Lazy(TyperCommand):
    """A command known by its name and help line only, until it is called."""

    def __init__(self, name: str, module: str, line: str) -> None:
        super().__init__(name, help=line, short_help=line, rich_markup_mode=None)
        self._module = module

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Load the command and return its context;
        a group without a subcommand prints its help and fails.
        """
        if self.name in _COMPUTING:
            wait_passively_if_busy()
        command = get_command(import_beside(self._module).app)
        _check_texts(command)
        if isinstance(command, TyperGroup):
            for subcommand in command.commands.values():
                first_paragraph, *_ = (subcommand.help or "").split("\n\n")
                subcommand.short_help = first_paragraph  # Typer would cut it to fit
        is_bare = isinstance(command, TyperGroup) and not args
        context = command.make_context(info_name, args, parent, **extra)
        if is_bare and not context.resilient_parsing:
            _show_help(context)
        return context


def _check_texts(command: Any) -> None:
    """Let a command and its subcommands refuse texts that Typer reads as something else:
    `mlbert.config.section` says which numbers, and an empty path is the current folder.
    """
    if isinstance(command, TyperGroup):
        for inner in command.commands.values():
            _check_texts(inner)
    for parameter in command.params:
        parameter.process_value = partial(_process_value, parameter, parameter.process_value)


def _process_value(
    parameter: Any, convert: Callable[[Any, Any], Any], context: Any, given: Any
) -> Any:
    from mlbert.config.section import is_number  # imports pydantic, which --help does not need

    try:
        found = convert(context, given)
    except Exception as error:
        _use_plain_words(error, given)
        raise
    texts, values = (one if isinstance(one, list | tuple) else [one] for one in (given, found))
    for text, value in zip(texts, values, strict=False):
        if isinstance(value, Path) and text == "":
            problem = "is an empty path"
            remedy = "Name a file or folder; . is the current one"
        elif isinstance(text, str) and type(value) in (int, float) and not is_number(text):
            problem = f"{text!r} is not a number"
            remedy = "Write it with the digits 0 to 9"
        else:
            continue
        name = next(
            (option for option in parameter.opts if option.startswith("--")), parameter.name.upper()
        )
        raise UserError("config.value", name, problem, remedy)
    return found


def _use_plain_words(error: Any, given: Any) -> None:
    """Rewrite the message of an error if it is one of Typer's usage errors,
    which have no public base class.
    """
    message = getattr(error, "message", None)
    if isinstance(message, str):
        error.message = _plain_words(message, given)


def _plain_words(message: str, given: Any) -> str:
    """Rewrite what pydantic, with which Typer converts values,
    says about the text of an option or argument.
    """
    message = message.removeprefix("Value error, ")
    if not message.startswith(_SHOULD_BE):
        return message
    wanted, _, _ = message.removeprefix(_SHOULD_BE).partition(", unable to parse")
    for words, plain in _WANTED.items():
        wanted = wanted.replace(words, plain)
    shown = "" if isinstance(given, list | tuple) else f"{given!r} is wrong, "
    return f"{shown}it must be {wanted}"


class _Root(TyperGroup):
    """The root command: `COMMANDS`, plus words that stand for options."""

    def __init__(self, **words: Any) -> None:
        super().__init__(**words)
        for name, (module, line) in COMMANDS.items():
            self.add_command(_Lazy(name, module, line))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Treat ``help COMMAND`` as ``COMMAND --help``;
        let a bare completion option mean the calling shell.
        """
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        elif len(args) == 1 and args[0] in COMPLETION:
            args = [*args, _calling_shell()]
        return super().parse_args(ctx, args)


def _calling_shell() -> str:
    import shellingham  # a dependency of Typer

    try:
        return str(shellingham.detect_shell()[0])
    except shellingham.ShellDetectionFailure:
        remedy = f"Name it: {', '.join(get_args(Shell))}"
        raise UserError("config.missing", "completion", "cannot detect the shell", remedy) from None


_root = typer.Typer(
    cls=_Root,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": HELP_WIDTH},
    epilog=(
        "Run mlbert COMMAND --help for details. "
        "Exit codes: 0 success, 1 a run or check failed, 2 wrong input; "
        "see docs/how_a_run_ends.md."
    ),
)


@_root.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("-V", "--version", help="Show version and commit.")
    ] = False,
    _debug: Annotated[
        bool, typer.Option("--debug", help="Print the traceback of an error; allowed anywhere.")
    ] = False,
    install: Annotated[
        Shell | None,
        typer.Option(
            COMPLETION[0], metavar="[SHELL]", help="Install completion for bash, zsh or fish."
        ),
    ] = None,
    show: Annotated[
        Shell | None,
        typer.Option(COMPLETION[1], metavar="[SHELL]", help="Print the completion script instead."),
    ] = None,
) -> None:
    """BERT pre-training as an MLPerf-style benchmark."""
    if version:
        from mlbert.host.provenance import version as version_text

        typer.echo(version_text())
    elif install or show:
        if install:
            shell, path = completion.install(install)
            typer.echo(f"{shell} completion installed in {path}; open a new shell to use it")
        else:
            variable = f"_{_PROGRAM.upper()}_COMPLETE"
            typer.echo(
                completion.get_completion_script(
                    prog_name=_PROGRAM, complete_var=variable, shell=str(show)
                )
            )
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
    # Harmless: a thread of torch's that has not used the GPU yet prints it in the first backward
    # pass.
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
    sys.exit(exit_code(lambda: _run(words), debug=len(words) < len(given)))


def _run(words: list[str]) -> int:
    completion.completion_init()
    result = get_command(_root).main(words, prog_name=_PROGRAM, standalone_mode=False)
    if result == INTERRUPTED:  # Typer catches KeyboardInterrupt and returns this
        raise KeyboardInterrupt
    return result if isinstance(result, int) else SUCCEEDED


def exit_code(work: Callable[[], int], debug: bool = False) -> int:
    """Run ``work`` and return the exit code for its result or exception;
    print errors as one line.
    """
    try:
        return work()
    except UserError as error:
        _print_error(error.as_line(), debug)
        return error.exit_status
    except KeyboardInterrupt:
        print("mlbert: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return FAILED
    except OSError as error:
        if error.errno not in _REMEDIES or (error.filename is None and error.errno not in _FULL):
            raise
        # The system does not report the name of a file that is already open.
        place = error.filename or "a file that this command writes"
        return _print_error(f"{place}: {error.strerror}. {_REMEDIES[error.errno]}.", debug)
    except MemoryError:
        return _print_error(_NO_MEMORY, debug)
    except Exception as error:
        # Typer's usage errors (an unknown option, a value out of range) have no public base class.
        if isinstance(error, RuntimeError) and "allocate memory" in str(
            error
        ):  # torch's MemoryError
            return _print_error(_NO_MEMORY, debug)
        if isinstance(error, RuntimeError) and str(error).startswith(
            "Symlink loop"
        ):  # Path.resolve before Python 3.13
            return _print_error(f"{error}. {_REMEDIES[errno.ELOOP]}.", debug)
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        command = _PROGRAM if context is None else context.command_path
        message = error.format_message().rstrip(".")
        return _print_error(
            f"{message}{'' if message.endswith('?') else '.'} See {command} --help.", debug
        )


def _print_error(text: str, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    from mlbert.programs.console import printable  # file names may contain control characters

    print(f"mlbert: error: {printable(' '.join(text.split()))}", file=sys.stderr)
    return WRONG_INPUT

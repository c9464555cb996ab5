"""Commands that are imported when they run, and errors in one line:
what the programs mlbert and mlaudit share.

A user error is one line on standard error and exit code 2; ``--debug`` adds the traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args

import typer
from typer import completion
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from mlbert.host.environment import environment
from mlbert.host.errors import Refused, UserError, install_words
from mlbert.host.exit_statuses import FAILED, INTERRUPTED, SUCCEEDED, WRONG_INPUT
from mlbert.host.first_report import is_first_rank, is_one_of_many, reporting_once
from mlbert.host.packages import import_sibling
from mlbert.host.registry import Choice, Registry
from mlbert.host.repository import repository

COMPLETION = ("--install-completion", "--show-completion")
Shell = Literal["bash", "zsh", "fish"]
HELP_WIDTH = 110  # columns, if the terminal is that wide
_SHOULD_BE = "Input should be "  # how pydantic begins its sentences
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
_NO_VALUE = "does not take a value"  # what Typer says of --debug=1
# How Typer begins its messages about a value that is not a choice, a command that does not exist,
# and one word too many.
_CHOICE = re.compile(r"('[^']*') is not one of")
_NO_COMMAND = re.compile(r"No such command '([^']*)'")
_EXTRA = re.compile(r"Got unexpected extra argument(?:s|\(s\))? \((.*)\)")
_QUOTED = re.compile(r"'([^']*)'")
_CODE = re.compile(r"\[([a-z]+\.[a-z-]+)\]$")  # at the end of an error's line
# Where error codes are explained, in the repository: on the site if it was built.
_ERROR_PAGES = ("site/errors.html", "docs/errors.md")
_LONG = 1e10  # help writes such numbers with an exponent
# What help shows for values of these types.
_KINDS: Mapping[Any, str] = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}
_program = "mlbert"  # the one that runs, for its messages


@dataclass(frozen=True)
class Command(Choice):
    """A command that is imported when it is called. Its place is a module with a Typer ``app``.

    Attributes:
        help: its line in the list of commands.
    """

    help: str

    def load(self) -> Any:
        """Import the module, of this or a sibling package, and return its ``app``."""
        return import_sibling(self.place).app


class LazyCommand(TyperCommand):
    """A command known by its name and help line only, until it is called."""

    def __init__(self, name: str, command: Command) -> None:
        super().__init__(name, help=command.help, short_help=command.help, rich_markup_mode=None)
        self._command = command

    def load(self) -> Any:
        """Return the command itself."""
        return get_command(self._command.load())

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Load the command and return its context;
        a group without a subcommand prints its help and fails.
        """
        with _interruptible():
            command = self.load()
        command.invoke = partial(_invoke, command.invoke)
        _adapt(command)
        if isinstance(command, TyperGroup):
            for subcommand in command.commands.values():
                first_paragraph, *_ = (subcommand.help or "").split("\n\n")
                subcommand.short_help = first_paragraph  # Typer would cut it to fit
        is_bare = isinstance(command, TyperGroup) and not args
        context = command.make_context(info_name, args, parent, **extra)
        if is_bare and not context.resilient_parsing:
            _show_help(context)
        return context


class _Interrupted(BaseException):
    """A KeyboardInterrupt, for which Typer would return a status that a command may return, too."""


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        raise _Interrupted from error


def _invoke(invoke: Callable[[Any], Any], context: Any) -> Any:
    with _interruptible():
        return invoke(context)


def lazy_group(commands: Registry[Command]) -> type[TyperGroup]:
    """Return the class of a group with these commands, by name; ``help COMMAND`` is
    ``COMMAND --help``, and a bare completion option means the calling shell.
    """

    class _Group(TyperGroup):
        def __init__(self, **words: Any) -> None:
            super().__init__(**words)
            for name, command in commands.items():
                self.add_command(LazyCommand(name, command))

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            """See `lazy_group`."""
            if args[:1] == ["help"]:
                args = [*args[1:], "--help"]
            elif len(args) == 1 and args[0] in COMPLETION:
                args = [*args, _calling_shell()]
            return super().parse_args(ctx, args)

    return _Group


def program(name: str, commands: Registry[Command], summary: str, epilog: str) -> typer.Typer:
    """Return the root command of a program.

    Args:
        name: of the program, as its users type it.
        commands: by name.
        summary: what the program is, for its help.
        epilog: the last lines of its help.
    """
    root = typer.Typer(
        cls=lazy_group(commands),
        add_completion=False,
        rich_markup_mode=None,
        context_settings={
            "help_option_names": ["-h", "--help"],
            "max_content_width": HELP_WIDTH,
            "token_normalize_func": _with_dashes,
        },
        epilog=epilog,
    )

    @root.callback(invoke_without_command=True, help=summary)
    def options(
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
            typer.Option(
                COMPLETION[1], metavar="[SHELL]", help="Print the completion script instead."
            ),
        ] = None,
    ) -> None:
        if version:
            from mlbert.host.provenance import version as version_text

            typer.echo(version_text(name))
        elif install or show:
            _complete(name, install, show)
        elif context.invoked_subcommand is None:
            _show_help(context)
        else:
            return
        raise typer.Exit

    return root


def _with_dashes(name: str) -> str:
    """Return the one spelling of a command's or option's name: ``dry_run`` is ``dry-run``."""
    return name.replace("_", "-")


def _complete(name: str, install: Shell | None, show: Shell | None) -> None:
    if install:
        shell, path = completion.install(install)
        typer.echo(f"{shell} completion installed in {path}; open a new shell to use it")
        return
    variable = f"_{name.upper()}_COMPLETE"
    script = completion.get_completion_script(
        prog_name=name, complete_var=variable, shell=str(show)
    )
    typer.echo(script)


def run_program(name: str, root: typer.Typer, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a program from `program` with arguments, by default this process's,
    and exit with its status.
    """
    global _program
    _program = name
    given = list(sys.argv[1:] if arguments is None else arguments)
    words = [argument for argument in given if argument != "--debug"]
    sys.exit(exit_code(lambda: _run(name, root, words), debug=len(words) < len(given)))


def _run(name: str, root: typer.Typer, words: list[str]) -> int:
    completion.completion_init()
    result = get_command(root).main(words, prog_name=name, standalone_mode=False)
    return result if isinstance(result, int) else SUCCEEDED


def _adapt(command: Any) -> None:
    """Change what Typer shows and accepts for the parameters of a command and its subcommands.

    They refuse texts that Typer reads as something else: `is_number` says which are numbers, and
    an empty path is the current folder. Help names kinds of values in words, not Python's types.
    """
    if isinstance(command, TyperGroup):
        for inner in command.commands.values():
            _adapt(inner)
    for parameter in command.params:
        parameter.process_value = partial(_process_value, parameter, parameter.process_value)
        parameter.display_type_rich = partial(_kind_of_value, parameter)
        parameter._get_number_range_help_str = partial(_range_in_words, parameter)
        if parameter.param_type_name == "argument":
            parameter.metavar = parameter.metavar or parameter.name.upper()
            parameter._usage_display_name = partial(_usage_of_argument, parameter)


def _kind_of_value(parameter: Any, ctx: Any) -> str:
    """Return what help shows behind the name of an option, such as N; nothing behind an argument's,
    unless it is one of some words.
    """
    is_argument = parameter.param_type_name == "argument"
    if parameter.metavar is not None and not is_argument:
        return str(parameter.metavar)
    kind = parameter.type_descriptor
    if kind.is_choice:
        return str(parameter.display_type(ctx)).strip("<>")
    if is_argument:
        return ""
    inner = get_args(kind.annotation)[0] if kind.is_list else kind.annotation
    return _KINDS.get(inner, "VALUE")


def _range_in_words(parameter: Any) -> str | None:
    """Return the legal numbers of a parameter, such as "16 to 32,768"; None if all are legal."""
    least, most = (
        None if bound is None else _shown_bound(bound) for bound in (parameter.min, parameter.max)
    )
    if least is not None and most is not None:
        return f"{least} to {most}"
    if least is not None:
        return f"at least {least}"
    return None if most is None else f"at most {most}"


def _shown_bound(bound: float) -> str:
    """Return 32768 as "32,768" and 1e14 as "1e14"."""
    if bound != int(bound) or abs(bound) >= _LONG:
        return f"{bound:g}".replace("+", "")
    return f"{int(bound):,}"


def _usage_of_argument(parameter: Any) -> str:
    """Return an argument in the usage line: brackets mark one that may be missing."""
    name = parameter.display_name_raw
    shown = name if parameter.required else f"[{name}]"
    return f"{shown}..." if parameter.nargs != 1 else shown


def _process_value(
    parameter: Any, convert: Callable[[Any, Any], Any], context: Any, given: Any
) -> Any:
    from mlbert.host.texts import is_number

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
        raise UserError("config.value", name_on_command_line(parameter), problem, remedy)
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
    from mlbert.host.texts import plain_words

    wanted, _, _ = message.removeprefix(_SHOULD_BE).partition(", unable to parse")
    wanted = plain_words(wanted)
    shown = "" if isinstance(given, list | tuple) else f"{given!r} is wrong, "
    return f"{shown}it must be {wanted}"


def _calling_shell() -> str:
    import shellingham  # a dependency of Typer

    try:
        return str(shellingham.detect_shell()[0])
    except shellingham.ShellDetectionFailure:
        remedy = f"Name it: {', '.join(get_args(Shell))}"
        raise UserError("config.missing", "completion", "cannot detect the shell", remedy) from None


def _show_help(context: Any) -> NoReturn:
    typer.echo(context.get_help())
    raise typer.Exit(WRONG_INPUT)


def exit_code(work: Callable[[], int], debug: bool = False) -> int:
    """Run ``work`` and return the exit code for its result or exception;
    print errors as one line.
    """
    try:
        return work()
    except UserError as error:
        if error.is_agreed:
            _print_line(error.as_line(), debug)
        else:
            _print_error(error.as_line(), debug)
        return error.exit_status
    except Refused as error:
        return error.exit_status
    except (KeyboardInterrupt, _Interrupted):
        if is_first_rank():
            print(f"{_program}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return FAILED
    except OSError as error:
        if error.errno not in _REMEDIES or (error.filename is None and error.errno not in _FULL):
            return _report_defect(error)
        # The system does not report the name of a file that is already open.
        place = error.filename or "a file that this command writes"
        return _print_error(f"{place}: {error.strerror}. {_REMEDIES[error.errno]}.", debug)
    except MemoryError:
        return _print_error(_NO_MEMORY, debug)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            return _report_broken_package(error, debug)
        missing = UserError("package.missing", "torch", "is not installed", install_words("train"))
        _print_error(missing.as_line(), debug)
        return missing.exit_status
    except Exception as error:
        message_of_runtime = str(error) if isinstance(error, RuntimeError) else ""
        if "allocate memory" in message_of_runtime:  # torch's MemoryError
            return _print_error(_NO_MEMORY, debug)
        if message_of_runtime.startswith("Symlink loop"):  # Path.resolve before Python 3.13
            return _print_error(f"{error}. {_REMEDIES[errno.ELOOP]}.", debug)
        # Typer's usage errors (an unknown option, a value out of range) have no public base class.
        if not hasattr(error, "format_message"):
            return _report_broken_package(error, debug)
        return _print_error(_usage_error(error).as_line(), debug)


def _usage_error(error: Any) -> UserError:
    """Return one of Typer's usage errors in the form and words of ours."""
    context = getattr(error, "ctx", None)
    command = _program if context is None else context.command_path
    remedy = f"See {command} --help"
    message = error.message.rstrip(".")
    parameter = getattr(error, "param", None)
    if parameter is not None:
        name = name_on_command_line(parameter)
        if not message:
            return UserError("config.missing", name, "is missing", remedy)
        if (choice := _CHOICE.match(message)) is not None:
            choices = _QUOTED.findall(message[choice.end() :])
            return UserError("config.choice", name, f"{choice[1]} is not a choice", "", choices)
        return UserError("config.value", name, message, remedy)
    option = getattr(error, "option_name", None)
    if option is not None and "possibilities" in vars(error):
        names = error.possibilities or []
        return _unknown(option, "option", names, remedy)
    if option is not None and _NO_VALUE in message:
        return UserError("config.syntax", option, "takes no value", f"Write {option} alone")
    if option is not None:
        return UserError("config.syntax", option, "has no value", f"Write {option} VALUE")
    if (unknown := _NO_COMMAND.match(message)) is not None:
        names = _QUOTED.findall(message[unknown.end() :])
        return _unknown(unknown[1], "command", names, remedy)
    if (extra := _EXTRA.match(message)) is not None:
        return UserError("config.syntax", extra[1], "is one argument too many", remedy)
    return UserError("config.syntax", command, message, remedy)


def _unknown(name: str, kind: str, near: Sequence[str], remedy: str) -> UserError:
    if near:
        remedy = f"Did you mean {' or '.join(near)}?"
    return UserError("config.unknown-name", name, f"is an unknown {kind}", remedy)


def name_on_command_line(parameter: Any) -> str:
    """Return an option as ``--name``, an argument as help shows it."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    return str(next((name for name in parameter.opts if name.startswith("--")), parameter.opts[0]))


def _report_broken_package(error: Exception, debug: bool) -> int:
    """Report an error of a package that PYTHONPATH names: it replaces the one that is installed.
    Any other error is a defect of this program.
    """
    folder = _folder_of_search_path(error)
    if folder is None:
        return _report_defect(error)
    problem = f"a package in this folder of PYTHONPATH fails: {type(error).__name__}: {error}"
    remedy = "Run the command again after: unset PYTHONPATH"
    broken = UserError("package.broken", folder, problem, remedy)
    _print_error(broken.as_line(), debug)
    return broken.exit_status


def _folder_of_search_path(error: Exception) -> Path | None:
    """Return the folder of PYTHONPATH with the code that raised an error, or with the module that
    lacks a name; None if it is elsewhere, or in the repository of this program.
    """
    frames = traceback.extract_tb(error.__traceback__)
    # `path` is an ImportError's, `filename` a SyntaxError's, `obj` an AttributeError's.
    module = getattr(error, "obj", None)
    files = [
        getattr(error, "path", None),
        getattr(error, "filename", None),
        getattr(module, "__file__", None),
    ]
    files += [frame.filename for frame in frames[-1:]]
    own = repository()
    for entry in filter(None, environment().get("PYTHONPATH", "").split(os.pathsep)):
        folder = Path(entry).resolve()
        if own is not None and folder.is_relative_to(own):
            continue
        if any(Path(file).resolve().is_relative_to(folder) for file in files if file):
            return folder
    return None


def _report_defect(error: BaseException) -> int:
    """Raise an error of this program again. Of several ranks that have it, the first one prints it,
    and all return FAILED.
    """
    if not is_one_of_many():
        raise error
    with reporting_once(FAILED) as is_first:
        if is_first:
            traceback.print_exception(error)
    return FAILED


def _print_error(text: str, debug: bool) -> int:
    with reporting_once(WRONG_INPUT) as is_first:
        if is_first:
            _print_line(text, debug)
    return WRONG_INPUT


def _print_line(text: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    from mlbert.host.console import printable  # file names may contain control characters

    line = printable(" ".join(text.split()))
    if sys.stderr.isatty():
        line = _with_link(line)
    print(f"{_program}: error: {line}", file=sys.stderr, flush=True)


def _with_link(line: str) -> str:
    """Return a line whose code, in brackets at its end, is a link to the code's explanation.
    Terminals without links show the code alone.
    """
    code = _CODE.search(line)
    root = repository()
    if code is None or root is None or environment().get("TERM") == "dumb":
        return line
    page = next((root / path for path in _ERROR_PAGES if (root / path).is_file()), None)
    if page is None:
        return line
    address = f"{page.as_uri()}#{code[1].replace('.', '')}"
    begin = f"\x1b]8;;{address}\x1b\\"
    end = "\x1b]8;;\x1b\\"
    return f"{line[: code.start()]}[{begin}{code[1]}{end}]"

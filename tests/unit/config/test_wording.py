"""No message about a wrong value is in the words of pydantic, Python, or a YAML or JSON parser,
in any front end.
"""

import inspect
import itertools
import re
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from mlbert.cli.main import COMMANDS
from mlbert.config.arguments import CommandLine
from mlbert.host.command_line import LazyCommand
from mlbert.host.errors import UserError
from mlbert.recipes.sections import SECTIONS, resolve, settings_by_key
from mosaic_texts import BASE, make_texts
from mosaic_yaml import finetuning_yaml, pretraining_yaml
from mosaic_yaml.commands.main_yaml import resolve_layer
from mosaic_yaml.nested_yaml import Leaves, read_nested
from simple_recipe import FOLDERS, simple_recipe

FOREIGN = re.compile(
    r"Input should|Value error|validation error|could not convert|invalid literal|unsupported "
    r"operand|"
    r"object is not|has no attribute|not supported between|[A-Z]\w*Error\b|\[Errno|codec "
    r"can't|NoneType|"
    r"Traceback|unable to parse|<class|instance of|indices must|argument must|argument of type|"
    r"Expecting|Extra data|while parsing|while scanning|could not determine|not iterable|must be "
    r"real"
)
WRONG = ("onnx", "-1", "1e999", "\ud800")
WRONG_TYPES = (None, True, float("nan"), [1], {"a": 1})
WRONG_YAML = ("onnx", "-1.5", "[onnx, -1]", "{a: 1}")


def check(message: str) -> None:
    assert not FOREIGN.search(message), message
    assert "\n" not in message


def test_any_setting_in_any_source(tmp_path: Path) -> None:
    recipe = simple_recipe(sections=SECTIONS, tokenizer="t", masking_rate=0.1)
    path = tmp_path / "settings.yaml"
    for key, setting in settings_by_key().items():
        path.write_text(f"{key}: [1]\n")
        environ = FOLDERS | {setting.env: WRONG[0]}
        flags = CommandLine({key: WRONG[1]})
        words = CommandLine(overrides=[f"{key}={WRONG[2]}"])
        given: list[Callable[[], object]] = [
            lambda environ=environ: resolve(recipe, environ),
            lambda flags=flags: resolve(recipe, FOLDERS, flags),
            lambda words=words: resolve(recipe, FOLDERS, words),
            lambda: resolve(recipe, FOLDERS, CommandLine(yaml_files=[path])),
        ]
        for value in (WRONG[3], *WRONG_TYPES):
            layer = {key: (value, "test")}
            given.append(lambda layer=layer: resolve(recipe, FOLDERS, given=layer))
        for source in given:
            try:
                source()
            except UserError as error:
                check(str(error))


def names_of(known: typing.Iterable[str]) -> list[str]:
    """Return concrete names for the patterns of a YAML's names."""
    every = {name.replace("**", "x").replace("*", "x") for name in known}
    return sorted(
        name for name in every if not name.startswith("callbacks.") and "remote" not in name
    )


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, tree_root: Path) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    make_texts(folder, tree_root)
    rows = "".join(f"{word} two,{number % 2}\n" for number, word in enumerate(("one", "two") * 20))
    (folder / "rows.csv").write_text(f"text,label\n{rows}")
    (folder / "task.yaml").write_text(
        "tokenizer_name: vocab.txt\nmax_seq_len: 16\nglobal_train_batch_size: 8\nmax_duration: "
        "2ba\n"
        "model: {name: mosaic_bert, pretrained_model_name: prajjwal1/bert-tiny}\n"
        "optimizer: {lr: 1.0e-4}\ndata: {train: rows.csv, eval: rows.csv}\n"
    )
    return folder


def test_any_name_of_main_yaml(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(texts)
    for name, value in zip(names_of(pretraining_yaml.KNOWN), itertools.cycle(WRONG_YAML)):
        try:
            path = Path("main.yaml")
            leaves = Leaves(
                path, read_nested(path, [*BASE, f"{name}={value}"], pretraining_yaml.KNOWN)
            )
            layer = pretraining_yaml.to_settings(leaves, 1, False, lambda *given: 100)
            resolve_layer(path, layer)
        except UserError as error:
            check(str(error))


def test_any_name_of_a_finetuning_yaml(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(texts)
    for name, value in zip(names_of(finetuning_yaml.KNOWN), itertools.cycle(WRONG_YAML)):
        try:
            path = Path("task.yaml")
            leaves = Leaves(path, read_nested(path, [f"{name}={value}"], finetuning_yaml.KNOWN))
            resolve_layer(path, finetuning_yaml.to_settings(leaves, 1, False))
        except UserError as error:
            check(str(error))


def typed_options() -> Iterator[tuple[str, ...]]:
    """Yield the words of each command with one of its options that takes a number or a choice,
    and a wrong value.
    """
    for name, command in COMMANDS.items():
        made = get_command(command.load())
        for words, command in [
            ([name], made),
            *(([name, sub], loaded(one)) for sub, one in getattr(made, "commands", {}).items()),
        ]:
            if command.callback is None or name == "train":
                continue
            parameters = inspect.signature(
                inspect.unwrap(command.callback), eval_str=True
            ).parameters
            for option in command.params:
                kind = parameters[option.name].annotation if option.name in parameters else str
                flags = [flag for flag in option.opts if flag.startswith("--")]
                if flags and takes_number_or_choice(kind):
                    yield (*words, flags[0], "onnx")


def loaded(command: object) -> object:
    return command.load() if isinstance(command, LazyCommand) else command


def takes_number_or_choice(kind: object) -> bool:
    if typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) in (types.UnionType, typing.Union, list):
        return any(takes_number_or_choice(one) for one in typing.get_args(kind))
    return kind in (int, float) or typing.get_origin(kind) is typing.Literal


def test_there_are_options_of_most_commands() -> None:
    assert len({words[0] for words in typed_options()}) > 5


@pytest.mark.parametrize("words", list(typed_options()), ids=" ".join)
def test_any_option_of_a_command(words: tuple[str, ...], run_mlbert) -> None:
    status, _, error = run_mlbert(*words)
    assert status == 2
    check(error.strip())
    assert "onnx" in error or "issing" in error

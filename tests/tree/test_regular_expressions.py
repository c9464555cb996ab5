"""Regular expressions, and functions that scan text, need time linear in the length of their input.

Each pattern in the packages is tried on long texts of the pattern's characters that do not match
at their end. The time of a quadratic search grows sixteenfold if the text is four times as long.
"""

import ast
import itertools
import re
import re._constants as codes
import re._parser as parser
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mlbert.config.sources import Export
from mlbert.data.prepare.sentences import split_sentences
from mlbert.host.errors import hide_credentials
from mlbert.host.texts import is_number

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "benchmarks/bert/implementations/pytorch/mlbert",
    "benchmarks/bert/implementations/tensorflow2/tf2_bert",
    "benchmarks/mosaic_bert/mosaic_yaml",
)
LENGTH = 1000
FACTOR = 4
MOST_GROWTH = 9.0  # of the time, if the text is FACTOR times as long: 4 is linear, 16 quadratic
METHODS = "search|sub|subn|findall|finditer|match|fullmatch"
ATTEMPTS = 3  # a growth that one of them does not show is another program's doing
SLOW = 30.0  # times the duration of a plain search, from which the growth is measured

# Files with quadratic patterns whose input is short, and what that is.
BOUNDED = {
    "tf2_bert/messages.py": "an error message of TensorFlow",
    "mlbert/config/sources.py": "a line of a config file",
    "mlbert/data/prepare/prose.py": "Python's documentation",
    "mlbert/data/prepare/sentences.py": "the 64 characters before a full stop",
    "mlbert/data/prepare/python_text.py": "a file of Python's documentation",
    "mlbert/host/native.py": "a line of /proc/self/maps",
    "mlbert/host/machine.py": "a file of /proc",
    "mlbert/host/system_description.py": "the output of dmidecode",
}
# Characters that match a category; attacks are made of them.
CATEGORIES = {
    codes.CATEGORY_DIGIT: "1",
    codes.CATEGORY_SPACE: " \n",
    codes.CATEGORY_WORD: "a1_",
    codes.CATEGORY_NOT_SPACE: "a",
    codes.CATEGORY_NOT_DIGIT: "a",
    codes.CATEGORY_NOT_WORD: "- ",
}


class Pattern(NamedTuple):
    """A pattern in the code, and the methods that use it."""

    file: str
    line: int
    text: str
    flags: int
    methods: frozenset[str]


def patterns() -> Iterator[Pattern]:
    """Yield the patterns that are written as constants."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            code = path.read_text()
            for node in ast.walk(ast.parse(code)):
                text = constant_pattern(node)
                if text is None:
                    continue
                method = node.func.attr
                methods = uses(code, node) if method == "compile" else frozenset({method})
                name = path.relative_to((ROOT / package).parent).as_posix()
                yield Pattern(name, node.lineno, text, flags_of(node), methods)


def constant_pattern(node: ast.AST) -> str | None:
    """Return the pattern of a call of a function of `re`, if it is a constant."""
    if not isinstance(node, ast.Call) or not re.fullmatch(r"re\.\w+", ast.unparse(node.func)):
        return None
    pattern = node.args[0] if node.args else None
    is_text = isinstance(pattern, ast.Constant) and isinstance(pattern.value, str)
    return pattern.value if is_text and node.func.attr != "escape" else None


def uses(code: str, node: ast.Call) -> frozenset[str]:
    """Return the methods called on a compiled pattern in its file;
    without a call by name, all called on anything.
    """
    line = code.splitlines()[node.lineno - 1]
    name = line.partition("=")[0].partition(":")[0].strip()
    owner = rf"\b{name}" if name.isidentifier() else ""
    called = re.findall(rf"{owner}\.({METHODS})\b", code) or re.findall(rf"\.({METHODS})\(", code)
    return frozenset(called) or frozenset({"search", "fullmatch"})


def flags_of(node: ast.Call) -> int:
    flags = 0
    for name in re.findall(r"\bre\.([A-Z]+)\b", ast.unparse(node)):
        flags |= getattr(re, name)
    return flags


def pieces(parsed: Any) -> Iterator[str]:
    """Yield characters and words that a parsed pattern can match."""
    word = ""
    for code, value in parsed:
        if code is codes.LITERAL:
            word += chr(value)
            yield chr(value)
            continue
        if len(word) > 1:
            yield word
        word = ""
        if code is codes.IN:
            for kind, part in value:
                if kind is codes.LITERAL:
                    yield chr(part)
                elif kind is codes.RANGE:
                    yield chr(part[0])
                elif kind is codes.CATEGORY:
                    yield from CATEGORIES[part]
                else:
                    yield "a"
        elif code in (codes.ANY, codes.NOT_LITERAL):
            yield "a"
        elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            yield from pieces(value[2])
        elif code is codes.SUBPATTERN:
            yield from pieces(value[3])
        elif code is codes.BRANCH:
            for branch in value[1]:
                yield from pieces(branch)
        elif code in (codes.ASSERT, codes.ASSERT_NOT):
            yield from pieces(value[1])
    if len(word) > 1:
        yield word


def attacks(pattern: Pattern) -> Iterator[Callable[[int], str]]:
    """Yield makers of texts of a length, by repeating what the pattern can match."""
    found = list(dict.fromkeys(pieces(parser.parse(pattern.text, pattern.flags))))
    letters = [piece for piece in found if len(piece) == 1][:12]
    words = [piece for piece in found if len(piece) > 1][:4]
    pairs = ["".join(pair) for pair in itertools.permutations([*letters[:5], *words[:2]], 2)]
    for begin, unit in itertools.product(
        ["", *words[:2], *letters[:3]], [*letters, *words, *pairs]
    ):
        yield lambda length, begin=begin, unit=unit: begin + unit * (length // len(unit)) + "\x01"


def seconds(call: Callable[[str], object], text: str) -> float:
    began = time.process_time()
    call(text)
    return time.process_time() - began


def growth(call: Callable[[str], object], make: Callable[[int], str], length: int) -> float:
    """Return how many times as long a text takes that is FACTOR times as long."""
    short, long = (
        min(seconds(call, text) for _ in range(3)) for text in (make(length), make(FACTOR * length))
    )
    return long / max(short, 1e-6)


def grows_too_much(call: Callable[[str], object], make: Callable[[int], str], length: int) -> bool:
    return all(growth(call, make, length) > MOST_GROWTH for _ in range(ATTEMPTS))


def calls(pattern: Pattern) -> Iterator[Callable[[str], object]]:
    compiled = re.compile(pattern.text, pattern.flags)
    for method in sorted(pattern.methods):
        function = getattr(compiled, method)
        if method in ("sub", "subn"):
            yield lambda text, function=function: function("", text)
        elif method == "finditer":
            yield lambda text, function=function: list(function(text))
        else:
            yield function


def is_quadratic(pattern: Pattern) -> bool:
    plain = min(seconds(re.compile("b").search, "a" * LENGTH) for _ in range(20))
    for call in calls(pattern):
        for make in attacks(pattern):
            if seconds(call, make(LENGTH)) < SLOW * max(plain, 5e-6):
                continue
            if grows_too_much(call, make, LENGTH):
                return True
    return False


def test_the_time_of_a_pattern_is_linear_in_the_length_of_the_text():
    tried = [pattern for pattern in patterns() if pattern.file not in BOUNDED]
    found = [f"{one.file}:{one.line} {one.text}" for one in tried if is_quadratic(one)]
    assert found == [], "begin a search with a fixed text or a look-behind, not with a repetition"
    assert len(tried) > 50


def test_a_quadratic_pattern_is_found():
    methods = frozenset({"search"})
    assert is_quadratic(Pattern("x.py", 1, r"\w+://", 0, methods))
    # On a busy machine a short measurement can hide it.
    slow = Pattern("x.py", 1, r"a*a*b", 0, frozenset({"fullmatch"}))
    assert any(is_quadratic(slow) for _ in range(ATTEMPTS))
    assert not is_quadratic(Pattern("x.py", 1, r"(?<!\w)\w+://", 0, methods))


@pytest.mark.parametrize(
    ("call", "make"),
    [
        (hide_credentials, lambda length: "a" * length),
        (hide_credentials, lambda length: "?-" * length),
        (is_number, lambda length: "1" * length + "x"),
        (split_sentences, lambda length: "e.g. A " * length),
        (split_sentences, lambda length: "a." * length),
        (Export("${A}b${B}b${C}c", "").gives, lambda length: "b" * length),
    ],
    ids=["letters", "separators", "digits", "abbreviations", "sentences", "export"],
)
def test_the_time_of_a_function_is_linear_in_the_length_of_the_text(call, make):
    assert not grows_too_much(call, make, 5000)

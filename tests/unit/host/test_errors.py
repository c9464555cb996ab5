"""Errors have codes: each is listed once, used somewhere, and survives the way between processes."""

import pickle
import re
from pathlib import Path

import pytest

from mlbert.host.error_codes import ERROR_CODES
from mlbert.host.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("benchmarks/bert/implementations/pytorch/mlbert", "benchmarks/bert/implementations/tensorflow2/tf2_bert")


def test_every_code_is_used():
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path.name != "error_codes.py"]
    code = "".join(path.read_text() for path in files)
    assert [name for name in ERROR_CODES if f'"{name}"' not in code] == []


def test_a_code_is_a_short_name_with_a_sentence_of_help():
    for code, sentence in ERROR_CODES.items():
        assert re.fullmatch(r"[a-z]+\.[a-z-]+", code)
        assert re.fullmatch(r"[A-Z].*\.", sentence)


def test_an_unknown_code_is_an_error_of_ours():
    with pytest.raises(AssertionError, match=r"no\.such-code"):
        UserError("no.such-code", "x", "is wrong")


def test_the_line_of_an_error_and_its_way_through_a_process_pool():
    error = UserError("file.missing", Path("a\nb"), "there is\nno such file.", "Name another.")
    assert error.as_line() == "a b: there is no such file. Name another. [file.missing]"
    again = pickle.loads(pickle.dumps(error))
    assert (again.code, str(again), again.exit_status) == (error.code, str(error), 2)
    assert UserError("file.missing", "x", "is gone").as_line() == "x: is gone. [file.missing]"

"""Errors have codes: each is listed once, used somewhere,
and survives pickling between processes.
"""

import pickle
import re
from pathlib import Path

import pytest

from mlbert.host.error_codes import ERROR_CODES
from mlbert.host.errors import UserError
from mlbert.host.repository import HOMES

ROOT = Path(__file__).resolve().parents[3]


def test_codes_are_short_names_with_a_sentence_of_help_and_all_are_used():
    files = [
        path
        for home in HOMES.values()
        for path in (ROOT / home).rglob("*.py")
        if path.name != "error_codes.py"
    ]
    text = "".join(path.read_text() for path in files)
    assert [code for code in ERROR_CODES if f'"{code}"' not in text] == []
    for code, sentence in ERROR_CODES.items():
        assert re.fullmatch(r"[a-z]+\.[a-z-]+", code)
        assert re.fullmatch(r"[A-Z].*\.", sentence)
    with pytest.raises(AssertionError, match=r"no\.such-code"):
        UserError("no.such-code", "x", "is wrong")


def test_the_line_of_an_error_and_its_way_through_a_process_pool():
    error = UserError("file.missing", Path("a\nb"), "there is\nno such file.", "Name another.")
    assert error.as_line() == "a b: there is no such file. Name another. [file.missing]"
    again = pickle.loads(pickle.dumps(error))
    assert (again.code, str(again), again.exit_status) == (error.code, str(error), 2)
    assert UserError("file.missing", "x", "is gone").as_line() == "x: is gone. [file.missing]"


def test_an_error_about_another_subject_keeps_the_rest():
    error = UserError("config.unknown-name", "OPTIMIZER", "is wrong", "Give one", ("lamb", "adam"))
    again = error.about(Path("config.sh"))
    assert again.as_line() == (
        "config.sh: is wrong. Give one. Choices: lamb, adam. [config.unknown-name]"
    )

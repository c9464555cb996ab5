"""The English that Python carries."""

import ast
import sys
import textwrap
from hashlib import sha256

import pytest

from mlbert.data.prepare import python_text
from programs import run_checked
from user_errors import user_error

pytestmark = pytest.mark.slow

SOURCE = textwrap.dedent('''
    """This module is about boats. It has a short text of its own.

    Building
    ========

    Boats are built from wood and rope.
    """
    import nothing_that_exists

    # The keel comes first because everything
    # else is fastened to it with pegs.

    class Boat:
        """A boat floats on the water."""

        def sail(self):
            """Sail before the wind for a day."""
            raise RuntimeError("the boat has run aground on a sand bank")

        def row(self):
            """Row against the wind for an hour."""
''')


def test_a_module_is_parsed_not_imported():
    documents = list(python_text._from_module(ast.parse(SOURCE), SOURCE.splitlines()))
    assert documents[0] == ["This module is about boats.", "It has a short text of its own."]
    assert documents[1] == ["Boats are built from wood and rope."]
    assert documents[2] == [
        "The keel comes first because everything else is fastened to it with pegs.",
        "A boat floats on the water.",
        "Sail before the wind for a day.",
        "the boat has run aground on a sand bank",
        "Row against the wind for an hour.",
    ]


@pytest.fixture(scope="module")
def documents():
    return list(python_text.documents())


def test_there_is_enough_text(documents):
    sentences = [sentence for document in documents for sentence in document]
    assert len(documents) > 1500
    assert sum(len(sentence.split()) for sentence in sentences) > 300_000
    # Compiled.
    assert "Return the sum of a 'start' value (default: 0) plus an iterable of numbers" in sentences
    assert any("JSON" in sentence for sentence in sentences)
    # Topics.
    assert any(
        "assignment" in sentence.lower() for sentence in documents[0] + documents[1] + documents[2]
    )


def test_another_process_gives_the_same_and_imports_nothing(documents):
    program = """if True:
        import hashlib, sys
        from mlbert.data.prepare import python_text
        before = set(sys.modules)
        digest = hashlib.sha256(repr(list(python_text.documents())).encode()).hexdigest()
        imported = set(sys.modules) - before
        common = ("encodings", "_sysconfigdata")
        print(digest, sorted(name for name in imported if not name.startswith(common)))
    """
    done = run_checked(sys.executable, "-c", program, timeout=200)
    assert (done.stdout.split(maxsplit=1), done.stderr) == (
        [sha256(repr(documents).encode()).hexdigest(), "[]\n"],
        "",
    )


def test_an_installation_without_text_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(python_text.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setattr(python_text, "_from_compiled_modules", lambda: iter(()))
    with user_error("data.too-small", tmp_path):
        list(python_text.documents())

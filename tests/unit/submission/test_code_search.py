"""Looking up who reads a setting, what sets a name, and where a function is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mlbert.core.provenance import PACKAGE_HOME
from mlbert.submission.call_sites import Sources
from mlbert.submission.code_search import CodeSearch
from mlbert.submission.logs import Log

RECIPE = f"{PACKAGE_HOME}/recipes/x.py"
FILES = {
    "recipes/x.py": 'DEFAULTS = {"eps": 1e-6}\n\ndef build(config):\n    numbers = {"eps": config.opt_epsilon}\n'
    "    return make(**numbers, rate=schedule(config.num_steps))\n",
    "core/settings.py": "class C:\n    @property\n    def num_steps(self):\n        return self.max_steps\n",
    "core/plan.py": "def f(config):\n    return config.log_freq\n",
    "train/loop.py": "def loop(run, config):\n    run.state.accuracy = measure()\n    return config.log_freq\n",
    "train/protocols.py": 'class P:\n    def measure(self):\n        """Told elsewhere."""\n',
    "models/m.py": "LIMIT = 3\n\ndef measure():\n    return LIMIT\n",
}


@pytest.fixture
def search(tmp_path: Path) -> CodeSearch:
    for name, text in FILES.items():
        path = tmp_path / PACKAGE_HOME / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return CodeSearch(Sources(tmp_path, Log(Path("x"), ())), RECIPE)


def expressions(text: str) -> list[ast.expr]:
    return [ast.parse(text, mode="eval").body]


def test_readers_in_the_recipe_else_in_the_package(search: CodeSearch) -> None:
    assert [place for place, _ in search.readers("opt_epsilon")] == [f"{RECIPE}:4"]
    assert [place for place, _ in search.readers("max_steps")] == [f"{RECIPE}:5"]  # by the property
    assert [place for place, _ in search.readers("log_freq")] == [f"{PACKAGE_HOME}/train/loop.py:3"]
    assert search.readers("seed") == []


def test_what_a_value_is_set_from(search: CodeSearch) -> None:
    places, names = search.origins(RECIPE, expressions("self.eps"))
    assert places == [(f"{RECIPE}:4", 'numbers = {"eps": config.opt_epsilon}')]  # the default is found by `constants`
    assert names == {"eps", "opt_epsilon"}
    assert search.constants("eps", RECIPE)[0] == (f"{RECIPE}:1", 'DEFAULTS = {"eps": 1e-6}')
    assert search.origins(RECIPE, expressions("rate"))[1] == {"rate", "schedule", "num_steps"}
    assert search.setters("accuracy") == [(f"{PACKAGE_HOME}/train/loop.py:2", "run.state.accuracy = measure()")]


def test_definitions_that_do_something(search: CodeSearch) -> None:
    assert search.definitions("measure") == [(f"{PACKAGE_HOME}/models/m.py:3", "def measure():")]
    assert search.definitions("LIMIT") == [(f"{PACKAGE_HOME}/models/m.py:1", "LIMIT = 3")]
    assert search.definitions("absent") == []

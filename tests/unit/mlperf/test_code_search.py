"""Looking up who reads a setting, what sets a name, and where a function is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mlbert.config.sections import settings_by_key
from mlbert.host.provenance import PACKAGE_HOME
from mlbert.mlperf.call_sites import Sources
from mlbert.mlperf.logs import Log
from mlbert.mlperf.trace import CodeSearch

RECIPE = f"{PACKAGE_HOME}/recipes/x.py"
SHARED = {
    "core/plan.py": "def f(config):\n    return config.log_freq\n",
    "train/protocols.py": 'class P:\n    def measure(self):\n        """Told elsewhere."""\n',
    "models/m.py": "LIMIT = 3\n\ndef measure():\n    return LIMIT\n",
}
# As until c7c9f6d: one class has all settings.
OLD = {
    "recipes/x.py": """DEFAULTS = {"opt_epsilon": 1e-6}

def build(config):
    numbers = {"eps": config.opt_epsilon}
    return make(**numbers, rate=schedule(config.num_steps))
""",
    "recipes/y.py": "def build(config):\n    return config.opt_epsilon, config.log_freq\n",
    "core/settings.py": "class C:\n    @property\n    def num_steps(self):\n        return self.max_steps\n",
    "train/loop.py": "def loop(run, config):\n    run.state.accuracy = measure()\n    return config.log_freq\n",
}
# Sections, and recipes in two files.
NEW = {
    "recipes/x.py": """
RECIPE = Recipe(
    name="x",
    overrides={"MAX_SEQUENCES_PER_PACK": 3},
    not_read=frozenset({"OPT_EPSILON"}),
)
""",
    "recipes/x_build.py": """
def build(config):
    data, optimizer = config[DataConfig], config[OptimizerConfig]
    return make(eps=optimizer.epsilon, rate=schedule(config[ScheduleConfig].num_steps), packs=data.epsilon)

def other(optimizer):
    return optimizer.epsilon
""",
    "recipes/y_build.py": "def build(config):\n    return config[OptimizerConfig].epsilon\n",
    "optim/config.py": """
class OptimizerConfig(Section):
    epsilon: float = setting(
        "OPT_EPSILON",
        default=1e-6,
    )

class ScheduleConfig(Section):
    max_steps: int = setting("MAX_STEPS")

    @property
    def num_steps(self):
        return self.max_steps
""",
    "optim/methods.py": """
def make(config: OptimizerConfig | None, run: OtherConfig):
    return config.epsilon + run.log_freq
""",
    "config/contradictions.py": "def check(run: RunConfig):\n    return run.log_freq\n",
    "train/loop.py": "def loop(run, how: RunConfig):\n    run.state.accuracy = measure()\n    return how.log_freq\n",
}


def search_in(folder: Path, files: dict[str, str]) -> CodeSearch:
    for name, text in {**SHARED, **files}.items():
        path = folder / PACKAGE_HOME / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return CodeSearch(Sources(folder, Log(Path("x"), ())), RECIPE)


@pytest.fixture
def old(tmp_path: Path) -> CodeSearch:
    return search_in(tmp_path, OLD)


@pytest.fixture
def new(tmp_path: Path) -> CodeSearch:
    return search_in(tmp_path, NEW)


@pytest.fixture(params=[OLD, NEW], ids=["old", "new"])
def search(tmp_path: Path, request: pytest.FixtureRequest) -> CodeSearch:
    return search_in(tmp_path, request.param)


def places(found: list[tuple[str, str]]) -> list[str]:
    return [place.removeprefix(f"{PACKAGE_HOME}/") for place, _ in found]


def expressions(text: str) -> list[ast.expr]:
    return [ast.parse(text, mode="eval").body]


def test_readers_in_a_tree_with_one_class_of_settings(old: CodeSearch) -> None:
    assert places(old.readers("opt_epsilon")) == ["recipes/x.py:4"]
    assert places(old.readers("max_steps")) == ["recipes/x.py:5"]  # by the property
    assert places(old.readers("log_freq")) == ["train/loop.py:3"]
    assert old.readers("seed") == []


def test_readers_of_sections(new: CodeSearch) -> None:
    """A section is known by ``config[Section]`` and by a parameter's type, whatever its name, function by function."""
    assert places(new.readers("opt_epsilon")) == ["recipes/x_build.py:4", "optim/methods.py:3"]
    assert places(new.readers("max_steps")) == ["recipes/x_build.py:4"]  # by the property
    assert places(new.readers("log_freq")) == ["train/loop.py:3"]
    assert new.readers("seed") == []


def test_defaults(new: CodeSearch, tmp_path: Path) -> None:
    epsilon, most, steps = (settings_by_key()[key] for key in ("opt_epsilon", "max_sequences_per_pack", "max_steps"))
    assert new.default_of(epsilon, RECIPE) == [(f"{PACKAGE_HOME}/optim/config.py:5", "default=1e-6,")]
    assert new.default_of(most, RECIPE) == [(f"{RECIPE}:4", 'overrides={"MAX_SEQUENCES_PER_PACK": 3},')]
    assert new.default_of(steps, RECIPE) == []  # has none
    assert new.default_of(settings_by_key()["recipe"], RECIPE) == [(f"{RECIPE}:3", 'name="x",')]
    assert new.default_of(epsilon, f"{PACKAGE_HOME}/recipes/absent.py") == []
    before = search_in(tmp_path / "old", OLD)
    assert before.default_of(epsilon, RECIPE) == [(f"{RECIPE}:1", 'DEFAULTS = {"opt_epsilon": 1e-6}')]
    assert before.default_of(most, RECIPE) == []


def test_what_a_value_is_set_from(old: CodeSearch) -> None:
    found, names = old.origins(RECIPE, expressions("self.eps"))
    assert found == [(f"{RECIPE}:4", 'numbers = {"eps": config.opt_epsilon}')]  # the default is found by `default_of`
    assert names == {"eps", "opt_epsilon"}
    assert old.origins(RECIPE, expressions("rate"))[1] == {"rate", "schedule", "num_steps"}


def test_what_a_value_is_set_from_ends_at_a_section(new: CodeSearch) -> None:
    build = RECIPE.replace("x.py", "x_build.py")
    found, names = new.origins(build, expressions("optimizer"))
    assert places(found) == ["recipes/x_build.py:3"]
    assert names == {"optimizer"}
    assert new.origins(build, expressions("rate"))[1] == {"rate", "schedule", "num_steps"}


def test_setters(search: CodeSearch) -> None:
    assert search.setters("accuracy") == [(f"{PACKAGE_HOME}/train/loop.py:2", "run.state.accuracy = measure()")]


def test_definitions_that_do_something(search: CodeSearch) -> None:
    assert search.definitions("measure") == [(f"{PACKAGE_HOME}/models/m.py:3", "def measure():")]
    assert search.definitions("LIMIT") == [(f"{PACKAGE_HOME}/models/m.py:1", "LIMIT = 3")]
    assert search.definitions("absent") == []

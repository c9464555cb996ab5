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
FILES = {
    "recipes/x.py": """
RECIPE = Recipe(
    name="x",
    overrides={"MAX_SEQUENCES_PER_PACK": 3},
    not_read=frozenset({"OPT_EPSILON"}),
)
""",
    "recipes/x_build.py": """
from mlbert.optim import optimizers
from mlbert.training import loop
def build(config):
    data, optimizer = config[DataConfig], config[OptimizerConfig]
    return make(eps=optimizer.epsilon, rate=schedule(config[ScheduleConfig].num_steps), packs=data.epsilon)

def other(optimizer):
    return optimizer.epsilon, optimizers.make, loop.loop
""",
    "recipes/y_build.py": "def build(config):\n    return config[OptimizerConfig].epsilon\n",
    "optim/config.py": """
class OptimizerConfig(Section):
    epsilon: float = setting(
        "OPT_EPSILON",
        "Added to the denominator.",
        default=1e-6,
    )

class ScheduleConfig(Section):
    max_steps: int = setting("MAX_STEPS")

    @property
    def num_steps(self):
        return self.max_steps
""",
    "optim/optimizers.py": """
def make(config: OptimizerConfig | None, run: OtherConfig):
    return config.epsilon + run.log_freq

def unused(config: OptimizerConfig):
    return config.epsilon
""",
    "models/m.py": """
LIMIT = 3
measure = None

class Counter:
    def measure(self):
        \"\"\"Measure it,
        once.

        Not twice.
        \"\"\"
        return LIMIT
""",
    "training/protocols.py": 'class P:\n    def measure(self):\n        """Measured elsewhere."""\n',
    "training/loop.py": """
from mlbert.models.m import Counter
from mlbert.training.protocols import P
def loop(run, how: RunConfig):
    run.state.accuracy = Counter().measure()
    state: int = 0  # what it is
    return how.log_freq, P
""",
}


@pytest.fixture
def search(tmp_path: Path) -> CodeSearch:
    for name, text in FILES.items():
        path = tmp_path / PACKAGE_HOME / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return CodeSearch(Sources(tmp_path, Log(Path("x"), ())), RECIPE)


def places(found: list[tuple[str, str]]) -> list[str]:
    return [place.removeprefix(f"{PACKAGE_HOME}/") for place, _ in found]


def expressions(text: str) -> list[ast.expr]:
    return [ast.parse(text, mode="eval").body]


def test_readers_of_sections(search: CodeSearch) -> None:
    """A section is known by ``config[Section]`` and by a parameter's type, whatever its name, function by function."""
    assert places(search.readers("opt_epsilon")) == ["recipes/x_build.py:6", "optim/optimizers.py:3"]
    assert places(search.readers("max_steps")) == ["recipes/x_build.py:6"]  # by the property
    assert places(search.readers("log_freq")) == ["training/loop.py:7"]
    assert search.readers("seed") == []


def test_defaults(search: CodeSearch) -> None:
    epsilon, most, steps = (settings_by_key()[key] for key in ("opt_epsilon", "max_sequences_per_pack", "max_steps"))
    assert search.default_of(epsilon, RECIPE) == [(f"{PACKAGE_HOME}/optim/config.py:6", "default=1e-6,")]
    assert search.default_of(most, RECIPE) == [(f"{RECIPE}:4", 'overrides={"MAX_SEQUENCES_PER_PACK": 3},')]
    assert search.default_of(steps, RECIPE) == []  # has none
    assert search.default_of(settings_by_key()["recipe"], RECIPE) == [(f"{RECIPE}:3", 'name="x",')]
    assert search.default_of(epsilon, f"{PACKAGE_HOME}/recipes/absent.py") == []


def test_origins_of_a_value_end_at_a_section(search: CodeSearch) -> None:
    build = RECIPE.replace("x.py", "x_build.py")
    found, names = search.origins(build, expressions("optimizer"))
    assert places(found) == ["recipes/x_build.py:5"]
    assert names == {"optimizer"}
    assert search.origins(build, expressions("rate"))[1] == {"rate", "schedule", "num_steps"}


def test_setters(search: CodeSearch) -> None:
    assert places(search.setters("accuracy")) == ["training/loop.py:5"]


def test_definitions_that_do_something(search: CodeSearch) -> None:
    assert places(search.definitions("measure")) == ["models/m.py:6"]
    assert places(search.definitions("LIMIT")) == ["models/m.py:2"]
    assert search.definitions("unused") == []  # not reached
    assert search.definitions("absent") == []


def test_meanings(search: CodeSearch) -> None:
    place, text = search.meaning_of(settings_by_key()["opt_epsilon"]) or ("", "")
    assert (place, text) == (f"{PACKAGE_HOME}/optim/config.py:4", "Added to the denominator.")
    assert search.meaning_of(settings_by_key()["seed"]) is None
    assert search.docstrings("measure") == [(f"{PACKAGE_HOME}/models/m.py:6", "measure: Measure it, once.")]
    assert places(search.fields("state")) == ["training/loop.py:6"]
    assert [text for _, text in search.enclosing(f"{PACKAGE_HOME}/models/m.py", 11)] == ["measure: Measure it,"]

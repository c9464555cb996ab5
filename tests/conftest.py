"""Fixtures for the whole test suite."""

import itertools
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from programs import RunMlbert

# A busy machine must not fail a test, and examples may share a folder.
settings.register_profile(
    "tree",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("tree")
# The models are small, and tests run side by side, so more threads would mostly wait. Programs that
# use several all the same sleep while they wait: a busy loop would take the processor from what
# they wait for. OpenMP reads both once.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
# A background job of a shell ignores Ctrl-C, and so would every program that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
# Names of cases: the types of the values that they show, and their length in characters.
PLAIN = (int, float, str, type(None))
MAX_NAME = 60
# The longest files. If one started last, it would run alone while the other workers are idle.
RUN_FIRST = (
    "tests/unit/test_interpreted.py",
    "tests/tree/test_readme.py",
    "tests/tree/test_quickstart_environment.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name dtypes, short sequences and dictionaries of plain values after what they hold:
    float32, 37x48, a=1.
    """
    if type(val).__name__ in ("dtype", "DType"):
        return getattr(val, "name", str(val).removeprefix("torch."))
    if isinstance(val, dict):
        return _joined(",", [f"{name}={value}" for name, value in val.items()], val.values())
    if isinstance(val, tuple | list):
        return _joined("x" if isinstance(val, tuple) else ",", map(str, val), val)
    return None


def _joined(separator: str, parts: Iterable[str], values: Collection[object]) -> str | None:
    """Return the parts joined, or None if that is long or a value is not a number,
    a word or None.
    """
    if not all(isinstance(value, PLAIN) for value in values):
        return None
    name = separator.join(parts)
    return None if len(name) > MAX_NAME else name or "empty"


def pytest_report_header() -> str:
    return (
        "unit tests of Triton kernels run with TRITON_INTERPRET=1 only: "
        "tests/unit/test_interpreted.py does that"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests to `--slow`, run the longest files first
    and keep the order of the others.
    """
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
    items.sort(key=lambda item: not item.nodeid.startswith(RUN_FIRST))


@pytest.fixture(autouse=True)
def one_thread_again() -> Iterator[None]:
    """Compute with one thread after a test that has changed their number,
    as each run in this process does.
    """
    yield
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tree_root() -> Path:
    return ROOT


@pytest.fixture
def run_mlbert(capsys: pytest.CaptureFixture[str]) -> RunMlbert:
    """Return run(*words), which runs `mlbert` in this process and returns its status,
    output and errors.
    """
    from mlbert.cli.main import main

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def assert_fails(run_mlbert: RunMlbert) -> Callable[..., str]:
    """Return fails(words, code, subject), which asserts that `mlbert` prints only that error,
    and returns it.
    """
    from user_errors import assert_error_line

    def fails(
        words: Sequence[object], code: str, subject: str | Path, *, wording: bool = True
    ) -> str:
        status, out, err = run_mlbert(*words)
        assert (status, out) == (2, ""), (words, err)
        assert_error_line(err, code, subject, wording=wording)
        return err

    return fails


def simple_documents(count: int = 100, sentences: int = 12) -> list[list[str]]:
    """Return documents of simple sentences, all different."""
    nouns = [
        "river",
        "engine",
        "garden",
        "letter",
        "window",
        "market",
        "teacher",
        "forest",
        "bridge",
        "kitchen",
    ]
    verbs = ["holds", "crosses", "follows", "paints", "opens", "finds", "carries", "measures"]
    places = [
        "in the morning",
        "near the old house",
        "without a sound",
        "for seven days",
        "beyond the hills",
    ]
    lines = (
        f"The {a} {verb} the {b} {place}."
        for a, verb, b, place in itertools.product(nouns, verbs, nouns, places)
        if a != b
    )
    return [list(itertools.islice(lines, sentences)) for _ in range(count)]


@pytest.fixture(scope="session")
def prepared_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a small folder with vocab.txt, train/, eval/ and baselines.json;
    sequences have 32 tokens.
    """
    from mlbert.data.prepare.instances import InstanceOptions
    from mlbert.data.prepare.pipeline import TextOptions, prepare_text

    out = tmp_path_factory.mktemp("prepared")
    instances = InstanceOptions(
        max_seq_length=32, max_predictions_per_seq=5, dupe_factor=2, random_seed=1
    )
    options = TextOptions(instances, vocab_size=200, eval_share=0.1, eval_sequences=64)
    prepare_text(simple_documents(), out, options, {"kind": "test"})
    return out

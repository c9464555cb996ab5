"""From every key of a log to its settings and its Python:
a run of this code, and the committed results.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlaudit import official, trace
from mlaudit.call_sites import Sources
from mlaudit.cli.submission import app
from mlaudit.findings import Outcome
from mlaudit.keys import SETTINGS_OF
from mlaudit.logs import Log, read_log
from mlaudit.reachable import ReachableCode
from mlaudit.trace import CodeSearch, Trace, Tracer
from mlbert.data.formats.wordpiece import SPECIAL_TOKENS
from mlbert.host.provenance import PACKAGE_HOME
from mlbert.recipes.sections import settings_by_key
from programs import run_quietly, write_files
from text_sets import random_texts, write_texts
from training_settings import SHAPE, train_arguments
from user_errors import user_error

ROOT = Path(__file__).resolve().parents[3]
CONFIG = "benchmarks/bert/implementations/cpu_demo/config_cpu_1x1x32x1_demo.sh"
COMMITTED = [
    path
    for path in sorted(ROOT.glob("results/*/bert/result_0.txt"))
    if '"configuration"' in path.read_text()
]

# Prints the files of the package that a run has loaded, in its last line.
# Measuring a machine's peak takes seconds.
PROGRAM = """
import json, sys
from mlbert.cli.main import main
from mlbert.ops import peak
peak.SIZES["cpu"] = 256
try:
    main(sys.argv[1:])
finally:
    modules = list(sys.modules.items())
    print(json.dumps([str(m.__file__) for name, m in modules if name.startswith("mlbert.")]))
"""
# All keys of cpu_cluster's logs take long, and those of tf2_cpu_demo show the same.
SLOW = {"cpu_cluster": [pytest.mark.slow]}

RECIPE = f"{PACKAGE_HOME}/recipes/x.py"
FILES = {
    "recipes/x.py": """
RECIPE = Recipe(
    name="x",
    overrides={"MAX_SEQUENCES_PER_PACK": 3},
)
""",
    "recipes/x_build.py": """
from mlbert.optim import optimizers
from mlbert.training import loop
def build(config):
    data, optimizer = config[DataConfig], config[OptimizerConfig]
    return make(data.epsilon, e=optimizer.epsilon, rate=schedule(config[ScheduleConfig].num_steps))

def other(optimizer):
    return optimizer.epsilon, optimizers.make, loop.loop
""",
    "recipes/y_build.py": "def build(config):\n    return config[OptimizerConfig].epsilon\n",
    "optim/config.py": """
class ScheduleConfig(Section):
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
measure = None
class Counter:
    def measure(self):
        return 3
""",
    "training/protocols.py": (
        'class P:\n    def measure(self):\n        """Measured elsewhere."""\n'
    ),
    "training/loop.py": """
from mlbert.models.m import Counter
from mlbert.training.protocols import P
def loop(run, how: RunConfig):
    run.state.accuracy = Counter().measure()
    return how.log_freq, P
""",
}

REACHED = {
    "start.py": """
from mlbert.rooms import shapes
from mlbert.rooms.names import shared
from mlbert.rooms.others import Unused
if TYPE_CHECKING:
    from mlbert.rooms.others import Annotated

def begin(value: Unused) -> Annotated:
    from mlbert.rooms.late import local
    return local(shared, shapes.area, "mlbert.rooms.entry:build")
""",
    "rooms/__init__.py": "from mlbert.rooms import registered\n",
    "rooms/registered.py": "TABLE = {}\nTABLE.update(a=1)\n\ndef never():\n    pass\n",
    "rooms/names.py": "from mlbert.rooms.origin import shared\n",
    "rooms/origin.py": "LIMIT = 3\nOTHER = 4\n\ndef shared():\n    return LIMIT\n",
    "rooms/shapes.py": "def area():\n    pass\n\ndef volume():\n    pass\n",
    "rooms/late.py": "class Base:\n    pass\n\nclass local(Base):\n    pass\n",
    "rooms/entry.py": "def build():\n    pass\n\ndef other():\n    pass\n",
    "rooms/others.py": "class Unused:\n    pass\n\nclass Annotated:\n    pass\n",
}


@pytest.fixture(scope="module", autouse=True)
def shared_search() -> Iterator[None]:
    """Search the code of a commit that a recipe reaches once for all logs, which takes a second."""
    made: dict[object, CodeSearch] = {}

    def search(sources: Sources, recipe: str) -> CodeSearch:
        return made.setdefault((sources.tree, sources.commit, recipe), CodeSearch(sources, recipe))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "CodeSearch", search)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the log of a short run of a sourced config;
    the official tools could misread its folder's name.
    """
    folder = tmp_path_factory.mktemp("eval_accuracy_global_batch_size")
    (folder / "shape.json").write_text(json.dumps(SHAPE))
    (folder / "more.yaml").write_text("# one line\npoly_power: 2\n")
    (folder / "program.py").write_text(PROGRAM)
    (folder / "run.sh").write_text(
        f"source {ROOT / CONFIG}\n"
        f"export SYNTH_DATA=1 BATCHSIZE=4 SEED=5 LOGDIR={folder} BERT_CONFIG={folder}/shape.json\n"
        f"exec {sys.executable} {folder}/program.py train --config {folder}/more.yaml "
        "--max_steps 3 --cpu_threads 1 --num_eval_examples 8 --eval_iter_start_samples 1000000\n"
    )
    done = run_quietly("bash", folder / "run.sh")
    assert done.returncode == 1, done.stderr  # three steps do not reach the target
    (folder / "loaded.json").write_text(done.stdout.splitlines()[-1])
    return folder / "result_0.txt"


def chains_of(log: Path) -> dict[str, Trace]:
    tracer = Tracer(read_log(log), ROOT)
    return {key: tracer.chain(key) for key in tracer.keys}


@pytest.fixture(scope="module")
def chains(run: Path) -> dict[str, Trace]:
    return chains_of(run)


def places(chain: Trace, step: str) -> list[tuple[str, str]]:
    return [(link.place, link.text) for link in chain.links if link.step == step]


def test_every_key_is_followed(chains: dict[str, Trace]) -> None:
    assert {"eval_accuracy", "configuration", "opt_base_learning_rate", "opt_lamb_beta_1"} <= set(
        chains
    )
    assert {key: chain.broken for key, chain in chains.items() if chain.broken} == {}
    # Its docstring is the command's.
    assert [key for key, chain in chains.items() if not chain.meaning] == ["run_stop"]


def assert_traces_name_only_loaded_files(
    recipe: str, chains: dict[str, Trace], loaded: str
) -> None:
    recipes = {path.name for path in (ROOT / PACKAGE_HOME / "recipes").glob("*.py")}
    shared = {
        "assembly.py",
        "auto_precision.py",
        "inspection.py",
        "model_shape.py",
        "relations.py",
        "sections.py",
        "task_inputs.py",
    }
    others = recipes - {f"{recipe}.py", f"{recipe}_build.py", *shared}
    names = {Path(name).relative_to(ROOT).as_posix() for name in json.loads(loaded)}
    found = {
        link.place.rpartition(":")[0]
        for chain in chains.values()
        for link in (*chain.links, *chain.meaning)
    }
    named = {name for name in found if name.startswith(PACKAGE_HOME)}
    assert len(named) > 10
    assert named - names == set()
    assert {Path(name).name for name in named if "/recipes/" in name} & others == set()


def test_traces_name_only_files_that_the_run_loaded(run: Path, chains: dict[str, Trace]) -> None:
    assert_traces_name_only_loaded_files(
        "packed_lamb", chains, (run.parent / "loaded.json").read_text()
    )


def settings_of(recipe: str, folder: Path) -> dict[str, object]:
    """Return settings of a run of three steps, and write its data."""
    values: dict[str, object] = {
        "average_packing_rate": 1,
        "gradient_accumulation_steps": 1,
        "max_steps": 3,
    }
    values["recipe"] = recipe.removesuffix("_text").removesuffix("_stored")
    if recipe.startswith("masked_lm"):
        values |= {"lr_milestones": "2", "lr_gamma": 0.5}
    words = [*"abcdefghijklmnopqrstuvwxyz", "cold", "warm", "sun", "snow"]
    unused = [
        f"[unused{number}]"
        for number in range(SHAPE["vocab_size"] - len(words) - len(SPECIAL_TOKENS))
    ]
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *words, *unused]) + "\n")
    if recipe == "masked_lm_text":
        sets = [write_texts(folder / str(seed), random_texts(40, seed)) for seed in range(2)]
        values |= {"num_eval_examples": 8, "masking_rate": 0.3}
    elif recipe == "classification":
        (folder / "rows.csv").write_text("text,label\n" + "warm sun,1\ncold snow,0\n" * 8)
        sets = [folder / "rows.csv"] * 2
        values |= {"text_columns": "text", "label_column": "label", "num_labels": 2}
    else:
        return values
    places = dict(zip(("input_dir", "eval_dir"), sets, strict=True))
    return {
        **values,
        **places,
        "tokenizer": folder / "vocab.txt",
        "synthetic_data": 0,
        "max_seq_length": 16,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["ddp_adam", "masked_lm_stored", "masked_lm_text", "classification"]
)
def test_traces_of_other_recipes_name_only_files_that_the_run_loaded(
    recipe: str, tmp_path: Path
) -> None:
    words = train_arguments(tmp_path, **settings_of(recipe, tmp_path))
    done = run_quietly(sys.executable, "-c", PROGRAM, *words)
    log = tmp_path / "out/result_0.txt"
    assert log.exists(), done.stderr
    assert_traces_name_only_loaded_files(recipe, chains_of(log), done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.parts[-3], marks=SLOW.get(path.parts[-3], ()))
        for path in COMMITTED
    ],
)
def test_committed_results_are_traced(path: Path) -> None:
    """Logs written before settings were declared in sections are traced with the code of their
    commit.
    """
    sources = Sources(ROOT, read_log(path))
    is_older = sources.text(f"{PACKAGE_HOME}/config/section.py") is None
    key = ["eval_accuracy"] if is_older else []  # that code is tested with itself
    done = CliRunner().invoke(app, ["trace", str(path), *key, "--tree", str(ROOT)])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    note = [f"note: traced with the code of commit {sources.commit}"] if is_older else []
    assert [line for line in lines if line.startswith("note:")] == note
    assert any(line.startswith("eval_accuracy = ") for line in lines)
    assert "env.sh" in done.stdout
    if not is_older:  # a line for each key
        assert sum(" <- " in line for line in lines) == len(Tracer(read_log(path), ROOT).keys)
        assert any(line.startswith("seed = ") and " <- training/" in line for line in lines)


def test_where_values_come_from(run: Path, chains: dict[str, Trace]) -> None:
    number = (ROOT / CONFIG).read_text().splitlines().index("export OPT_LAMB_BETA_1=0.9") + 1
    assert places(chains["opt_lamb_beta_1"], "setting") == [
        (f"{CONFIG}:{number}", "export OPT_LAMB_BETA_1=0.9")
    ]
    readers = places(chains["opt_lamb_beta_1"], "read by")
    assert any(
        "config.beta1" in text and "/optim/optimizers.py" in place for place, text in readers
    )
    ((place, text),) = places(chains["opt_lamb_epsilon"], "setting")
    assert place.startswith(f"{PACKAGE_HOME}/optim/config.py:")
    assert text == "default=1e-06,"
    power = places(chains["opt_lamb_learning_rate_decay_poly_power"], "setting")
    assert power == [(f"{run.parent}/more.yaml:2", "poly_power: 2")]
    assert places(chains["opt_learning_rate_training_steps"], "setting")[0][0] == "flag --max-steps"
    assert ("environment BATCHSIZE", "BATCHSIZE = 4") in places(
        chains["global_batch_size"], "setting"
    )
    assert places(chains["config_file"], "file") == [(CONFIG, "")]
    assert any(
        "training/evaluate.py:" in place
        for place, _ in places(chains["eval_accuracy"], "computed by")
    )
    assert any("def git_state(" in text for _, text in places(chains["commit"], "computed by"))


def test_the_meaning_of_values(chains: dict[str, Trace]) -> None:
    meaning = {
        key: [(link.step, link.text) for link in chain.meaning] for key, chain in chains.items()
    }
    assert ("setting", f"MAX_STEPS: {settings_by_key()['max_steps'].meaning}") in meaning[
        "max_steps"
    ]
    assert (
        "field",
        'compiler: str  # that built the native libraries; "none" if none was used',
    ) in meaning["compiler"]
    assert any(
        step == "function" and text.startswith("metrics: ")
        for step, text in meaning["eval_accuracy"]
    )
    assert meaning["run_start"] == [("logged in", "start: Log run_start.")]


def test_official_tools_read_such_a_log(run: Path) -> None:
    from mlperf_logging.rcp_checker.rcp_checker import read_submission_file

    log = read_log(run)
    assert "eval_accuracy" in log.value("configuration")["LOGDIR"]["value"]
    assert official.run(official.compliance_checker(run, "x"))[0].outcome is Outcome.PASS
    read = read_submission_file(str(run), "5.0.0", use_train_samples=False)
    assert read[2:] == (log.value("global_batch_size"), "bert")


@pytest.mark.parametrize(
    ("key", "old", "new", "broken"),
    [
        (
            "opt_lamb_beta_1",
            '"opt_lamb_beta_1", "value": 0.9',
            '"opt_lamb_beta_1", "value": 0.8',
            "the log says 0.8",
        ),
        ("opt_lamb_beta_1", "demo.sh:", "demo.sh:1", "does not set OPT_LAMB_BETA_1"),
        (
            "opt_lamb_epsilon",
            "recipe packed_lamb",
            "recipe x",
            "recipes/x.py has no default for opt_epsilon",
        ),
        (
            "config_file_sha256",
            'file_sha256", "value": "',
            'file_sha256", "value": "0',
            "is not the file of",
        ),
        ("config_file", "1x1x32x1", "1x1x1x1", "is not in the tree"),
        ("seed", '"configuration"', '"other"', "is not in the log's configuration"),
        ("eval_accuracy", '"lineno": ', '"lineno": 9999', "is not in the tree"),
        ("opt_precision", '"precision"', '"opt_precision"', "does not log opt_precision"),
    ],
)
def test_a_broken_link_is_named(
    key: str, old: str, new: str, broken: str, run: Path, tmp_path: Path
) -> None:
    text = run.read_text()
    assert old in text
    log = tmp_path / "result_0.txt"
    log.write_text(text.replace(old, new))
    done = CliRunner().invoke(app, ["trace", str(log), key, "--tree", str(ROOT)])
    assert done.exit_code == 1
    assert broken in done.stdout.partition("BROKEN: ")[2]
    assert done.stdout.startswith(f"{key} = ")
    if key == "opt_lamb_beta_1":
        assert done.stdout.splitlines()[1] == "what the value means:"
        assert "\nwhat produced it:\n" in done.stdout


def test_a_key_a_log_and_a_tree_that_cannot_be_traced(run: Path, tmp_path: Path) -> None:
    with user_error("config.unknown-name", "opt_lamb_beta1"):
        Tracer(read_log(run), ROOT).chain("opt_lamb_beta1")
    chain = Tracer(read_log(run), tmp_path).chain("seed")
    assert [link.broken for link in chain.broken] == ["is not in the tree"]
    path = tmp_path / "result_0.txt"
    path.write_text(run.read_text(), "utf-16")
    with user_error("log.incomplete", path):
        CliRunner().invoke(app, ["trace", str(path)], catch_exceptions=False, standalone_mode=False)


def test_the_tables_name_settings_that_exist() -> None:
    assert {field for fields in SETTINGS_OF.values() for field in fields} <= set(settings_by_key())


def test_a_search_of_code(tmp_path: Path) -> None:
    """A section is known by ``config[Section]`` and by a parameter's type,
    whatever its name, function by function.
    """
    write_files(tmp_path / PACKAGE_HOME, FILES)
    code = CodeSearch(Sources(tmp_path, Log(Path("x"), ())), RECIPE)
    settings = settings_by_key()
    build = RECIPE.replace("x.py", "x_build.py")
    optimizer, rate = (ast.parse(text, mode="eval").body for text in ("optimizer", "rate"))

    def located(found: list[tuple[str, str]]) -> list[str]:
        return [place.removeprefix(f"{PACKAGE_HOME}/") for place, _ in found]

    assert located(code.readers("opt_epsilon")) == ["recipes/x_build.py:6", "optim/optimizers.py:3"]
    assert located(code.readers("max_steps")) == ["recipes/x_build.py:6"], "by the property"
    assert located(code.readers("log_freq")) == ["training/loop.py:6"]
    assert code.readers("seed") == []
    assert located(code.default_of(settings["max_sequences_per_pack"], RECIPE)) == [
        "recipes/x.py:4"
    ]
    assert code.default_of(settings["recipe"], RECIPE) == [(f"{RECIPE}:3", 'name="x",')]
    assert located(code.setters("accuracy")) == ["training/loop.py:5"]
    assert located(code.definitions("measure")) == ["models/m.py:4"], "that does something"
    assert code.definitions("unused") == [], "not reached"
    assert located(code.origins(build, [optimizer])[0]) == ["recipes/x_build.py:5"]
    assert code.origins(build, [optimizer])[1] == {"optimizer"}, "ends at a section"
    assert code.origins(build, [rate])[1] == {"rate", "schedule", "num_steps"}


def test_names_are_followed_definition_by_definition(tmp_path: Path) -> None:
    write_files(tmp_path / PACKAGE_HOME, REACHED)
    home = f"{PACKAGE_HOME}/"
    code = ReachableCode(
        Sources(tmp_path, Log(Path("x"), ())), [f"{home}start.py", f"{home}absent.py"]
    )
    found = {
        file.removeprefix(home): [node.lineno for node in code.statements(file)]
        for file in code.files
    }
    assert found == {
        "start.py": [8],
        "rooms/registered.py": [1, 2],  # a statement of an imported package
        "rooms/origin.py": [1, 4],  # through the module that imports it again; OTHER is not named
        "rooms/shapes.py": [1],  # as an attribute of its module
        "rooms/late.py": [1, 4],  # imported in the function, with its base class
        "rooms/entry.py": [1],  # by a string
    }

"""What a recipe's code reaches; each recipe's traces name only files that its run loaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mlbert.host.provenance import PACKAGE_HOME
from mlbert.mlperf.call_sites import Sources
from mlbert.mlperf.logs import Log, read_log
from mlbert.mlperf.reachable import ReachableCode
from mlbert.mlperf.trace import Tracer
from programs import write_files
from text_sets import random_texts, write_texts
from training_settings import train_arguments

ROOT = Path(__file__).resolve().parents[3]
# Prints the files of the package that a run has loaded, in its last line.
PROGRAM = """
import json, sys
from mlbert.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(json.dumps([str(m.__file__) for n, m in list(sys.modules.items()) if n.startswith("mlbert.")]))
"""
OTHER_RECIPES = ("ddp_adam", "masked_lm_stored", "masked_lm_text", "classification")
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def settings_of(recipe: str, folder: Path) -> dict[str, object]:
    """Return settings of a run of three steps, and write its data."""
    values: dict[str, object] = {"average_packing_rate": 1, "gradient_accumulation_steps": 1, "max_steps": 3}
    if recipe.startswith("masked_lm"):
        values |= {"lr_milestones": "2", "lr_gamma": 0.5}
    unused = [f"[unused{number}]" for number in range(300)]
    if recipe == "masked_lm_text":
        (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *"abcdefghijklmnopqrstuvwxyz", *unused][:300]) + "\n")
        sets = {name: write_texts(folder / name, random_texts(40, seed)) for seed, name in enumerate(("train", "eval"))}
        values |= {"input_dir": sets["train"], "eval_dir": sets["eval"], "tokenizer": folder / "vocab.txt"}
        values |= {"synthetic_data": 0, "num_eval_examples": 8, "max_seq_length": 16, "masking_rate": 0.3}
    if recipe == "classification":
        (folder / "vocab.txt").write_text("\n".join([*SPECIAL, "cold", "warm", "sun", "snow", *unused][:300]) + "\n")
        rows = "text,label\n" + "warm sun,1\ncold snow,0\n" * 8
        for name in ("train", "dev"):
            (folder / f"{name}.csv").write_text(rows)
        values |= {"input_dir": folder / "train.csv", "eval_dir": folder / "dev.csv", "tokenizer": folder / "vocab.txt"}
        values |= {"text_columns": "text", "label_column": "label", "num_labels": 2}
        values |= {"synthetic_data": 0, "max_seq_length": 16}
    name = "masked_lm" if recipe.startswith("masked_lm") else recipe
    return {**values, "recipe": name}


@pytest.mark.parametrize(
    "recipe", ["packed_lamb", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHER_RECIPES)]
)
def test_traces_name_only_files_that_the_run_loaded(recipe: str, tmp_path: Path) -> None:
    words = train_arguments(tmp_path, **settings_of(recipe, tmp_path))
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=False)
    assert (tmp_path / "out/result_0.txt").exists(), done.stderr
    recipes = {path.name for path in (ROOT / PACKAGE_HOME / "recipes").glob("*.py")}
    others = recipes - {f"{recipe}.py", f"{recipe}_build.py", "assembly.py"}
    loaded = {Path(name).relative_to(ROOT).as_posix() for name in json.loads(done.stdout.splitlines()[-1])}
    tracer = Tracer(read_log(tmp_path / "out/result_0.txt"), ROOT)
    chains = [tracer.chain(key) for key in tracer.keys]
    places = {link.place.rpartition(":")[0] for chain in chains for link in (*chain.links, *chain.meaning)}
    named = {name for name in places if name.startswith(PACKAGE_HOME)}
    assert len(named) > 10
    assert named - loaded == set()
    assert {Path(name).name for name in named if "/recipes/" in name} & others == set()


FILES = {
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


def test_names_are_followed_definition_by_definition(tmp_path: Path) -> None:
    write_files(tmp_path / PACKAGE_HOME, FILES)
    home = f"{PACKAGE_HOME}/"
    code = ReachableCode(Sources(tmp_path, Log(Path("x"), ())), [f"{home}start.py", f"{home}absent.py"])
    found = {file.removeprefix(home): [node.lineno for node in code.statements(file)] for file in code.files}
    assert found == {
        "start.py": [8],
        "rooms/registered.py": [1, 2],  # a statement of an imported package
        "rooms/origin.py": [1, 4],  # through the module that imports it again; OTHER is not named
        "rooms/shapes.py": [1],  # as an attribute of its module
        "rooms/late.py": [1, 4],  # imported in the function, with its base class
        "rooms/entry.py": [1],  # by a string
    }

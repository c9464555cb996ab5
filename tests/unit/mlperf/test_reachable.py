"""What the code of a recipe reaches: names are followed definition by definition."""

from pathlib import Path

from mlbert.host.provenance import PACKAGE_HOME
from mlbert.mlperf.call_sites import Sources
from mlbert.mlperf.logs import Log
from mlbert.mlperf.reachable import ReachableCode
from programs import write_files

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

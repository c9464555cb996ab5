"""Models of other families are refused by every command, in the words of docs/models.md.

`tests/tree/test_model_table.py` runs the commands with each family that is read.
"""

import re
from pathlib import Path

import pytest

import mlbert
import model_table
from mlbert.host.errors import UserError
from programs import RunMlbert

pytestmark = pytest.mark.usefixtures("one_cpu")


@pytest.mark.parametrize("model", model_table.refusals())
def test_other_families_are_refused_by_every_command(
    model: str, tmp_path: Path, run_mlbert: RunMlbert
) -> None:
    said = model_table.refusals()[model]
    source = model_table.write_refused(model, tmp_path / "source")
    text = model_table.write_text(tmp_path)
    rows = model_table.write_rows(tmp_path)
    commands = model_table.commands(source, text, rows, tmp_path / "absent", tmp_path)
    for column, words in commands.items():
        code, out, err = run_mlbert(*words)
        (line,) = err.splitlines()
        assert (code, out) == (2, ""), column
        assert f"{said} [model.unsupported]" in line, column
    with pytest.raises(UserError, match=re.escape(said)):
        mlbert.load_model(source)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "text.txt", "rows.csv"}

"""JSON documents as pydantic models. An error is one line that names the field.

    class Index(Document):
        size: Count
        digest: Sha256

    index = read_model(Index, path, "Restore it")

Separate from `mlbert.host.json_files` because importing pydantic is slow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlbert.host.errors import UserError
from mlbert.host.json_files import read_json, shown
from mlbert.host.texts import plain_words

Count = Annotated[int, Field(ge=0, le=1 << 53)]  # integers that every JSON reader preserves
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^[^./\\\x00][^/\\\x00]{0,254}$")]  # never a path
# Parts of pydantic's messages that are dropped: "Input should be", "or instance of Shard", "after
# validation, not 0", ", unable to parse string as an integer".
_LEFT_OUT = re.compile(
    r"^(Value error,|\w+) (?=should)| or instance of \w+$| after validation, not \d+$|"
    r", unable to parse .*$"
)


class Document(BaseModel):
    """A JSON object.

    Values are never converted, except integers to float; unknown keys are ignored.
    """

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=Document)


def read_model(kind: type[Model], path: Path, remedy: str) -> Model:
    """Return the document in a JSON file. Raises UserError as `read_json` and `parse_model` do."""
    return parse_model(kind, read_json(path, remedy), path, remedy)


def parse_model(
    kind: type[Model],
    values: Mapping[str, Any],
    subject: Path | str,
    remedy: str,
    code: str = "file.json",
) -> Model:
    """Return the document with these values.

    Raises UserError if a value is missing, wrong or unknown.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise UserError(code, subject, _first_problem(kind, error), remedy) from None


def _first_problem(kind: type[Document], error: ValidationError) -> str:
    """Return the first problem in one line.

    An unknown key goes first: it is often a misspelt missing one.
    """
    problems = error.errors(include_url=False)
    first = next(
        (problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0]
    )
    place = "".join(
        f"[{part}]" if isinstance(part, int) else f".{shown(part)[1:-1]}" for part in first["loc"]
    )
    place = place.removeprefix(".").removesuffix(".[key]")
    if first["type"] == "extra_forbidden":
        return f"unknown key {place!r}. Known keys: {', '.join(kind.model_fields)}"
    if first["type"] == "missing":
        return f"key {place!r} is missing"
    expected = plain_words(_LEFT_OUT.sub("", first["msg"]))
    return f"{place or 'a key'} is {shown(first['input'])} but {expected}"

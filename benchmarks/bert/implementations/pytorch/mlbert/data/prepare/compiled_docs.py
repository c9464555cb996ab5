"""Print the documentation of the standard library's compiled modules as JSON.

`mlbert.data.prepare.python_text` runs this file in a fresh interpreter without site packages
(``python -I -S``), because the text would otherwise contain whatever a running program has put into
modules such as ``sys``. It imports only modules that are built into the interpreter or are its own
extensions.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import sys
from types import ModuleType

SKIPPED = ("_test", "_tkinter", "_xx", "xx", "readline", "_ctypes_test")


def is_compiled(name: str) -> bool:
    """Return whether a module is built in or an extension."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    extensions = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    return spec is not None and (spec.origin == "built-in" or str(spec.origin).endswith(extensions))


def documentation(module: ModuleType) -> list[list[str]]:
    """Return groups of a module's texts: its own, one group per class with its members,
    one per function.
    """
    groups = [[module.__doc__]]
    for _, value in sorted(vars(module).items()):
        if inspect.isclass(value) and value.__module__ in (module.__name__, "builtins"):
            members = [
                member for _, member in sorted(vars(value).items()) if inspect.isroutine(member)
            ]
            groups.append([value.__doc__, *(member.__doc__ for member in members)])
        elif inspect.isbuiltin(value):
            groups.append([value.__doc__])
    return [[inspect.cleandoc(text) for text in group if isinstance(text, str)] for group in groups]


def main() -> None:
    """Print {module: groups of texts}."""
    found = {}
    for name in sorted(sys.stdlib_module_names):
        if not name.startswith(SKIPPED) and is_compiled(name):
            try:
                found[name] = documentation(importlib.import_module(name))
            except ImportError:
                continue  # an extension whose library is not installed
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

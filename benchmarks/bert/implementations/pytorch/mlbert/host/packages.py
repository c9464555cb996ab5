"""Import a front end: a package that comes with this one, which must not name it in an import."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from mlbert.host.repository import HOMES, repository


def import_sibling(dotted: str) -> ModuleType:
    """Import a module of a package of `mlbert.host.repository.HOMES`, and return it.

    If this package runs from a repository, the other one comes from the same repository, whatever
    else is installed; otherwise it is installed with this one.

    Args:
        dotted: such as ``mosaic_yaml.commands.glue``.
    """
    package, _, _ = dotted.partition(".")
    root = repository()
    if root is not None and package not in sys.modules:
        folder = root / HOMES[package]
        spec = importlib.util.spec_from_file_location(
            package, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[package] = module
        spec.loader.exec_module(module)
    return importlib.import_module(dotted)

"""Methods by name: one module a method; `mlbert.train.protocols.Recipe` says what it holds."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from mlbert.core.config_files import nearest
from mlbert.core.errors import UserError
from mlbert.core.provenance import TENSORFLOW2


def names() -> list[str]:
    """The recipes that exist."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> ModuleType:
    """The recipe's module; UserError for an unknown name."""
    if name == TENSORFLOW2:
        remedy = "Start benchmarks/bert/implementations/tensorflow2/run_pretraining.py, or run_and_time.sh"
        raise UserError(f"RECIPE={name}", "runs in TensorFlow, not here", remedy)
    if name not in names():
        near = nearest(name, names())
        hint = f"Did you mean {near}?" if near else f"There are {', '.join(names())}"
        raise UserError(f"RECIPE={name}", "no such recipe", hint)
    return importlib.import_module(f"{__name__}.{name}")

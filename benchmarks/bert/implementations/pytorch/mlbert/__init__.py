"""Pre-train BERT encoders, and use them in training loops of your own.

mlbert.open_dataset      a data set as an iterable of batches, also for a `DataLoader`
mlbert.load_model        a trained model as an `nn.Module`, with padded or unpadded input
mlbert.new_model         the same with random weights
mlbert.make_optimizer    one of this package's optimizers as a `torch.optim.Optimizer`
mlbert.MLPerfCallback    the MLPerf log of a loop, of transformers' Trainer, or of Lightning
mlbert.UserError         what they raise about a mistake that the user can fix
mlbert.__version__       of the installed distribution, or of the source checkout

Names are imported when they are first used: `import mlbert` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlbert.host.errors import UserError
    from mlbert.library.dataset import open_dataset
    from mlbert.library.model import load_model, new_model
    from mlbert.library.optimizer import make_optimizer
    from mlbert.mlperf.callback import MLPerfCallback

__all__ = [
    "MLPerfCallback",
    "UserError",
    "load_model",
    "make_optimizer",
    "new_model",
    "open_dataset",
]
_VERSION = "__version__"
_MODULES = {
    "MLPerfCallback": "mlbert.mlperf.callback",
    "UserError": "mlbert.host.errors",
    "load_model": "mlbert.library.model",
    "make_optimizer": "mlbert.library.optimizer",
    "new_model": "mlbert.library.model",
    "open_dataset": "mlbert.library.dataset",
}


def __getattr__(name: str) -> Any:
    """Return a public name; see the module docstring.

    Raises AttributeError if there is none, and ImportError if it needs torch and that is not
    installed.
    """
    if name == _VERSION:
        return importlib.import_module("mlbert.host.provenance").package_version()
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        words = importlib.import_module("mlbert.host.errors").install_words("train")
        raise ImportError(f"mlbert.{name} needs torch. {words}", name="torch") from error


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted([*__all__, _VERSION])

"""What a log says about itself: the events that lead from a result to its configuration, its code and its machine.

Each event is a call of its own with the key written out: a log line names the file and the line of its call, and a
reader finds the key there (``mlbert submission check`` proves it, ``mlbert submission trace`` follows it).
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlbert.core.config import Resolved, environment
from mlbert.core.errors import UserError
from mlbert.core.provenance import git_state, package_versions, tree_relative, tree_root
from mlbert.core.rules import BENCHMARK
from mlbert.core.settings import TrainConfig

Event = Callable[[str, Any], object]


@dataclass(frozen=True)
class Identity:
    """Where a run comes from, in plain values. File names are relative to the tree where they lie in it."""

    recipe: str  # module of mlbert.recipes
    config_file: str  # what was sourced or given with --config; "none" without either, as is its digest
    config_file_sha256: str
    config_parents: Mapping[str, str]  # the files that it sources or extends, and further ones, with their SHA-256
    model_shape: str  # the bert_config.json
    model_shape_sha256: str
    train_data: str  # sha256: and the identity of the set, or "synthetic"
    eval_data: str
    commit: str  # of the tree, see git_state
    tree_modified: bool  # whether files differed from that commit
    image: str  # as CONT names it; "none" without a container
    image_digest: str  # as the launcher found it, or "none"
    image_commit: str  # what the Dockerfile left in the image, or "none"
    python: str
    platform: str
    packages: Mapping[str, str]  # distribution to version
    precision: str
    ops: str
    ranks: int  # of the whole job


def identify(resolved: Resolved, *, train_data: str, eval_data: str, precision: str, ops: str, ranks: int) -> Identity:
    """Collects it.

    Raises:
        UserError: a configuration file or the model shape cannot be read.
    """
    shape = resolved.config.bert_config_file
    digests = {tree_relative(path): _sha256(path) for path in resolved.files}
    config_file, config_file_sha256 = next(iter(digests.items()), ("none", "none"))
    commit, tree_modified = git_state(tree_root())
    environ = environment()
    return Identity(
        recipe=resolved.config.recipe,
        config_file=config_file,
        config_file_sha256=config_file_sha256,
        config_parents={name: digest for name, digest in digests.items() if name != config_file},
        model_shape=tree_relative(shape),
        model_shape_sha256=_sha256(shape),
        train_data=train_data,
        eval_data=eval_data,
        commit=commit,
        tree_modified=tree_modified,
        image=environ.get("CONT") or "none",
        image_digest=environ.get("MLBERT_IMAGE_DIGEST") or "none",
        image_commit=environ.get("MLBERT_IMAGE_COMMIT") or "none",
        python=platform.python_version(),
        platform=platform.platform(),
        packages=package_versions(),
        precision=precision,
        ops=ops,
        ranks=ranks,
    )


def log_identity(event: Event, identity: Identity, resolved: Resolved) -> None:
    """Logs where a run comes from and its whole configuration. Belongs between init_start and init_stop."""
    event("recipe", identity.recipe)
    event("config_file", identity.config_file)
    event("config_file_sha256", identity.config_file_sha256)
    event("config_parents", identity.config_parents)
    event("model_shape", identity.model_shape)
    event("model_shape_sha256", identity.model_shape_sha256)
    event("train_data", identity.train_data)
    event("eval_data", identity.eval_data)
    event("commit", identity.commit)
    event("tree_modified", identity.tree_modified)
    event("image", identity.image)
    event("image_digest", identity.image_digest)
    event("image_commit", identity.image_commit)
    event("python", identity.python)
    event("platform", identity.platform)
    event("packages", identity.packages)
    event("precision", identity.precision)
    event("ops", identity.ops)
    event("ranks", identity.ranks)
    event("configuration", resolved.as_configuration())


def log_submission(event: Event, config: TrainConfig) -> None:
    """Logs what is submitted, by whom and where it belongs. Must precede init_stop."""
    event("submission_benchmark", BENCHMARK)
    event("submission_org", config.submission_org)
    event("submission_division", config.submission_division)
    event("submission_status", "research")
    event("submission_platform", config.submission_platform)


def log_batch_size(event: Event, config: TrainConfig, global_batch_size: int) -> None:
    """Logs the hyper-parameters that neither the optimizer nor the schedule has.

    ``global_batch_size``: sequences of one optimizer step over all ranks.
    """
    event("global_batch_size", global_batch_size)
    event("gradient_accumulation_steps", config.gradient_accumulation_steps)


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(path, f"cannot be read ({error.strerror})", "Name a readable file") from None

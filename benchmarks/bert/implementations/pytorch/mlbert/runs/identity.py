"""Provenance in the log: the events that lead from a result to its configuration, code and machine.

Each event is a separate call with a literal key, because a log line names the file and line of its
call, and a reader must find the key there (``mlbert submission check`` verifies this,
``mlbert submission trace`` follows it).
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mlbert.config.resolution import Resolved
from mlbert.host import native
from mlbert.host.environment import environment
from mlbert.host.files import reading
from mlbert.host.machine import NONE, gpu_driver, processor_name
from mlbert.host.provenance import (
    command_line,
    git_state,
    package_versions,
    tree_relative,
    tree_root,
)
from mlbert.mlperf.config import SubmissionConfig
from mlbert.mlperf.rules import BENCHMARK
from mlbert.runs.config import RunConfig
from mlbert.runs.progress import Limits
from mlbert.runs.starting_weights import name_weights

Event = Callable[[str, Any], object]


@dataclass(frozen=True, kw_only=True)
class RuntimeFacts:
    """Facts about a run that come from the framework and the data."""

    train_data: str  # name and identity of the set, see `mlbert.data.formats.base`; or "synthetic"
    eval_data: str
    max_sequence_length: int  # of the training set, tokens
    # Of the training set's packs; None if known only after packing.
    sequences_per_pack: float | None
    precision: str
    ops: str
    ranks: int  # of the job
    threads_per_rank: int  # CPU threads of rank 0
    hosts: Sequence[str]  # the machine of each rank
    gpus: Mapping[str, int]  # that the job may use on rank 0's machine: model to count
    cuda: str = NONE  # version, as the next two
    cudnn: str = NONE
    nccl: str = NONE


@dataclass(frozen=True, kw_only=True)
class RunIdentity(RuntimeFacts):
    """Provenance of a run, in plain values. Names of files inside the tree are relative to it."""

    command: str  # of rank 0
    experiment: int  # index of this run among `experiments`, from 0
    experiments: int | None  # runs of the job; None if unknown
    recipe: str  # module of mlbert.recipes
    config_file: str  # the sourced or --config file, else "none"; so is the digest
    config_file_sha256: str
    # Files that it sources or extends, and others, with their SHA-256.
    config_parents: Mapping[str, str]
    model_shape: str  # the bert_config.json
    model_shape_sha256: str
    starting_weights: (
        str  # name of the checkpoint without its folder; "none" if initialized randomly
    )
    starting_weights_sha256: str
    commit: str  # of the tree, see git_state
    tree_modified: bool  # True if files differed from that commit
    image: str  # as CONT names it; "none" without a container
    image_digest: str  # as the launcher found it, or "none"
    image_commit: str  # recorded in the image by the Dockerfile, or "none"
    python: str
    platform: str
    packages: Mapping[str, str]  # distribution to version
    compiler: str  # that built the native libraries; "none" if none was used
    native_libraries: Mapping[str, str]  # loaded so far, with the SHA-256 of their files
    nodes: int
    cpu: str  # model of rank 0's processor
    gpu_driver: str


def identify(
    resolved: Resolved, facts: RuntimeFacts, *, shape: Path, init_checkpoint: str | None
) -> RunIdentity:
    """Collect the provenance of a run on rank 0. Hashes the starting weights and runs git.

    Raises:
        UserError: a configuration file or the model shape cannot be read.
    """
    run = resolved.config[RunConfig]
    digests = {tree_relative(path): _sha256(path) for path in resolved.files}
    config_file, config_file_sha256 = next(iter(digests.items()), (NONE, NONE))
    starting_weights, starting_weights_sha256 = name_weights(init_checkpoint)
    commit, tree_modified = git_state(tree_root())
    environ = environment()
    runs = environ.get("NEXP", "")
    given = {field.name: getattr(facts, field.name) for field in fields(facts)}
    hosts = list(dict.fromkeys(facts.hosts))
    given["hosts"] = hosts
    return RunIdentity(
        **given,
        command=command_line(),
        experiment=run.experiment,
        experiments=int(runs) if runs.isdecimal() else None,
        recipe=resolved.recipe.name,
        config_file=config_file,
        config_file_sha256=config_file_sha256,
        config_parents={name: digest for name, digest in digests.items() if name != config_file},
        model_shape=tree_relative(shape),
        model_shape_sha256=_sha256(shape),
        starting_weights=starting_weights,
        starting_weights_sha256=starting_weights_sha256,
        commit=commit,
        tree_modified=tree_modified,
        image=environ.get("CONT") or NONE,
        image_digest=environ.get("MLBERT_IMAGE_DIGEST") or NONE,
        image_commit=environ.get("MLBERT_IMAGE_COMMIT") or NONE,
        python=platform.python_version(),
        platform=platform.platform(),
        packages=package_versions(),
        compiler=native.compiler(),
        native_libraries=native.digests(),
        nodes=len(hosts),
        cpu=processor_name(),
        gpu_driver=gpu_driver(),
    )


def log_identity(event: Event, identity: RunIdentity, resolved: Resolved) -> None:
    """Log the provenance and full configuration of a run. Call between init_start and init_stop."""
    event("command", identity.command)
    event("experiment", identity.experiment)
    event("experiments", identity.experiments)
    event("recipe", identity.recipe)
    event("config_file", identity.config_file)
    event("config_file_sha256", identity.config_file_sha256)
    event("config_parents", identity.config_parents)
    event("model_shape", identity.model_shape)
    event("model_shape_sha256", identity.model_shape_sha256)
    event("starting_weights", identity.starting_weights)
    event("starting_weights_sha256", identity.starting_weights_sha256)
    event("train_data", identity.train_data)
    event("eval_data", identity.eval_data)
    event("max_sequence_length", identity.max_sequence_length)
    event("sequences_per_pack", identity.sequences_per_pack)
    event("commit", identity.commit)
    event("tree_modified", identity.tree_modified)
    event("image", identity.image)
    event("image_digest", identity.image_digest)
    event("image_commit", identity.image_commit)
    event("python", identity.python)
    event("platform", identity.platform)
    event("packages", identity.packages)
    event("compiler", identity.compiler)
    event("native_libraries", identity.native_libraries)
    event("precision", identity.precision)
    event("ops", identity.ops)
    event("nodes", identity.nodes)
    event("hosts", identity.hosts)
    event("ranks", identity.ranks)
    event("threads_per_rank", identity.threads_per_rank)
    event("cpu", identity.cpu)
    event("gpus", identity.gpus)
    event("gpu_driver", identity.gpu_driver)
    event("cuda", identity.cuda)
    event("cudnn", identity.cudnn)
    event("nccl", identity.nccl)
    event("configuration", resolved.as_configuration())


def log_ends(
    event: Event,
    limits: Limits,
    *,
    first_evaluation_samples: int,
    evaluation_interval_samples: int,
    evaluation_size: int | None,
) -> None:
    """Log the target of a run, its evaluation interval, and its limits.

    Args:
        event: logs a value under a key.
        limits: the target and limits.
        first_evaluation_samples: training sequences before the first evaluation.
        evaluation_interval_samples: training sequences between evaluations.
        evaluation_size: number of evaluation sequences; None for all.
    """
    event("target_accuracy", limits.target_accuracy)
    event("first_evaluation_samples", first_evaluation_samples)
    event("evaluation_interval_samples", evaluation_interval_samples)
    event("evaluation_size", evaluation_size)
    event("max_steps", limits.max_steps)
    event("max_samples", limits.max_samples)
    event("max_seconds", limits.max_seconds)


def log_submission(event: Event, submission: SubmissionConfig) -> None:
    """Log the submission's benchmark, organization, division and platform.

    Call before init_stop.
    """
    event("submission_benchmark", BENCHMARK)
    event("submission_org", submission.submission_org)
    event("submission_division", submission.submission_division)
    event("submission_status", "research")
    event("submission_platform", submission.submission_platform)


def log_batch_size(event: Event, global_batch_size: int, gradient_accumulation_steps: int) -> None:
    """Log the hyper-parameters that belong to neither the optimizer nor the schedule.

    Args:
        event: logs a value under a key.
        global_batch_size: sequences per optimizer step over all ranks.
        gradient_accumulation_steps: micro-batches of a step.
    """
    event("global_batch_size", global_batch_size)
    event("gradient_accumulation_steps", gradient_accumulation_steps)


def _sha256(path: Path) -> str:
    with reading(path, "Name a readable file"):
        return hashlib.sha256(path.read_bytes()).hexdigest()

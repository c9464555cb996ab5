"""Repeat the training run of a log, and judge whether the new run agrees in status,
accuracies and samples.

Floating-point sums differ between processors, so the curves diverge at some step, and the repeated
run is another draw from the same distribution. The other runs in the log's folder give its spread:
a number agrees if it is within their prediction interval, ``mean ± t * s * sqrt(1 + 1/n)`` with
Student's t. Samples cannot be negative, so their interval uses logarithms. Together the intervals
contain at least 95 % of good runs (Bonferroni). With fewer than three runs, the numbers must be
equal within `ACCURACY` and `SAMPLES`.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mlaudit.call_sites import git, has_commit, num_commits
from mlaudit.logs import Log, read_log
from mlaudit.result_set import (
    evaluations_of,
    run_file,
    samples_per_second,
    samples_to_target,
    unreadable_files,
)
from mlaudit.settings import check_exports, settings_by_env
from mlaudit.significance import FEWEST_RUNS
from mlaudit.training_program import ask
from mlbert.host.errors import UserError
from mlbert.host.files import read_plain
from mlbert.host.metrics_file import read_points
from mlbert.host.provenance import TENSORFLOW2, tree_root

IMPLEMENTATIONS = "benchmarks/bert/implementations"
_RECIPES = ("packed_lamb", "ddp_adam", "masked_lm_stored", "masked_lm_text", TENSORFLOW2)
_ONE_MACHINE = (None, "one_device", "off", "mirrored")  # values of DISTRIBUTION_STRATEGY
_SYNTHETIC = "synthetic"
# The run's number, and settings that would write elsewhere or resume another run.
_NEW = {
    "EXPERIMENT": "0",
    "RESUME": "0",
    "CACHES_CLEARED": "0",
    "TENSORBOARD_DIR": "none",
    "WANDB_PROJECT": "none",
    "WANDB_OPTIONS": "none",
    "MLFLOW_EXPERIMENT": "none",
}
_MAY_DIFFER = (
    *_NEW,
    "SEED",
    "MAX_SECONDS",
    "TOKENIZER",
    "INPUT_FILES",
    "EVAL_FILES",
    "INIT_CHECKPOINT",
)

LEVEL = 0.05  # at most this fraction of good runs is outside an interval
ACCURACY = 1e-3  # absolute; intervals are at least this wide
SAMPLES = 1e-3  # relative; likewise
LOSS = 1e-3  # relative; above it, loss curves count as different


class _DataSet(NamedTuple):
    """Settings of a data set: its folder, the address it is a copy of, the sets that it mixes,
    globs of its files; and its key in the log.
    """

    folder: str
    remote: str
    streams: str
    globs: str
    key: str


_DATA = (
    _DataSet("DATADIR_PHASE2", "DATA_REMOTE", "DATA_STREAMS", "INPUT_FILES", "train_data"),
    _DataSet("EVALDIR", "EVAL_REMOTE", "EVAL_STREAMS", "EVAL_FILES", "eval_data"),
)


@dataclass(frozen=True)
class RepeatPlan:
    """The plan for a run that repeats another."""

    recipe: str
    ranks: int
    exports: Mapping[str, str]  # the settings in the log's configuration


def read_repeatable(path: Path) -> Log:
    """Read a log of this code whose recipe can be run again. Raises UserError for other logs."""
    log = read_log(path)
    recipe = log.value("recipe")
    if (
        not isinstance(log.value("configuration"), dict)
        or recipe is None
        or not isinstance(log.value("seed"), int)
    ):
        reason = "does not name recipe, seed and configuration"
        raise UserError("log.incomplete", path, reason, "Name a log of this code")
    if recipe not in _RECIPES:
        reason = f"was written with RECIPE={recipe}"
        raise UserError(
            "log.unsupported", path, reason, "Give a log of a different recipe", _RECIPES
        )
    if log.status is None or log.first("run_start") is None:
        raise UserError(
            "log.incomplete",
            path,
            "has no run_start or no run_stop",
            "Name the log of a finished run",
        )
    if log.is_continued:
        step = log.value("resumed_from_step")
        reason = f"begins at step {step}, where its run was restarted"
        remedy = "Name the log of a run without a restart"
        raise UserError("log.incomplete", path, reason, remedy)
    return log


def make_plan(log: Log, out: Path, data: Path | None, seed: int, code: Path) -> RepeatPlan:
    """Return the settings for a run that repeats a log.

    Args:
        log: a log from `read_repeatable`.
        out: LOGDIR of the new run.
        data: folder with the data sets, named as in the log (default: the folder in the config's
            env.sh).
        seed: SEED of the new run.
        code: the tree whose code runs.

    Raises:
        UserError: the data or the model shape is missing or differs from the log's.
    """
    ranks = log.value("ranks")
    if not isinstance(ranks, int) or ranks < 1:
        raise UserError(
            "log.incomplete", log.path, "does not name its ranks", "Name a log of this code"
        )
    if (
        log.value("recipe") == TENSORFLOW2
        and log.setting("DISTRIBUTION_STRATEGY") not in _ONE_MACHINE
    ):
        reason = "ran in TensorFlow on a TPU or in several processes"
        raise UserError(
            "log.unsupported", log.path, reason, "Start such a run with its own launcher"
        )
    exports = dict(_settings(log))
    exports |= {env: value for env, value in _NEW.items() if env in exports}
    exports |= {"LOGDIR": str(out), "SEED": str(seed), "BERT_CONFIG": str(_model_shape(log, code))}
    if (config := _config_file(log, code)) is not None:
        # Without it the TensorFlow program uses other defaults.
        exports["CONFIG_FILE"] = str(config)
    if (vocabulary := log.setting("TOKENIZER")) is not None:
        exports["TOKENIZER"] = _find_vocabulary(str(vocabulary), data)
    if log.value("train_data") != _SYNTHETIC:
        for named in _DATA:
            exports |= _find_data(log, named, exports, data, code)
    start = log.setting("INIT_CHECKPOINT")
    if start is not None and "://" not in start:
        if not Path(start).exists() and not Path(f"{start}.index").exists():
            reason = f"{start} is missing, and the run started from it"
            raise UserError("file.missing", "INIT_CHECKPOINT", reason, "Put it there")
        exports["INIT_CHECKPOINT"] = str(Path(start).absolute())  # the run starts in another folder
    if log.status == "success" and log.setting("MAX_SECONDS") is not None:
        exports["MAX_SECONDS"] = "none"  # a slower machine may need more time for the same result
    return RepeatPlan(str(log.value("recipe")), ranks, exports)


@contextlib.contextmanager
def code_of(log: Log, tree: Path, exact: bool) -> Iterator[tuple[Path, str]]:
    """Yield the checkout to run and a note on how its code differs from the log's (empty if it does
    not).

    Without ``exact`` this is ``tree``, otherwise a temporary worktree of the log's commit. Raises
    UserError if the history does not have that commit.
    """
    commit = log.value("commit")
    if not has_commit(tree, commit):
        if exact:
            reason = f"commit {commit} is not in the history of {tree}"
            raise UserError("submission.commit", "--exact", reason, "Fetch it, or leave it out")
        yield (
            tree,
            f"The history here does not have the log's commit {commit}; the present code runs.",
        )
        return
    modified = "The log's tree had been modified." if log.value("tree_modified") else ""
    if not exact:
        later = num_commits(tree, commit, "HEAD")
        note = (
            f"The present code runs, {later} commits after the log's "
            "(--exact runs those of the log)."
        )
        yield tree, " ".join(filter(None, (note if later else "", modified)))
        return
    with tempfile.TemporaryDirectory(prefix="mlbert-repeat-") as folder:
        place = Path(folder) / "tree"
        if git(tree, "worktree", "add", "--detach", str(place), commit) is None:
            reason = f"git cannot check out {commit} in a worktree"
            raise UserError("program.failed", tree, reason, "See git worktree list")
        try:
            yield place, f"The code of the log's commit {commit[:12]} runs. {modified}".rstrip()
        finally:
            git(tree, "worktree", "remove", "--force", str(place))


def other_settings(log: Log, repeated: Log) -> list[str]:
    """Describe the settings of a log's configuration that the repeated run did not adopt."""
    texts = []
    for env, row in log.value("configuration").items():
        known = settings_by_env().get(env)
        old = row.get("value")
        new = repeated.setting(env)
        if old != new and env not in _MAY_DIFFER and (known is None or known.kind is not Path):
            texts.append(f"{env} {old}, here {'not set' if new is None else new}")
    return texts


def _settings(log: Log) -> Iterator[tuple[str, str]]:
    """Yield the exports of the log's configuration, with none only for settings that accept it.

    The TensorFlow program rejects settings that it does not read, which its log lists at their
    defaults. So it gets only the settings that were given.
    """
    for env, row in log.value("configuration").items():
        known = settings_by_env().get(env)
        value = row.get("value")
        origin = str(row.get("origin"))
        if log.value("recipe") == TENSORFLOW2 and origin.startswith(("recipe ", "not set")):
            continue
        if value is not None:
            yield env, str(int(value) if isinstance(value, bool) else value)
        elif known is None or known.optional:
            yield env, "none"


def _model_shape(log: Log, code: Path) -> Path:
    name = log.value("model_shape")
    digest = log.value("model_shape_sha256")
    path = code / str(name)  # an absolute name stays as it is
    if hashlib.sha256(read_plain(path, "Put the log's model shape there")).hexdigest() != digest:
        raise UserError(
            "data.checksum",
            path,
            "is not the log's model shape: its SHA-256 differs",
            "Try --exact",
        )
    return path


def _find_vocabulary(name: str, data: Path | None) -> str:
    """Return a vocabulary, from the data folder if it is not at the log's path;
    names of models stay as they are.
    """
    places = [Path(name), *([data / Path(name).name] if data is not None else [])]
    return next((str(place.absolute()) for place in places if place.exists()), name)


def _find_data(
    log: Log, named: _DataSet, exports: Mapping[str, str], data: Path | None, code: Path
) -> dict[str, str]:
    """Return the exports of a data set: its folder, and its globs in that folder.

    Raises UserError if it is missing or not the one in the log.
    """
    logged = Path(str(log.setting(named.folder)))
    globs = str(log.setting(named.globs) or "")
    if "://" in globs:
        return {}
    remote = log.setting(named.remote)
    places = (
        [data / logged.name] if data is not None else [*_site_path(log, named.folder, code), logged]
    )
    if remote is not None:
        places.append(Path(exports["LOGDIR"]) / "copies" / logged.name)
    path = next(
        (place for place in places if place.is_dir()), None if remote is None else places[-1]
    )
    if path is None:
        remedy = (
            "Prepare it (quickstart.sh does for the demonstrations), "
            "and name its folder with --data"
        )
        raise UserError(
            "file.missing",
            named.folder,
            f"the log's {logged.name} set is not at {places[0]}",
            remedy,
        )
    path = path.absolute()
    if globs:  # only TensorFlow knows which files match; `judge` compares their identity
        inside = [str(path / Path(pattern.strip()).name) for pattern in globs.split(",")]
        return {named.folder: str(path), named.globs: ",".join(inside)}
    words = ["prepare", "identity", str(path)]
    if exports.get("TOKENIZER", "none") != "none":
        words += ["--tokenizer", exports["TOKENIZER"]]
        streams = log.setting(named.streams)
        words += [] if streams is None else ["--streams", str(streams)]
        words += [] if remote is None else ["--remote", str(remote)]
    found = ask(words)
    if found != (wanted := log.value(named.key)):
        # A prefix is enough to see that the digests differ.
        reason = (
            f"is not the log's {logged.name} set: {found[:19]}... instead of {str(wanted)[:19]}..."
        )
        remedy = "Prepare it with the log's code and text, or name another folder with --data"
        raise UserError("data.checksum", path, reason, remedy)
    return {named.folder: str(path)}


def _config_file(log: Log, code: Path) -> Path | None:
    """Return the config that the log's run sourced, or None if it does not exist."""
    path = code / str(log.value("config_file"))
    return path if path.is_file() and path.suffix == ".sh" else None


def _site_path(log: Log, env: str, code: Path) -> Iterator[Path]:
    """Yield the path of the data in the log's config, if it is absolute."""
    config = _config_file(log, code)
    if config is not None:
        export = check_exports(config).get(env)
        # Use the user's tree even if a worktree of the log's commit runs, which has no data.
        path = (
            Path(export.text.replace("${tree_dir}", str(tree_root())))
            if export is not None
            else None
        )
        if path is not None and path.is_absolute() and "$" not in str(path):
            yield path


@dataclass(frozen=True)
class Row:
    """One number or word that is compared."""

    name: str
    log: str
    repeated: str
    allowed: str
    agrees: bool


def judge(log: Log, repeated: Log, siblings: Sequence[Log]) -> list[Row]:
    """Judge a repeated run.

    ``siblings`` are the log and the other runs in its folder with the same settings.
    """
    rows = [
        Row(
            "status",
            str(log.status),
            str(repeated.status),
            str(log.status),
            log.status == repeated.status,
        )
    ]
    for name, old, new in (
        (data.key, log.value(data.key), repeated.value(data.key)) for data in _DATA
    ):
        if old != new:
            rows.append(Row(name, str(old), str(new), str(old), agrees=False))
    has_spread = len(siblings) >= FEWEST_RUNS
    wanted = evaluations_of(log)
    got = evaluations_of(repeated)
    drawn = [evaluations_of(run) for run in siblings] if has_spread else [wanted]
    # After the first run reaches the target, only slower runs with lower accuracies remain.
    length = min(map(len, drawn))
    targets = [value for run in siblings if (value := samples_to_target(run)) is not None]
    mine = samples_to_target(log)
    other = samples_to_target(repeated)
    level = LEVEL / (length + 1)
    for index in range(length):
        samples = wanted[index].samples
        accuracy = wanted[index].accuracy
        low, high = _interval([run[index].accuracy for run in drawn], level, ACCURACY)
        # A run that reached the target sooner has no more evaluations; samples to target covers it.
        found = got[index].accuracy if index < len(got) else None
        if found is None and other is not None and has_spread:
            continue
        agrees = found is not None and low <= found <= high
        shown = "none" if found is None else f"{found:.4f}"
        rows.append(
            Row(
                f"accuracy after {samples:,.0f}",
                f"{accuracy:.4f}",
                shown,
                f"{low:.4f}–{high:.4f}",
                agrees,
            )
        )
    if mine is not None and other is not None:
        drawn_samples = targets if has_spread else [mine]
        logarithms = [math.log(value) for value in drawn_samples]
        low, high = map(math.exp, _interval(logarithms, level, SAMPLES))
        allowed = f"{low:,.0f}–{high:,.0f}"
        rows.append(
            Row("samples to target", f"{mine:,.0f}", f"{other:,.0f}", allowed, low <= other <= high)
        )
    return rows


def remarks(log: Log, repeated: Log, same_seed: bool) -> list[str]:
    """Return notes that are not judged: unreadable files, equality, order of the data,
    losses, precision, speed.
    """
    notes = unreadable_files(log.path)
    if same_seed:
        pairs = list(zip(evaluations_of(log), evaluations_of(repeated), strict=False))
        equal = sum(a.accuracy == b.accuracy for a, b in pairs)
        notes.append(f"{equal} of {len(pairs)} accuracies are equal to the last digit.")
        if any(a.samples != b.samples for a, b in pairs):
            notes.append(
                "Evaluations have different sample counts: "
                "the code distributes samples in a different order."
            )
        notes.append(_losses(log, repeated))
    for key in ("precision", "ops"):
        if log.value(key) != repeated.value(key):
            notes.append(
                f"The {key} of this machine differ from the log's "
                "(mlbert submission diff shows them)."
            )
    speeds = samples_per_second(log), samples_per_second(repeated)
    if None not in speeds:
        notes.append(
            f"Speed, not judged: {speeds[0]:,.4g} samples/s in the log, {speeds[1]:,.4g} here."
        )
    return notes


def _interval(values: Sequence[float], level: float, least: float) -> tuple[float, float]:
    """Return the prediction interval at ``1 - level``,
    at least ``least`` to each side of the mean.
    """
    mean = statistics.fmean(values)
    width = 0.0
    if len(values) >= FEWEST_RUNS:
        from scipy.stats import t

        deviation = statistics.stdev(values) * math.sqrt(1 + 1 / len(values))
        width = float(t.ppf(1 - level / 2, len(values) - 1)) * deviation
    return mean - max(width, least), mean + max(width, least)


def _losses(log: Log, repeated: Log) -> str:
    """Describe where the loss curves diverge."""
    a, b = (_loss_of_steps(run_file(run.path, "metrics.jsonl")) for run in (log, repeated))
    if not a or not b:
        return "The log has no readable metrics.jsonl: losses are not compared."
    both = sorted(a.keys() & b.keys())
    for step in both:
        if not math.isclose(a[step], b[step], rel_tol=LOSS):
            return (
                f"Losses differ by more than {LOSS:g} from step {step} on "
                f"({a[step]:.5f}, {b[step]:.5f})."
            )
    return f"Losses of all {len(both)} logged steps agree to {LOSS:g}."


def _loss_of_steps(metrics: Path | None) -> dict[int, float]:
    try:
        points = read_points(metrics)[0] if metrics is not None else []
    except UserError:  # see `unreadable_files`
        points = []
    return {point["step"]: point["loss"] for point in points if point["kind"] == "step"}

"""What it takes to run a log's training again: its settings, its data as it lies here, its seed, its code.

Whether a run that was repeated agrees with its log: status, accuracies and samples to the target.

Floating-point sums differ from processor to processor, so curves drift apart from some step on, and a repeated run is
another draw of the same distribution. The other runs beside the log tell its spread: a number agrees that lies in their
prediction interval, ``mean ± t * s * sqrt(1 + 1/n)`` of Student's t; for samples, which cannot be negative, of their
logarithms. The intervals together hold at least 95 % of good runs (Bonferroni). Where fewer than three runs lie there,
the numbers have to be equal up to `ACCURACY` and `SAMPLES`.
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
from typing import Any

from mlbert.config.sections import settings_by_env
from mlbert.config.sources import check_exports
from mlbert.data.formats.open import describe
from mlbert.host.errors import UserError
from mlbert.host.provenance import TENSORFLOW2, tree_root
from mlbert.mlperf.call_sites import git, has_commit, num_commits
from mlbert.mlperf.compare import FEWEST_RUNS
from mlbert.mlperf.logs import Log, read_log
from mlbert.mlperf.metrics import read_points
from mlbert.mlperf.result_set import evaluations_of, run_file, samples_per_second, samples_to_target, setting

IMPLEMENTATIONS = "benchmarks/bert/implementations"
_RECIPES = ("packed_lamb", "ddp_adam", TENSORFLOW2)
_DATA = {"DATADIR_PHASE2": "train_data", "EVALDIR": "eval_data"}  # setting -> key of the data's identity
_SYNTHETIC = "synthetic"
# The folder and the number of the run, and what would write elsewhere or go on with another run.
_NEW = {
    **{"EXPERIMENT": "0", "RESUME": "0", "CACHES_CLEARED": "0"},
    **{"TENSORBOARD_DIR": "none", "WANDB_PROJECT": "none"},
}


@dataclass(frozen=True)
class RepeatPlan:
    """A training run that is to repeat another."""

    recipe: str
    ranks: int
    exports: Mapping[str, str]  # the settings of the log's configuration


def read_repeatable(path: Path) -> Log:
    """A log of this code whose recipe can be run again. Raises UserError: it is another log."""
    log = read_log(path)
    recipe = log.value("recipe")
    if not isinstance(log.value("configuration"), dict) or recipe is None or not isinstance(log.value("seed"), int):
        raise UserError(
            "log.incomplete", path, "does not tell recipe, seed and configuration", "Name a log of this code"
        )
    if recipe not in _RECIPES:
        raise UserError(
            "log.unsupported", path, f"is of recipe {recipe}", f"Those of {', '.join(_RECIPES)} can be repeated"
        )
    if log.status is None or log.first("run_start") is None:
        raise UserError("log.incomplete", path, "has no run_start or no run_stop", "Name the log of a finished run")
    return log


def make_plan(log: Log, out: Path, data: Path | None, seed: int, code: Path) -> RepeatPlan:
    """The settings for a run into ``out``.

    Args:
        log: of `read_repeatable`.
        out: its LOGDIR.
        data: folder of the sets, by the names that they have in the log; None: where the config's env.sh says.
        seed: its SEED.
        code: the tree that runs.

    Raises:
        UserError: the data or the model shape is not here, or is another.
    """
    ranks = log.value("ranks")
    if not isinstance(ranks, int) or ranks < 1:
        raise UserError("log.incomplete", log.path, "does not tell its ranks", "Name a log of this code")
    if log.value("recipe") == TENSORFLOW2 and setting(log, "DISTRIBUTION_STRATEGY") not in (None, "one_device", "off"):
        raise UserError(
            "log.unsupported", log.path, "ran in TensorFlow on several devices", "Start such a run by its own launcher"
        )
    exports = dict(_settings(log))
    exports |= {env: value for env, value in _NEW.items() if env in exports}
    exports |= {"LOGDIR": str(out), "SEED": str(seed), "BERT_CONFIG": str(_model_shape(log, code))}
    if (config := _config_file(log, code)) is not None:
        exports["CONFIG_FILE"] = str(config)  # without it TensorFlow's program takes other defaults
    if log.value("train_data") != _SYNTHETIC:
        exports |= {env: str(_find_data(log, env, data, code)) for env in _DATA}
    start = setting(log, "INIT_CHECKPOINT")
    if start is not None and not Path(start).exists():
        raise UserError(
            "file.missing", "INIT_CHECKPOINT", f"{start} is not here, and the run began with it", "Put it there"
        )
    if log.status == "success" and setting(log, "MAX_SECONDS") is not None:
        exports["MAX_SECONDS"] = "none"  # a slower machine may take longer to the same result
    return RepeatPlan(str(log.value("recipe")), ranks, exports)


@contextlib.contextmanager
def code_of(log: Log, tree: Path, exact: bool) -> Iterator[tuple[Path, str]]:
    """The tree to run, and a sentence where it is not the log's: this one or, with ``exact``, a worktree of the log's
    commit, gone afterwards. Raises UserError: the history does not have that commit."""
    commit = log.value("commit")
    if not has_commit(tree, commit):
        if exact:
            raise UserError(
                "submission.commit",
                "--exact",
                f"commit {commit} is not in the history of {tree}",
                "Fetch it, or leave it out",
            )
        yield tree, f"The history here does not have the log's commit {commit}; the present code runs."
        return
    modified = "The log's tree had been modified." if log.value("tree_modified") else ""
    if not exact:
        later = num_commits(tree, commit, "HEAD")
        note = f"The present code runs, {later} commits after the log's (--exact runs those of the log)."
        yield tree, " ".join(filter(None, (note if later else "", modified)))
        return
    with tempfile.TemporaryDirectory(prefix="mlbert-repeat-") as folder:
        place = Path(folder) / "tree"
        if git(tree, "worktree", "add", "--detach", str(place), commit) is None:
            raise UserError("program.failed", tree, f"git cannot check out {commit} beside it", "See git worktree list")
        try:
            yield place, f"The code of the log's commit {commit[:12]} runs. {modified}".rstrip()
        finally:
            git(tree, "worktree", "remove", "--force", str(place))


def other_settings(log: Log, repeated: Log) -> list[str]:
    """The settings of a log's configuration that the repeated run did not take over, in words."""
    told = []
    for env, row in log.value("configuration").items():
        known, old, new = settings_by_env().get(env), row.get("value"), setting(repeated, env)
        if old != new and env not in (*_NEW, "SEED", "MAX_SECONDS") and (known is None or known.kind is not Path):
            told.append(f"{env} {old}, here {'not set' if new is None else new}")
    return told


def _settings(log: Log) -> Iterator[tuple[str, str]]:
    """What the log's configuration exports; a none only where it is a value. TensorFlow's program refuses what it does
    not read, which stands in the log at its default: it gets what was given."""
    for env, row in log.value("configuration").items():
        known, value, origin = settings_by_env().get(env), row.get("value"), str(row.get("origin"))
        if log.value("recipe") == TENSORFLOW2 and origin.startswith(("recipe ", "not set")):
            continue
        if value is not None:
            yield env, _as_export(value)
        elif known is None or known.optional:
            yield env, "none"


def _as_export(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _model_shape(log: Log, code: Path) -> Path:
    name, digest = log.value("model_shape"), log.value("model_shape_sha256")
    path = code / str(name)  # an absolute name stays as it is
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(
            "file.unreadable", path, f"the log's model shape cannot be read ({error.strerror})", "Put it there"
        ) from None
    if found != digest:
        raise UserError("data.checksum", path, "is not the log's model shape: its SHA-256 is another", "Try --exact")
    return path


def _find_data(log: Log, env: str, data: Path | None, code: Path) -> Path:
    """The folder of a set, which must be the one that the log names."""
    there, wanted = Path(str(setting(log, env))), log.value(_DATA[env])
    places = [data / there.name] if data is not None else [*_site_path(log, env, code), there]
    path = next((place for place in places if place.is_dir()), None)
    if path is None:
        remedy = "Prepare it (quickstart.sh does for the demonstrations), and name its folder with --data"
        raise UserError("file.missing", env, f"the log's {there.name} set is not at {places[0]}", remedy)
    found = f"sha256:{describe(path).identity}"
    if found != wanted:
        # Enough of a digest to tell two apart by eye.
        reason = f"is not the log's {there.name} set: {found[:19]}... instead of {str(wanted)[:19]}..."
        raise UserError(
            "data.checksum", path, reason, "Prepare it with the log's code and text, or name another folder with --data"
        )
    return path.resolve()


def _config_file(log: Log, code: Path) -> Path | None:
    """The config that the log's run sourced, where it is here."""
    path = code / str(log.value("config_file"))
    return path if path.is_file() and path.suffix == ".sh" else None


def _site_path(log: Log, env: str, code: Path) -> Iterator[Path]:
    """Where the log's config says that the data lies in this tree."""
    config = _config_file(log, code)
    if config is not None:
        export = check_exports(config).get(env)
        # The tree of the user, also where a worktree of the log's commit runs: data is no part of that.
        path = Path(export.text.replace("${tree_dir}", str(tree_root()))) if export is not None else None
        if path is not None and path.is_absolute() and "$" not in str(path):
            yield path


LEVEL = 0.05  # of good runs at most fall out of an interval
ACCURACY = 1e-3  # absolute: intervals are at least as wide
SAMPLES = 1e-3  # relative, likewise
LOSS = 1e-3  # relative: where loss curves count as different


@dataclass(frozen=True)
class Row:
    """One number or word that is judged."""

    name: str
    log: str
    repeated: str
    allowed: str
    agrees: bool


def judge(log: Log, repeated: Log, siblings: Sequence[Log]) -> list[Row]:
    """Judge a repeated run; ``siblings`` are the runs of the same settings beside the log, it among them."""
    rows = [Row("status", str(log.status), str(repeated.status), str(log.status), log.status == repeated.status)]
    has_spread = len(siblings) >= FEWEST_RUNS
    wanted, got = evaluations_of(log), evaluations_of(repeated)
    drawn = [evaluations_of(run) for run in siblings] if has_spread else [wanted]
    # Behind the first that reached the target only the slow ones are left, whose accuracies are lower.
    length = min(map(len, drawn))
    targets = [value for run in siblings if (value := samples_to_target(run)) is not None]
    mine, other = samples_to_target(log), samples_to_target(repeated)
    level = LEVEL / (length + 1)
    for index in range(length):
        samples, accuracy = wanted[index].samples, wanted[index].accuracy
        low, high = _interval([run[index].accuracy for run in drawn], level, ACCURACY)
        # A run that reached the target sooner has no more evaluations: samples to the target tells of it.
        found = got[index].accuracy if index < len(got) else None
        if found is None and other is not None and has_spread:
            continue
        agrees = found is not None and low <= found <= high
        shown = "none" if found is None else f"{found:.4f}"
        rows.append(Row(f"accuracy after {samples:,.0f}", f"{accuracy:.4f}", shown, f"{low:.4f}–{high:.4f}", agrees))
    if mine is not None and other is not None:
        logarithms = [math.log(value) for value in (targets if has_spread else [mine])]
        low, high = map(math.exp, _interval(logarithms, level, SAMPLES))
        allowed = f"{low:,.0f}–{high:,.0f}"
        rows.append(Row("samples to target", f"{mine:,.0f}", f"{other:,.0f}", allowed, low <= other <= high))
    return rows


def remarks(log: Log, repeated: Log, same_seed: bool) -> list[str]:
    """Sentences about what is told and not judged: equality, order of the data, losses, precision, speed."""
    told = []
    if same_seed:
        pairs = list(zip(evaluations_of(log), evaluations_of(repeated), strict=False))
        equal = sum(a.accuracy == b.accuracy for a, b in pairs)
        told.append(f"{equal} of {len(pairs)} accuracies are equal to the last digit.")
        if any(a.samples != b.samples for a, b in pairs):
            told.append("Evaluations came after other numbers of samples: the code deals them out in another order.")
        told.append(_losses(log, repeated))
    for key in ("precision", "ops"):
        if log.value(key) != repeated.value(key):
            told.append(f"The {key} of this machine are not the log's (mlbert submission diff shows them).")
    speeds = samples_per_second(log), samples_per_second(repeated)
    if None not in speeds:
        told.append(f"Speed, not judged: {speeds[0]:,.4g} samples/s in the log, {speeds[1]:,.4g} here.")
    return told


def _interval(values: Sequence[float], level: float, least: float) -> tuple[float, float]:
    """Where the next value lies, but for ``level`` of them; at least ``least`` to either side of the mean."""
    mean, width = statistics.fmean(values), 0.0
    if len(values) >= FEWEST_RUNS:
        from scipy.stats import t

        deviation = statistics.stdev(values) * math.sqrt(1 + 1 / len(values))
        width = float(t.ppf(1 - level / 2, len(values) - 1)) * deviation
    return mean - max(width, least), mean + max(width, least)


def _losses(log: Log, repeated: Log) -> str:
    """Where the loss curves part."""
    a, b = (_loss_of_steps(run_file(run.path, "metrics.jsonl")) for run in (log, repeated))
    if not a or not b:
        return "No metrics.jsonl lies beside the log: losses are not compared."
    both = sorted(a.keys() & b.keys())
    for step in both:
        if not math.isclose(a[step], b[step], rel_tol=LOSS):
            return f"Losses differ by more than {LOSS:g} from step {step} on ({a[step]:.5f}, {b[step]:.5f})."
    return f"Losses of all {len(both)} logged steps agree to {LOSS:g}."


def _loss_of_steps(metrics: Path | None) -> dict[int, float]:
    if metrics is None:
        return {}
    points, _ = read_points(metrics)
    return {point["step"]: point["loss"] for point in points if point["kind"] == "step"}

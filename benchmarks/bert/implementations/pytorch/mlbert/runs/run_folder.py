"""The folder of one run: its paths, its seed, and the curve of its metrics."""

from __future__ import annotations

import io
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlbert.config.resolution import Resolved
from mlbert.host.errors import UserError
from mlbert.host.files import write_atomically, writing
from mlbert.host.json_files import read_json
from mlbert.host.metrics_file import read_points
from mlbert.runs.config import RunConfig
from mlbert.runs.identity import RunIdentity
from mlbert.runs.progress import RunOutcome
from mlbert.runs.step_folders import remove_checkpoints, steps_in

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SETTINGS = "settings.txt"
_SUMMARY = "summary.json"  # marks a finished run
_RANKS = "ranks.txt"
_FILES = ("metrics.jsonl", "config.json", _SETTINGS, _RANKS, "curve.png", _SUMMARY)
_LOG_MARK = b":::MLLOG"  # first bytes of an MLPerf log
_FOLDERS = ("weights", "huggingface", "checkpoints")


@dataclass(frozen=True)
class RunFolder:
    """Paths of one experiment."""

    log: Path
    folder: Path

    @classmethod
    def of(cls, run: RunConfig) -> RunFolder:
        """Return the paths that LOGDIR and EXPERIMENT name."""
        return cls.at(run.output_dir, run.experiment)

    @classmethod
    def at(cls, base: Path, experiment: int) -> RunFolder:
        """Return the paths of one experiment below ``base``."""
        return cls(base / f"result_{experiment}.txt", base / f"run_{experiment}")

    def prepare(self, resume: bool, may_exist: bool = False) -> None:
        """Create the folder.

        Raises UserError instead of overwriting a run,
        unless the run in it is to be extended or replaced (``may_exist``).
        """
        with writing(self.folder, "Set LOGDIR to a writable folder"):
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / ".writable"
            probe.write_bytes(b"")
            probe.unlink()
        self._refuse_special_files()
        if may_exist:
            return
        self.refuse_finished()
        if resume or not self.log.exists():
            return
        if self.has_trained:
            remedy = "Set RESUME=1 to continue it, or remove it with its run folder"
            raise UserError("run.unfinished", self.log, "is the log of an unfinished run", remedy)
        if "run_start" in self.log.read_text(encoding="utf-8", errors="replace"):
            self.set_log_aside()

    def refuse_finished(self) -> None:
        """Raise UserError if the folder contains a finished run."""
        if self.is_finished:
            reason = "contains a finished run"
            raise UserError(
                "run.exists", self.folder, reason, "Set another LOGDIR or EXPERIMENT, or remove it"
            )

    def _refuse_special_files(self) -> None:
        """Raise UserError for a pipe or device in place of a file,
        which would block or lose what is written.
        """
        expected = {self.log: Path.is_file, **{self.folder / name: Path.is_file for name in _FILES}}
        expected |= {self.folder / name: Path.is_dir for name in _FOLDERS}
        for path, is_right in expected.items():
            if os.path.lexists(path) and not is_right(path):
                kind = "file" if is_right is Path.is_file else "folder"
                reason = f"is in the way: not a plain {kind}"
                raise UserError("file.in-the-way", path, reason, "Remove it, or set another LOGDIR")

    @property
    def is_finished(self) -> bool:
        """True if the run has ended and written its summary."""
        return (self.folder / _SUMMARY).exists()

    def finished_count(self, unit: str = "steps") -> int | None:
        """Return the steps, or the tokens, of a finished run; None if it is not finished.

        Raises UserError if its summary is damaged.
        """
        if not self.is_finished:
            return None
        summary = self.folder / _SUMMARY
        remedy = "Move it away, or use another folder"
        count = read_json(summary, remedy).get(unit)
        if not isinstance(count, int):
            raise UserError("file.in-the-way", summary, "is not the summary of a run", remedy)
        return count

    @property
    def checkpoint_steps(self) -> list[int]:
        """The steps of the checkpoints, in order."""
        return steps_in(self.folder / "checkpoints")

    @property
    def has_trained(self) -> bool:
        """True if there is a metric or a checkpoint of a step."""
        metrics = self.folder / "metrics.jsonl"
        return bool(self.checkpoint_steps) or (metrics.exists() and metrics.stat().st_size > 0)

    def reopen(self) -> None:
        """Make a finished run unfinished, so that it can be extended.

        Raises UserError if its summary is not ours.
        """
        if self.finished_count() is None:
            return
        summary = self.folder / _SUMMARY
        with writing(summary, "Set LOGDIR to a writable folder"):
            summary.unlink()

    def remove_run(self) -> None:
        """Remove what would be taken for a part of the run that replaces this one: checkpoints, the
        logs of interrupted parts, and the summary. The new run overwrites its other files.

        Raises UserError, before it removes anything,
        if a checkpoint was not written by this program.
        """
        self.finished_count()  # checks the mark of the summary
        remove_checkpoints(self.folder / "checkpoints")
        self.reopen()
        for part in self.log.parent.glob(f"{self.log.stem}.part*.txt"):
            with writing(part, "Remove it"):
                if part.is_file() and part.read_bytes().startswith(_LOG_MARK):
                    part.unlink()

    def set_log_aside(self) -> None:
        """Rename the log of an interrupted part so that no checker reads it as a result."""
        if self.log.exists():
            taken = (self.log.with_suffix(f".part{i}.txt") for i in range(1, 10_000))
            self.log.rename(next(path for path in taken if not path.exists()))

    def settings_summary(self, resolved: Resolved, notes: Sequence[str]) -> list[str]:
        """Return lines for the screen: how many settings differ from the defaults and where the
        table of all is, warnings, and notes.
        """
        number = len(resolved.changed())
        return [
            f"settings: {number} differ from the defaults of {resolved.recipe.name}, "
            f"see {self.folder / _SETTINGS}",
            *(f"warning: {warning}" for warning in resolved.warnings),
            *notes,
        ]

    def write_ranks(self, text: str) -> Path:
        """Write the table of the ranks, and return its path."""
        path = self.folder / _RANKS
        write_atomically(path, text)
        return path

    def write_settings(self, resolved: Resolved) -> None:
        """Write what differs from the recipe's defaults, then the table of all settings.

        Raises UserError if it cannot be written.
        """
        lines = [
            f"# Not the defaults of {resolved.recipe.name}:",
            *(f"#   {change}" for change in resolved.changed()),
            "# All settings, each with its key and origin:",
            *resolved.as_lines(),
            "",
        ]
        write_atomically(self.folder / _SETTINGS, "\n".join(lines))

    def write_record(self, resolved: Resolved, seed: int, identity: RunIdentity) -> dict[str, Any]:
        """Write the resolved configuration, seed and provenance to ``config.json``,
        and return its content.
        """
        record = {**json.loads(resolved.as_json()), "seed": seed, "provenance": asdict(identity)}
        write_atomically(self.folder / "config.json", json.dumps(record, indent=2) + "\n")
        return record


def summarize(
    outcome: RunOutcome,
    *,
    packs_per_rank: int | None,
    target_accuracy: float | None,
    seed: int,
    ranks: int,
) -> dict[str, object]:
    """Return the numbers of ``summary.json`` common to all frameworks.

    Rates are per second of training. ``packs_per_rank``: of all updates; None if unknown.
    """
    state = outcome.state
    seconds = max(state.train_seconds, 1e-9)
    packs = (packs_per_rank or 0) * ranks
    return {
        "status": outcome.status,
        "reason": outcome.reason,
        "seconds_to_train": round(outcome.seconds, 3),
        "accuracy": state.accuracy,
        "target_accuracy": target_accuracy,
        "samples": state.samples,
        "steps": state.step,
        "skipped_steps": state.skipped_steps,
        "tokens": state.tokens,
        "sequences_per_pack": round(state.samples / packs, 4) if packs else None,
        "samples_per_second": round(state.samples / seconds, 1),
        "tokens_per_second": round(state.tokens / seconds),
        "loader_share": state.loader_share,
        "model_flops_per_second_per_rank": round(state.flops / seconds / ranks),
        "seed": seed,
        "ranks": ranks,
    }


def choose_seed(run: RunConfig, paths: RunFolder) -> int:
    """Return SEED; if it is not set, a resumed run's original seed,
    or a random one from the system.
    """
    if run.seed is not None:
        return run.seed
    record = paths.folder / "config.json"
    remedy = "Set SEED, or start anew"
    if run.resume and record.exists():
        try:
            return int(read_json(record, remedy)["seed"])
        except (KeyError, TypeError):
            raise UserError(
                "run.damaged", record, "does not contain the seed of the interrupted run", remedy
            ) from None
    return secrets.randbelow(2**31)


def write_curve(folder: Path, summary: Mapping[str, Any]) -> None:
    """Draw loss and accuracy of ``metrics.jsonl`` over samples and time, with the summary's target
    and the accuracies from LOGDIR's ``data/baselines.json``.
    """
    points, _ = read_points(folder / "metrics.jsonl")
    figure = curve(
        folder.name, points, summary, _baselines(folder.parent / "data" / "baselines.json")
    )
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    write_atomically(folder / "curve.png", picture.getvalue())


def curve(
    name: str,
    points: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    baselines: Mapping[str, float],
) -> Figure:
    """Return a figure of loss and accuracy over samples and seconds,
    with lines for the target and each baseline.
    """
    from matplotlib.figure import (
        Figure,
    )  # pyplot, and a layout that adapts, would cost another second each

    steps = [point for point in points if point["kind"] == "step"]
    evaluations = [point for point in points if point["kind"] == "evaluation"]
    target = summary["target_accuracy"]
    levels = [] if target is None else [(f"target {target:.4g}", target, "--")]
    levels += [(f"{words} {level:.3f}", level, ":") for words, level in baselines.items()]
    figure = Figure(figsize=(11, 4.4))
    place = {"left": 0.07, "right": 0.93, "bottom": 0.2, "wspace": 0.25}
    labels = ("training samples", "seconds since run_start")
    for axis, x, label in zip(
        figure.subplots(1, 2, sharey=True, gridspec_kw=place),
        ("samples", "seconds"),
        labels,
        strict=True,
    ):
        axis.plot([p[x] for p in steps], [p["loss"] for p in steps], color="tab:blue", linewidth=1)
        axis.set_xlabel(label)
        accuracy = axis.twinx()
        reached = [p["eval_accuracy"] for p in evaluations]
        accuracy.plot([p[x] for p in evaluations], reached, color="tab:orange", marker=".")
        for words, level, dashes in levels:
            accuracy.axhline(
                level, color="black" if dashes == "--" else "gray", linestyle=dashes, label=words
            )
        accuracy.set_ylim(bottom=0)
        accuracy.set_ylabel("accuracy, evaluation set", color="tab:orange")
        if x == "samples":
            axis.set_ylabel("training loss", color="tab:blue")
    if levels:
        figure.legend(*accuracy.get_legend_handles_labels(), loc="lower center", ncols=len(levels))
    reached_words = f"accuracy {summary['accuracy']:.4f} after {summary['seconds_to_train']:.1f} s"
    figure.suptitle(f"{name}: {summary['status']}, {reached_words}", parse_math=False)
    return figure


def _baselines(path: Path) -> dict[str, float]:
    """Return the accuracies of guessing, as far as they can be read from the file."""
    try:
        record = read_json(path, "")
    except UserError:
        return {}
    known = {
        "most frequent token": record.get("most_frequent_accuracy"),
        "bigram": record.get("bigram_accuracy"),
    }
    return {
        name: float(level)
        for name, level in known.items()
        if isinstance(level, float) and 0 <= level <= 1
    }

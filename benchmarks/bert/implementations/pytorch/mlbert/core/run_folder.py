"""The folder of one run: its paths, its seed, the curve drawn of its metrics."""

from __future__ import annotations

import io
import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlbert.core.config import Resolved
from mlbert.core.errors import UserError
from mlbert.core.files import write_small
from mlbert.core.identity import Identity
from mlbert.core.json_files import read_json
from mlbert.core.metrics_file import read_points
from mlbert.core.progress import Outcome
from mlbert.core.settings import TrainConfig


@dataclass(frozen=True)
class RunFolder:
    """Paths of one experiment."""

    log: Path
    folder: Path

    @classmethod
    def of(cls, config: TrainConfig) -> RunFolder:
        """The paths that LOGDIR and EXPERIMENT name."""
        base = config.output_dir
        return cls(base / f"result_{config.experiment}.txt", base / f"run_{config.experiment}")

    def prepare(self, resume: bool) -> None:
        """Makes the folder; refuses to overwrite a finished run."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / ".writable"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise UserError(
                self.folder, f"cannot be written ({error.strerror})", "Set LOGDIR to a writable folder"
            ) from None
        if (self.folder / "summary.json").exists():
            raise UserError(self.folder, "holds a finished run", "Set another LOGDIR or EXPERIMENT, or remove it")
        if resume or not self.log.exists():
            return
        if self._has_trained():
            remedy = "Set RESUME=1 to continue it, or remove it with its run folder"
            raise UserError(self.log, "is the log of an unfinished run", remedy)
        if "run_start" in self.log.read_text(encoding="utf-8", errors="replace"):
            self.set_log_aside()

    def _has_trained(self) -> bool:
        """Whether anything tells of a step: a metric, or a checkpoint."""
        metrics, checkpoints = self.folder / "metrics.jsonl", self.folder / "checkpoints"
        return (metrics.exists() and metrics.stat().st_size > 0) or any(checkpoints.glob("step_*"))

    def set_log_aside(self) -> None:
        """Keeps the log of an interrupted part under a name that no checker takes for a result."""
        if self.log.exists():
            taken = (self.log.with_suffix(f".part{i}.txt") for i in range(1, 10_000))
            self.log.rename(next(path for path in taken if not path.exists()))

    def write_record(self, resolved: Resolved, seed: int, identity: Identity) -> dict[str, Any]:
        """Writes ``config.json``, the resolved configuration with seed and provenance, and returns what it holds."""
        record = {**json.loads(resolved.as_json()), "seed": seed, "provenance": asdict(identity)}
        write_small(self.folder / "config.json", json.dumps(record, indent=2) + "\n")
        return record


def summarize(outcome: Outcome, config: TrainConfig, seed: int, ranks: int) -> dict[str, object]:
    """The numbers of ``summary.json`` that every framework has; rates per second, of training without evaluation."""
    state = outcome.state
    seconds = max(state.train_seconds, 1e-9)
    packs = state.updates * config.train_batch_size * ranks
    return {
        "status": outcome.status,
        "reason": outcome.reason,
        "seconds_to_train": round(outcome.seconds, 3),
        "accuracy": state.accuracy,
        "target_accuracy": config.target_mlm_accuracy,
        "samples": state.samples,
        "steps": state.step,
        "skipped_steps": state.skipped_steps,
        "tokens": state.tokens,
        "sequences_per_pack": round(state.samples / packs, 4) if packs else None,
        "samples_per_second": round(state.samples / seconds, 1),
        "tokens_per_second": round(state.tokens / seconds),
        "seed": seed,
        "ranks": ranks,
    }


def choose_seed(config: TrainConfig, paths: RunFolder) -> int:
    """SEED; for a continued run the seed that it began with; otherwise one from the system's randomness."""
    if config.seed is not None:
        return config.seed
    record, remedy = paths.folder / "config.json", "Set SEED, or start anew"
    if config.resume and record.exists():
        try:
            return int(read_json(record, remedy)["seed"])
        except (KeyError, TypeError):
            raise UserError(record, "does not tell the seed of the interrupted run", remedy) from None
    return secrets.randbelow(2**31)


def write_curve(folder: Path, summary: Mapping[str, Any]) -> None:
    """Draws loss and accuracy of ``metrics.jsonl`` over samples and over time, with the summary's target."""
    from matplotlib.figure import Figure  # pyplot would cost another second

    points, _ = read_points(folder / "metrics.jsonl")
    steps = [p for p in points if p["kind"] == "step"]
    evaluations = [p for p in points if p["kind"] == "evaluation"]
    target = summary["target_accuracy"]
    figure = Figure(figsize=(11, 4))
    axes = figure.subplots(1, 2, sharey=True, gridspec_kw={"left": 0.07, "right": 0.93, "bottom": 0.13, "wspace": 0.25})
    for axis, x, label in zip(
        axes, ("samples", "seconds"), ("training samples", "seconds since run_start"), strict=True
    ):
        axis.plot([p[x] for p in steps], [p["loss"] for p in steps], color="tab:blue", linewidth=1)
        axis.set_xlabel(label)
        accuracy = axis.twinx()
        accuracy.plot(
            [p[x] for p in evaluations], [p["eval_accuracy"] for p in evaluations], color="tab:orange", marker="."
        )
        if target is not None:
            accuracy.axhline(target, color="tab:gray", linestyle="--", linewidth=1)
        accuracy.set_ylim(bottom=0)
        accuracy.set_ylabel("accuracy, evaluation set", color="tab:orange")
    axes[0].set_ylabel("training loss", color="tab:blue")
    wanted = "" if target is None else f", target {target:.4g} (dashed)"
    reached = f"accuracy {summary['accuracy']:.4f} after {summary['seconds_to_train']:.1f} s"
    figure.suptitle(f"{folder.name}: {summary['status']}, {reached}{wanted}", parse_math=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    write_small(folder / "curve.png", picture.getvalue())

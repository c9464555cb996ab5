"""Fit the parameters of `mlbert plan` on every second published result, and print the errors on the others.

    python tools/fit_plan.py [--svg FILE]     rewrites mlbert/report/planner/parameters.json, prints the errors

The 1st, 3rd, 5th ... rows of tests/assets/plan/published.csv are fitted and the 2nd, 4th ... are tested (the file has
no re-submission twice). The loss is the smoothed absolute error of the logarithm: of the score with the predicted
number of samples, and of the time with the samples given in the row.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from mlbert.report.planner.timing import GPUS, PATH, Parameters, TrainingJob, seconds_to_train

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "tests/assets/plan/published.csv"
SMOOTH = 0.01  # log errors well below this count squared, larger ones absolutely
FIRST = {
    "sequence_ms": dict(zip(GPUS, (3.1, 4.2, 0.84, 1.5, 0.8, 0.5, 0.49, 2.3), strict=True)),
    "constant_ms": {"a100": 13.8, "later": 13.8},
    "pcie_ms": 30.0,
    "network_ms": {"switched": 12.5, "direct": 70.0, "pcie": 90.0},
    "samples_share": 1.01,
    "old_software": 1.05,
    "old_samples": 1.13,
    "blackwell_samples": 1.1,
    "own_settings": 1.08,
}
FAR = (-2.0, 1.2)  # how far, in log units, a parameter may move from its initial value


@dataclass(frozen=True)
class Row:
    """One published result. ``score_seconds`` is the official time, scaled up if the run needed fewer samples than the
    reference; ``samples`` is None if the log has a setting in their place (Gaudi2's)."""

    name: str
    job: TrainingJob
    seconds: float
    score_seconds: float
    samples: float | None
    evaluation_seconds: float | None


def read(path: Path = PUBLISHED) -> list[Row]:
    """Return the published results in file order."""
    rows = []
    with path.open(encoding="utf-8", newline="") as lines:
        for line in csv.DictReader(lines):
            gbps = float(line["network_gbps"]) if line["network_gbps"] else None
            sizes = (int(line["gpus"]), int(line["nodes"]), int(line["batch"]))
            job = TrainingJob(line["accelerator"], *sizes, network_gbps=gbps, round=line["round"])
            samples = None if job.gpu == "gaudi2" else 1e6 * float(line["million_samples"])
            minutes = (60 * float(line["minutes"]), 60 * float(line["official_minutes"]))
            evaluation = float(line["eval_seconds"]) if line["eval_seconds"] else None
            rows.append(
                Row(f"{line['round']} {line['submitter']} {line['system']}", job, *minutes, samples, evaluation)
            )
    return rows


def halves(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Split into rows to fit and rows to test."""
    return rows[::2], rows[1::2]


def errors(rows: list[Row], parameters: Parameters, *, samples_known: bool) -> np.ndarray:
    """Return log(predicted / published time), of the score or of the runs with known samples."""
    if samples_known:
        known = [row for row in rows if row.samples is not None]
        return np.log([seconds_to_train(r.job, parameters, r.samples) / r.seconds for r in known])
    return np.log([seconds_to_train(row.job, parameters) / row.score_seconds for row in rows])


def evaluation_gpu_seconds(rows: list[Row]) -> dict[str, float]:
    """Return the median GPU-seconds of an evaluation; H100's if none was logged, as most of it is not arithmetic."""
    logged = {
        gpu: [r.evaluation_seconds * r.job.gpus for r in rows if r.job.gpu == gpu and r.evaluation_seconds]
        for gpu in GPUS
    }
    usual = statistics.median(logged["h100-sxm"])
    return {gpu: round(statistics.median(found), 2) if found else usual for gpu, found in logged.items()}


def fit(rows: list[Row]) -> Parameters:
    """Return the parameters that fit these rows."""
    places = [(name, key) for name, value in FIRST.items() for key in (value if isinstance(value, dict) else [None])]
    start = np.log([FIRST[name] if key is None else FIRST[name][key] for name, key in places])
    evaluation = evaluation_gpu_seconds(rows)

    def parameters(logarithms: np.ndarray, digits: int | None = None) -> Parameters:
        found: dict = {"evaluation_gpu_seconds": evaluation, "error_90": 0.0}
        for (name, key), value in zip(places, np.exp(logarithms).tolist(), strict=True):
            number = value if digits is None else round(value, digits)
            if key is None:
                found[name] = number
            else:
                found.setdefault(name, {})[key] = number
        return Parameters(**found)

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        p = parameters(logarithms)
        return np.concatenate([errors(rows, p, samples_known=known) for known in (False, True)])

    bounds = (start + FAR[0], start + FAR[1])
    found = least_squares(residuals, start, loss="soft_l1", f_scale=SMOOTH, bounds=bounds).x
    result = parameters(found, digits=4)
    band = float(np.quantile(np.abs(errors(rows, result, samples_known=False)), 0.9))
    return dataclasses.replace(result, error_90=round(band, 4))


def summary(rows: list[Row], parameters: Parameters, *, samples_known: bool) -> dict[str, float]:
    """Return the mean and median absolute relative error, and the share within 15 %."""
    sizes = np.abs(np.expm1(errors(rows, parameters, samples_known=samples_known)))
    shares = {"mean": sizes.mean(), "median": np.median(sizes), "within_15": (sizes <= 0.15).mean()}
    return {"rows": len(sizes), **{name: round(float(value), 4) for name, value in shares.items()}}


def document(parameters: Parameters, fitted: int) -> str:
    """Return the text of parameters.json."""
    made = {
        "by": "tools/fit_plan.py",
        "from": "tests/assets/plan/published.csv, rows 1, 3, 5 ... (MLPerf Training 1.1 to 5.0, BERT closed)",
        "rows": fitted,
    }
    return json.dumps({"provenance": made, "parameters": dataclasses.asdict(parameters)}, indent=2) + "\n"


def draw(path: Path, rows: list[Row], parameters: Parameters) -> None:
    """Plot predicted against published time for fitted and held-out rows."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "plan"
    figure = Figure(figsize=(5, 4.2), layout="tight")
    axes = figure.add_subplot()
    for part, mark, label in zip(halves(rows), ("o", "x"), ("fitted", "held out"), strict=True):
        published = [row.score_seconds / 60 for row in part]
        predicted = [seconds_to_train(row.job, parameters) / 60 for row in part]
        axes.plot(published, predicted, mark, markersize=4, label=label, alpha=0.7)
    ends = np.array([0.09, 160])
    axes.plot(ends, ends, "k-", linewidth=0.8)
    axes.fill_between(ends, ends / 1.15, ends * 1.15, color="0.85", label="within 15 %")
    axes.set(xscale="log", yscale="log", xlabel="published, minutes", ylabel="predicted, minutes")
    axes.legend()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Fit, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--svg", type=Path, help="draw predicted against published times")
    arguments = parser.parse_args()
    rows = read()
    fitted, held_out = halves(rows)
    parameters = fit(fitted)
    PATH.write_text(document(parameters, len(fitted)), encoding="utf-8")
    for known in (False, True):
        words = "samples known" if known else "samples predicted"
        print(f"{words}: fitted {summary(fitted, parameters, samples_known=known)}")
        print(f"{words}: held out {summary(held_out, parameters, samples_known=known)}")
    swapped = fit(held_out)
    print(f"halves swapped, samples predicted: held out {summary(fitted, swapped, samples_known=False)}")
    inside = np.abs(errors(held_out, parameters, samples_known=False)) <= parameters.error_90
    print(f"held out inside the 90 % band of ten runs: {inside.mean():.3f}")
    worst = sorted(held_out, key=lambda row: -abs(math.log(seconds_to_train(row.job, parameters) / row.score_seconds)))
    for row in worst[:12]:
        own = (
            ""
            if row.samples is None
            else f"; with its samples {seconds_to_train(row.job, parameters, row.samples) / row.seconds - 1:+.1%}"
        )
        print(f"{seconds_to_train(row.job, parameters) / row.score_seconds - 1:+7.1%}  {row.name}{own}")
    if arguments.svg:
        draw(arguments.svg, rows, parameters)


if __name__ == "__main__":
    main()

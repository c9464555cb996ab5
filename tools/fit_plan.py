"""Fit the parameters of `mlbert plan` to the published results,
and measure its errors on held-out results.

    python tools/fit_plan.py [--out FOLDER]     rewrite audit/mlaudit/planner/parameters.json and
                                                print the errors

The fit uses all rows of tests/assets/plan/published.csv, which has no re-submission twice. Errors
are measured on each submitter's results by a fit without them; likewise for each round and each
GPU, whose speed is then estimated from its peak. The loss is the smoothed absolute error of the
logarithm: of the score with predicted samples, and of the time with the row's samples. A prior
keeps parameters that few rows determine near a simple assumption: equal efficiency of all GPUs,
equal constant times, and the network's bandwidth. ``--out`` gets held_out.csv and plan_errors.svg.
"""

from __future__ import annotations

import argparse
import collections
import csv
import dataclasses
import json
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from mlaudit.planner.gpus import GPUS
from mlaudit.planner.timing import (
    PATH,
    Parameters,
    TrainingJob,
    seconds_to_train,
    with_unseen,
)

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "tests/assets/plan/published.csv"
SMOOTH = 0.02  # log errors well below this count squared, larger ones absolutely
# Initial values, near which the prior keeps the parameters. A sequence takes its time at the GPU's
# peak rate times `efficiency` and `speed`. 8 ms: two bytes of each gradient, twice, at 1,600 Gb/s,
# plus latency.
INITIAL: dict = {
    "efficiency": {"linked": 0.5, "pcie": 0.4},
    "speed": dict.fromkeys((name for name, gpu in GPUS.items() if gpu.has_results), 1.0),
    "constant_ms": {"a100": 14.0, "later": 14.0},
    "pcie_ms": 25.0,
    "network_ms": {"switched": 8.0, "direct": 64.0, "pcie": 98.0},
    "samples_share": 1.0,
    "old_software": 1.05,
    "old_pcie": 1.0,
    "old_samples": 1.1,
    "blackwell_samples": 1.05,
    "own_settings": 1.1,
    "pcie_samples": 1.0,
}
# Weights of the logarithms' distances, relative to the weight of a row, which is 1.
PRIOR = 0.05
NETWORK_PRIOR = 0.5
EQUAL_CONSTANTS = 0.5
SUBMITTER = "submitter"
ROUND = "round"
GPU = "gpu"


@dataclass(frozen=True)
class Row:
    """One published result.

    ``score_seconds`` is the official time, scaled up if the run needed fewer samples than the
    reference. ``samples`` is None if the log does not contain them (Gaudi2's).
    """

    name: str
    submitter: str
    job: TrainingJob
    seconds: float
    score_seconds: float
    samples: float | None
    evaluation_seconds: float | None

    def group(self, kind: str) -> str:
        """Return the row's submitter, round or GPU."""
        return self.submitter if kind == SUBMITTER else getattr(self.job, kind)


def read(path: Path = PUBLISHED) -> list[Row]:
    """Return the published results in file order."""
    rows = []
    with path.open(encoding="utf-8", newline="") as lines:
        for line in csv.DictReader(lines):
            gbps = float(line["network_gbps"]) if line["network_gbps"] else None
            gpu = line["accelerator"]
            if "SXM-40GB" in line["system"]:
                gpu += "-40gb"
            job = TrainingJob(
                gpu,
                int(line["gpus"]),
                int(line["nodes"]),
                int(line["batch"]),
                network_gbps=gbps,
                round=line["round"],
            )
            samples = None if job.gpu == "gaudi2" else 1e6 * float(line["million_samples"])
            seconds = 60 * float(line["minutes"])
            official_seconds = 60 * float(line["official_minutes"])
            evaluation = float(line["eval_seconds"]) if line["eval_seconds"] else None
            name = f"{line['round']} {line['submitter']} {line['system']}"
            rows.append(
                Row(name, line["submitter"], job, seconds, official_seconds, samples, evaluation)
            )
    return rows


def errors(rows: list[Row], parameters: Parameters, *, samples_known: bool) -> np.ndarray:
    """Return log(predicted / published time), of the score or of the runs with known samples."""
    if samples_known:
        known = [row for row in rows if row.samples is not None]
        return np.log([seconds_to_train(r.job, parameters, r.samples) / r.seconds for r in known])
    return np.log([seconds_to_train(row.job, parameters) / row.score_seconds for row in rows])


def evaluation_gpu_seconds(rows: list[Row]) -> dict[str, float]:
    """Return the median GPU-seconds of an evaluation, by GPU with logged ones."""
    logged = collections.defaultdict(list)
    for row in rows:
        if row.evaluation_seconds:
            logged[row.job.gpu].append(row.evaluation_seconds * row.job.gpus)
    return {gpu: round(statistics.median(values), 2) for gpu, values in logged.items()}


def fit(rows: list[Row]) -> Parameters:
    """Return the parameters that fit these rows, without bands."""
    places: list[tuple[str, str | None]] = []
    for name, value in INITIAL.items():
        keys = list(value) if isinstance(value, dict) else [None]
        places += [(name, key) for key in keys]
    start = np.log([INITIAL[name] if key is None else INITIAL[name][key] for name, key in places])
    weights = np.array(
        [NETWORK_PRIOR if place == ("network_ms", "switched") else PRIOR for place in places]
    )
    constants = [places.index(("constant_ms", name)) for name in INITIAL["constant_ms"]]
    evaluation = evaluation_gpu_seconds(rows)
    fitted = {row.job.gpu for row in rows}

    def parameters(logarithms: np.ndarray, digits: int | None = None) -> Parameters:
        found: dict = {
            "evaluation_gpu_seconds": evaluation,
            "error_90": 0.0,
            "unseen_error_90": 0.0,
        }
        for (name, key), value in zip(places, np.exp(logarithms).tolist(), strict=True):
            number = value if digits is None or name == "speed" else round(value, digits)
            if key is None:
                found[name] = number
            else:
                found.setdefault(name, {})[key] = number
        speed = found.pop("speed")
        typical = with_unseen(Parameters(**found, sequence_ms={}))
        times = {gpu: typical.sequence_ms[gpu] / speed[gpu] for gpu in GPUS if gpu in fitted}
        if digits is not None:
            times = {gpu: round(value, digits) for gpu, value in times.items()}
        return with_unseen(dataclasses.replace(typical, sequence_ms=times))

    def smoothed(values: np.ndarray) -> np.ndarray:
        return np.sign(values) * SMOOTH * np.sqrt(2 * (np.sqrt(1 + (values / SMOOTH) ** 2) - 1))

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        p = parameters(logarithms)
        first, second = logarithms[constants]
        apart = [smoothed(errors(rows, p, samples_known=known)) for known in (False, True)]
        return np.concatenate(
            [*apart, weights * (logarithms - start), [EQUAL_CONSTANTS * (first - second)]]
        )

    found = least_squares(residuals, start, xtol=1e-5, ftol=1e-6).x
    return parameters(found, digits=4)


def held_out(rows: list[Row], kind: str) -> np.ndarray:
    """Return log(predicted / published score) of each row by a fit without the row's submitter,
    round or GPU.
    """
    groups = sorted({row.group(kind) for row in rows})
    with ProcessPoolExecutor() as pool:
        parts = list(
            pool.map(_without, *zip(*[(rows, kind, group) for group in groups], strict=True))
        )
    found = np.zeros(len(rows))
    for group, part in zip(groups, parts, strict=True):
        found[[row.group(kind) == group for row in rows]] = part
    return found


def _without(rows: list[Row], kind: str, group: str) -> np.ndarray:
    fitted = fit([row for row in rows if row.group(kind) != group])
    return errors([row for row in rows if row.group(kind) == group], fitted, samples_known=False)


def summary(logarithms: np.ndarray) -> dict[str, float]:
    """Return the mean, median and largest absolute relative error, and the share within 15 %."""
    sizes = np.abs(np.expm1(logarithms))
    found = {"mean": sizes.mean(), "median": np.median(sizes)}
    found |= {"within_15": (sizes <= 0.15).mean(), "worst": sizes.max()}
    return {name: round(float(value), 4) for name, value in found.items()}


def kind_of(row: Row) -> str:
    """Return the kind of a row's system, as a reader of a plan knows it."""
    if GPUS[row.job.gpu].is_pcie:
        return "with PCIe between the GPUs"
    return "on one node" if row.job.nodes == 1 else "on several nodes"


def by_kind(rows: list[Row], logarithms: np.ndarray) -> dict[str, float]:
    """Return the mean absolute relative error of each kind of system, the smallest first."""
    sizes = collections.defaultdict(list)
    for row, size in zip(rows, np.abs(np.expm1(logarithms)).tolist(), strict=True):
        sizes[kind_of(row)].append(size)
    means = {kind: round(statistics.mean(found), 4) for kind, found in sizes.items()}
    return dict(sorted(means.items(), key=lambda pair: pair[1]))


def document(
    parameters: Parameters,
    rows: int,
    errors_of: dict[str, dict[str, float]],
    errors_by_kind: dict[str, float],
) -> str:
    """Return the text of parameters.json."""
    made = {
        "by": "tools/fit_plan.py",
        "from": "tests/assets/plan/published.csv (MLPerf Training 1.1 to 5.0, BERT closed)",
        "rows": rows,
        "held_out": errors_of,
        "held_out_by_kind": errors_by_kind,
    }
    fitted = dataclasses.asdict(parameters)
    del fitted["measured_samples"]
    for name in ("sequence_ms", "evaluation_gpu_seconds"):
        fitted[name] = {gpu: value for gpu, value in fitted[name].items() if GPUS[gpu].has_results}
    return json.dumps({"provenance": made, "parameters": fitted}, indent=2) + "\n"


def draw(path: Path, rows: list[Row], logarithms: np.ndarray) -> None:
    """Plot predicted against published time; each prediction by a fit without the row's
    submitter.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "plan"
    figure = Figure(figsize=(5, 4.2), layout="tight")
    axes = figure.add_subplot()
    published = np.array([row.score_seconds / 60 for row in rows])
    pcie = np.array([GPUS[row.job.gpu].is_pcie for row in rows])
    for part, mark, label in ((~pcie, "o", "NVLink or similar"), (pcie, "x", "PCIe")):
        axes.plot(
            published[part],
            (published * np.exp(logarithms))[part],
            mark,
            markersize=4,
            label=label,
            alpha=0.7,
        )
    ends = np.array([0.09, 160])
    axes.plot(ends, ends, "k-", linewidth=0.8)
    axes.fill_between(ends, ends / 1.15, ends * 1.15, color="0.85", label="within 15 %")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="published, minutes",
        ylabel="predicted without the submitter, minutes",
    )
    axes.legend()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for held_out.csv and plan_errors.svg")
    arguments = parser.parse_args()
    rows = read()
    fitted = fit(rows)
    left_out = {kind: held_out(rows, kind) for kind in (SUBMITTER, ROUND, GPU)}
    bands = {
        kind: round(float(np.quantile(np.abs(left_out[kind]), 0.9)), 4) for kind in (SUBMITTER, GPU)
    }
    parameters = dataclasses.replace(fitted, error_90=bands[SUBMITTER], unseen_error_90=bands[GPU])
    errors_of = {kind: summary(found) for kind, found in left_out.items()}
    kinds = by_kind(rows, left_out[SUBMITTER])
    PATH.write_text(document(parameters, len(rows), errors_of, kinds), encoding="utf-8")
    for kind, found in errors_of.items():
        print(f"without the row's {kind}: {found}")
    print(f"fitted rows: {summary(errors(rows, parameters, samples_known=False))}")
    by_submitter = left_out[SUBMITTER]
    for index in np.argsort(-np.abs(by_submitter))[:25]:
        print(f"{np.expm1(by_submitter[index]):+7.1%}  {rows[index].name}")
    if arguments.out:
        with (arguments.out / "held_out.csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(
                ["system", "published_seconds", *(f"error_without_its_{kind}" for kind in left_out)]
            )
            for number, row in enumerate(rows):
                cells = [f"{np.expm1(found[number]):+.4f}" for found in left_out.values()]
                table.writerow([row.name, f"{row.score_seconds:.1f}", *cells])
        draw(arguments.out / "plan_errors.svg", rows, by_submitter)


if __name__ == "__main__":
    main()

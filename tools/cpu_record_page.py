"""Write the README of a record of a processor; see `cpu_record`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cpu_cells import COMPARE, MODELS, PARTS, SWEEP, Cell

Records = Mapping[Cell, Mapping[str, Any]]
NAMES = {"demo": "the quickstart's model", "base": "base"}
PAGE = """# How fast is a training step on this processor, and where does its time go? {processor}

**In short:** {summary}

    python tools/cpu_record.py

{processor}, {cores} cores, PyTorch {torch}. Dummy sequences with Wikipedia's lengths; forward,
backward and optimizer. One run of {minutes:.0f} minutes on {date}; other programs used at most
{others:.2f} cores during a measurement. Each measurement has a JSON file in this folder.

## Against Hugging Face's model

The sides take turns. A ratio is the median over the pairs of steps, with their range.

{comparisons}

## Where our step's time goes

Time of the main thread in the operators of each part, by PyTorch's profiler, as a share of the
step; in brackets the part's rate as a share of the GEMM peak. Waiting is the share of all threads'
time in which they sleep; it is not a part of the sum.

{parts}

## Threads and sequences

Our step; base with {layers} of its 12 layers.

{sweep}
"""


def page(records: Records) -> str:
    """Return the README of a folder with these records."""
    first = next(iter(records.values()))
    return PAGE.format(
        processor=first["processor"],
        cores=first["cores"],
        torch=first["torch"],
        date=first["date"],
        summary=_summary(records),
        minutes=sum(record["seconds"] for record in records.values()) / 60,
        others=max(record["cores_used_by_others"] for record in records.values()),
        comparisons=_comparisons(records),
        parts=_parts(records),
        layers=MODELS["base"].swept_layers,
        sweep=_sweep(records),
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _of_kind(records: Records, kind: str) -> list[tuple[Cell, Mapping[str, Any]]]:
    return [(cell, record) for cell, record in records.items() if cell.kind == kind]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _summary(records: Records) -> str:
    clauses = []
    for cell, record in _of_kind(records, COMPARE):
        ratios = record["ratios"]
        clauses.append(
            f"{NAMES[cell.model]} in {cell.precision}, {ratios['expert']['ratio']:.1f} times as "
            f"fast as an expert's use of transformers and "
            f"{ratios['huggingface']['ratio']:.1f} times as fast as plain use, at "
            f"{_percent(record['sides']['mlbert']['share_of_gemm_peak'])} of the GEMM peak"
        )
    text = f"{'; '.join(clauses)}."
    return text[0].upper() + text[1:]


def _comparisons(records: Records) -> str:
    rows = []
    for cell, record in _of_kind(records, COMPARE):
        sides = record["sides"]
        shares = [
            _percent(sides[name]["share_of_gemm_peak"])
            for name in ("mlbert", "huggingface", "expert")
        ]
        expert = ", ".join(f"{name} {value}" for name, value in _expert(record).items())
        rows.append(
            [
                f"{NAMES[cell.model]}, {cell.sequences} sequences",
                cell.precision,
                f"{sides['mlbert']['median_seconds']:.3g}",
                f"{record['gemm_peak_flops_per_second'] / 1e9:.0f}",
                " / ".join(shares),
                _ratio(record["ratios"]["huggingface"]),
                _ratio(record["ratios"]["expert"]),
                expert,
            ]
        )
    head = (
        "model",
        "precision",
        "our step, s",
        "GEMM peak, GFLOP/s",
        "share of it: ours / plain / expert",
        "plain / ours",
        "expert / ours",
        "expert's form",
    )
    return _table(head, rows)


def _expert(record: Mapping[str, Any]) -> Mapping[str, Any]:
    choice: Mapping[str, Any] = record["expert"]["choice"]
    return choice


def _ratio(ratio: Mapping[str, Any]) -> str:
    pairs = ratio["pair_ratios"]
    return f"{ratio['ratio']:.2f} ({min(pairs):.2f} to {max(pairs):.2f})"


def _parts(records: Records) -> str:
    found = _of_kind(records, PARTS)
    head = ["part", *(f"{NAMES[cell.model]}, {cell.precision}" for cell, _ in found)]
    names = next(iter(record["part_seconds"] for _, record in found))
    rows = [[name, *(_part(record, name) for _, record in found)] for name in names]
    rows.append(["(waiting)", *(_percent(record["waiting"]) for _, record in found)])
    rows.append(["step, ms", *(f"{1e3 * record['step_seconds']:.1f}" for _, record in found)])
    rows.append(
        ["step with the profiler, ms", *(f"{1e3 * r['profiled_seconds']:.1f}" for _, r in found)]
    )
    return _table(head, rows)


def _part(record: Mapping[str, Any], name: str) -> str:
    seconds = record["part_seconds"][name]
    share = _percent(seconds / record["profiled_seconds"])
    if not (flops := record["flops"].get(name)) or not seconds:
        return share
    return f"{share} ({_percent(flops / seconds / record['gemm_peak_flops_per_second'])})"


def _sweep(records: Records) -> str:
    rows = []
    for cell, record in _of_kind(records, SWEEP):
        side = record["sides"]["mlbert"]
        rows.append(
            [
                NAMES[cell.model],
                cell.precision,
                str(cell.threads),
                str(cell.sequences),
                f"{side['median_seconds']:.3g}",
                f"{side['sequences_per_second']:.1f}",
                _percent(side["share_of_gemm_peak"]),
            ]
        )
    head = ("model", "precision", "threads", "sequences", "step, s", "sequences/s", "of GEMM peak")
    return _table(head, rows)

"""What was measured, as tables for the eye: table.txt and table.md."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Sequences a second that one H200 is meant to reach, by precision.
GOALS = {"bf16": 1100.0, "fp8": 1400.0}


def failures(out: Path, parts: list[str], ends: dict[str, str]) -> list[str]:
    """One line for each row or part that failed."""
    found = []
    for part in parts:
        for name, row in read_rows(out, part).items():
            if "error" in row:
                found.append(f"{part}: {name}: {row['error'].strip().splitlines()[-1]}")
            elif row.get("passed") is False:
                found.append(f"{part}: {name}: differs by more than is allowed")
        if left_out := read(out, part).get("left_out"):
            found.append(f"{part}: no time for {len(left_out)} rows, --resume goes on: {', '.join(left_out)}")
        if ends.get(part):
            running = read(out, part).get("running")
            found.append(f"{part}: {ends[part]}{f' in {running}' if running else ''}")
    return found


def read(out: Path, part: str) -> dict[str, Any]:
    """What a part has written so far."""
    path = out / f"{part}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def read_rows(out: Path, part: str) -> dict[str, dict[str, Any]]:
    """Its rows by name."""
    return read(out, part).get("rows", {})


def write_tables(
    out: Path, parts: list[str], ends: dict[str, str], rehearsal: bool, missing: Sequence[str] = ()
) -> None:
    """table.txt and table.md from what there is."""
    facts = next((found for part in parts if (found := read(out, part))), {})
    head = ", ".join(f"{name} {value}" for name, value in facts.items() if name not in ("rows", "running", "left_out"))
    head = f"REHEARSAL on tiny shapes: the figures mean nothing. {head}" if rehearsal else head
    sections: list[tuple[str, list[list[str]]]] = []
    for part in ends:
        rows = TABLES[part](read_rows(out, part))
        if len(rows) > 1:
            sections.append((part, rows))
        sections += goals_section(read_rows(out, part)) if part in ("smoke", "step") else []
        sections += budget_section(read_rows(out, part)) if part == "profile" else []
    failed = [*missing, *failures(out, list(ends), ends)]
    text, markdown = [head, ""], ["# GPU check", "", head or "Nothing measured.", ""]
    for title, rows in sections:
        text += [f"== {title}", *aligned(rows), ""]
        lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
        markdown += [f"## {title}", "", lines[0], f"|{'---|' * len(rows[0])}", *lines[1:], ""]
    text += ["== failed", *(failed or ["nothing"]), ""]
    markdown += ["## failed", "", *(f"* {line}" for line in failed or ["nothing"]), ""]
    for name, lines in (("table.txt", text), ("table.md", markdown)):
        temporary = out / f"{name}.tmp"
        temporary.write_text("\n".join(lines), encoding="utf-8")
        os.replace(temporary, out / name)


def aligned(rows: list[list[str]]) -> list[str]:
    """Lines with columns under each other."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def number(value: Any, form: str = ".1f", factor: float = 1.0) -> str:
    """A number as text; a dash for what is not there."""
    return "-" if value is None else f"{value * factor:{form}}"


def state(row: dict[str, Any]) -> str:
    """What became of a row."""
    if "error" in row:
        return "ERROR"
    return "skipped" if "skipped" in row else {True: "ok", False: "FAILED"}.get(row.get("passed"), "ok")


def rate(row: dict[str, Any], name: str = "rate") -> str:
    """A rate with its unit: memory in TB/s, arithmetic in TFLOP/s."""
    value = row.get(name)
    return "-" if value is None else f"{value:.3g} {row['unit']}"


def checks_table(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Errors as shares of what PyTorch's are at most, at the worst place."""
    table = [["check", "result", "worst error / PyTorch's", "twice the same", "remark"]]
    for name, row in rows.items():
        repeats = {True: "yes", False: "no"}.get(row.get("repeats"), "-")
        remark = f"keeps {row['kept']:.5f}, wanted {row['wanted']:.5f}" if "kept" in row else ""
        table.append([name, state(row), number(row.get("worst_ratio"), ".2f"), repeats, remark])
    return table


def ops_table(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Times in milliseconds."""
    table = [["op", "forward ms", "backward ms", "forward rate", "backward rate", "rate", "of peak", "result"]]
    for name, row in rows.items():
        forward = row.get("forward_seconds", row.get("step_seconds"))
        times = [number(forward, ".3f", 1e3), number(row.get("backward_seconds"), ".3f", 1e3)]
        rates = [rate(row, f"{which}rate") for which in ("forward_", "backward_", "")]
        table.append([name, *times, *rates, number(row.get("share_of_peak"), ".0%"), state(row)])
    return table


def step_table(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Rates in sequences per second; the last column compares with the faster of Hugging Face's."""
    peer = max((row.get("sequences_per_second", 0.0) for n, row in rows.items() if "huggingface" in n), default=0.0)
    head = ["step", "sequences", "tokens", "ms", "sequences/s", "model TFLOP/s", "of bf16 peak", "of FP8 peak", "GiB"]
    table = [[*head, "x Hugging Face", "result"]]
    for name, row in rows.items():
        speed = row.get("sequences_per_second")
        milliseconds = sorted(row["seconds"])[len(row["seconds"]) // 2] if "seconds" in row else None
        wide = f", {row['did_not_fit']} did not fit" if "did_not_fit" in row else ""
        table.append(
            [
                *(name, number(row.get("sequences"), ".0f"), number(row.get("tokens"), ".0f")),
                *(number(milliseconds, ".1f", 1e3), number(speed), number(row.get("rate"), ".3g")),
                *(number(row.get(f"share_of_{which}peak"), ".1%") for which in ("", "fp8_")),
                number(row.get("peak_memory_bytes"), ".1f", 1 / 2**30),
                number(speed / peer if speed and peer else None, ".2f"),
                row.get("skipped", f"{state(row)}{wide}"),
            ]
        )
    return table


def goals_section(rows: dict[str, dict[str, Any]]) -> list[tuple[str, list[list[str]]]]:
    """The fastest step of each precision next to what one H200 is meant to reach, and to Hugging Face's eager one."""
    eager = rows.get("huggingface eager", {}).get("sequences_per_second")
    table = [["precision", "fastest step", "sequences/s", "goal on an H200", "of the goal", "x Hugging Face eager"]]
    for precision, goal in GOALS.items():
        speeds = {
            name: row["sequences_per_second"]
            for name, row in rows.items()
            if "forms" in row and "sequences_per_second" in row and (row["precision"] or "bf16") == precision
        }
        if speeds:
            name, speed = max(speeds.items(), key=lambda item: item[1])
            ratios = [number(speed / goal, ".1%"), number(speed / eager if eager else None, ".2f")]
            table.append([precision, name, number(speed), number(goal, ".0f"), *ratios])
    return [("goals", table)] if len(table) > 1 else []


def profile_table(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Groups of kernels of each profiled step."""
    table = [["step", "group", "ms", "share", "rate", "of peak", "longest"]]
    for name, row in rows.items():
        if "groups" not in row:
            table.append([name, "-", "-", "-", "-", "-", state(row)])
        for group, values in row.get("groups", {}).items():
            longest = next(iter(values["names"]), "")[:60]
            cells = [number(values["seconds"], ".3f", 1e3), number(values["share"], ".1%"), rate(values)]
            table.append([name, group, *cells, number(values.get("share_of_peak"), ".0%"), longest])
    return table


def budget_section(rows: dict[str, dict[str, Any]]) -> list[tuple[str, list[list[str]]]]:
    """Microseconds a sequence, measured next to the estimates."""
    with_budgets = {name: row["budgets"] for name, row in rows.items() if "budgets" in row}
    if not with_budgets:
        return []
    first = next(iter(with_budgets.values()))
    table = [["microseconds a sequence", *first["classes"], "sum"]]
    for name, budgets in with_budgets.items():
        table.append([f"measured: {name}", *map(number, budgets["measured"]), number(sum(budgets["measured"]))])
    for name, values in first["estimates"].items():
        table.append([f"estimate: {name}", *map(number, values), number(sum(values))])
    return [("budget", table)]


def tests_table(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """How many tests had which outcome, and those that did not pass."""
    outcomes = [row["outcome"] for row in rows.values()]
    table = [["test", "outcome"], *([f"{outcomes.count(o)} tests", o] for o in sorted(set(outcomes)))]
    table += [[name.split("::", 1)[-1], "failed"] for name, row in rows.items() if row["outcome"] == "failed"]
    return table


def tune_table(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Steps, kernels and losses below each other: what a row has not is a dash."""
    table = [["row", "ms", "sequences/s", "rate", "of peak", "last losses", "result"]]
    for name, row in rows.items():
        seconds = sorted(row["seconds"])[len(row["seconds"]) // 2] if "seconds" in row else row.get("forward_seconds")
        cells = [number(seconds, ".3f", 1e3), number(row.get("sequences_per_second")), rate(row)]
        cells += [number(row.get("share_of_peak"), ".0%"), number(row.get("last_losses_mean"), ".5f")]
        table.append([name, *cells, row.get("skipped", state(row))])
    return table


TABLES: dict[str, Callable[[dict[str, dict[str, Any]]], list[list[str]]]] = {
    "smoke": step_table,
    "checks": checks_table,
    "ops": ops_table,
    "step": step_table,
    "profile": profile_table,
    "tests": tests_table,
    "tune": tune_table,
}

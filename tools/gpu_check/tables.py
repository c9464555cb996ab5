"""Write the measurements as readable tables: table.txt and table.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mlbert.host.files import write_atomically

# Goals of one H200 in sequences per second, by precision.
GOALS = {"bf16": 1150.0, "fp8": 1450.0}
NOT_SHOWN = ("wall_seconds", "passed", "error", "errors", "skipped", "why", "unit")


def failures(work: Path, ends: dict[str, str]) -> list[str]:
    """Return a line for each row and each part that failed; ``ends`` says how each part ended."""
    found = []
    for part, end in ends.items():
        content = read_part(work, part)
        for name, row in content.get("rows", {}).items():
            if "error" in row:
                found.append(f"{part}: {name}: {row['error'].strip().splitlines()[-1]}")
            elif row.get("passed") is False:
                found.append(
                    f"{part}: {name}: {row.get('why') or 'differs by more than is allowed'}"
                )
        if end:
            running = content.get("running")
            found.append(f"{part}: {end}{f' in {running}' if running else ''}")
    return found


def read_part(work: Path, part: str) -> dict[str, Any]:
    """Merge the files that the processes of a part have written so far."""
    found: dict[str, Any] = {}
    for path in sorted(work.glob(f"{part}.*json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        found = {**found, **content, "rows": {**found.get("rows", {}), **content["rows"]}}
    return found


def read_rows(work: Path, part: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a part by name."""
    return read_part(work, part).get("rows", {})


def write_tables(
    out: Path,
    work: Path,
    ends: dict[str, str],
    rehearsal: bool,
    missing: Sequence[str] = (),
    following: Sequence[str] = (),
) -> None:
    """Write table.txt and table.md: the rows so far, what is missing, and the next steps."""
    facts = next((found for part in ends if (found := read_part(work, part))), {})
    head = ", ".join(
        f"{name} {value}" for name, value in facts.items() if name not in ("rows", "running")
    )
    head = f"REHEARSAL on tiny shapes: the figures mean nothing. {head}" if rehearsal else head
    # The other parts have a plain table.
    table_of: dict[str, Callable[[dict[str, dict[str, Any]]], list[list[str]]]] = {
        "smoke": step_table,
        "record": step_table,
        "ops": ops_table,
        "step": step_table,
        "profile": profile_table,
        "tests": tests_table,
    }
    sections: list[tuple[str, list[list[str]]]] = []
    for part in ends:
        rows = read_rows(work, part)
        products = {name: row for name, row in rows.items() if name.startswith("GEMM")}
        others = {name: row for name, row in rows.items() if name not in products}
        tables = [
            (part, table_of.get(part, plain_table)(others)),
            (f"{part}, products", plain_table(products)),
        ]
        sections += [(title, table) for title, table in tables if len(table) > 1]
        if part in ("smoke", "record", "step"):
            sections += goals_section(rows)
    lists = {"failed": [*missing, *failures(work, ends)] or ["nothing"], "next": list(following)}
    text = [head, ""]
    markdown = ["# GPU check", "", head or "Nothing measured.", ""]
    for title, table in sections:
        text += [f"== {title}", *aligned(table), ""]
        lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in table]
        markdown += [f"## {title}", "", lines[0], f"|{'---|' * len(table[0])}", *lines[1:], ""]
    for title, lines in lists.items():
        text += [f"== {title}", *lines, ""]
        markdown += [f"## {title}", "", *(f"* {line}" for line in lines), ""]
    for name, lines in (("table.txt", text), ("table.md", markdown)):
        write_atomically(out / name, "\n".join(lines))


def aligned(rows: list[list[str]]) -> list[str]:
    """Return the rows as lines with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def number(value: Any, form: str = ".1f", factor: float = 1.0) -> str:
    """Return a number as text, or a dash for None."""
    return "-" if value is None else f"{value * factor:{form}}"


def state(row: dict[str, Any]) -> str:
    """Return the result of a row."""
    if "error" in row:
        return "ERROR"
    if "skipped" in row:
        return "skipped"
    return "FAILED" if row.get("passed") is False else "ok"


def rate(row: dict[str, Any], name: str = "rate") -> str:
    """Return a rate with its unit, TB/s or TFLOP/s."""
    value = row.get(name)
    return "-" if value is None else f"{value:.3g} {row['unit']}"


def ops_table(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return the times and rates of ops."""
    table = [
        [
            "op",
            "forward ms",
            "backward ms",
            "forward rate",
            "backward rate",
            "rate",
            "of peak",
            "result",
        ]
    ]
    for name, row in rows.items():
        forward = row.get("forward_seconds", row.get("step_seconds"))
        times = [number(forward, ".3f", 1e3), number(row.get("backward_seconds"), ".3f", 1e3)]
        rates = [rate(row, f"{which}rate") for which in ("forward_", "backward_", "")]
        table.append([name, *times, *rates, number(row.get("share_of_peak"), ".0%"), state(row)])
    return table


def step_table(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return the speed of steps; one column compares with Hugging Face's fastest step."""
    peer = max(
        (row.get("sequences_per_second", 0.0) for n, row in rows.items() if "huggingface" in n),
        default=0.0,
    )
    head = [
        "step",
        "sequences",
        "tokens",
        "ms",
        "sequences/s",
        "model TFLOP/s",
        "of bf16 peak",
        "GiB",
    ]
    table = [[*head, "W", "MHz", "x Hugging Face", "result"]]
    for name, row in rows.items():
        speed = row.get("sequences_per_second")
        milliseconds = (
            sorted(row["seconds"])[len(row["seconds"]) // 2] if "seconds" in row else None
        )
        wide = f", {row['did_not_fit']} did not fit" if "did_not_fit" in row else ""
        table.append(
            [
                name,
                number(row.get("sequences"), ".0f"),
                number(row.get("tokens"), ".0f"),
                number(milliseconds, ".1f", 1e3),
                number(speed),
                number(row.get("rate"), ".3g"),
                number(row.get("share_of_peak"), ".1%"),
                number(row.get("peak_memory_bytes"), ".1f", 1 / 2**30),
                *(number(row.get("power", {}).get(name), ".0f") for name in ("watts", "sm_mhz")),
                number(speed / peer if speed and peer else None, ".2f"),
                row.get("skipped", f"{state(row)}{wide}"),
            ]
        )
    return table


def goals_section(rows: dict[str, dict[str, Any]]) -> list[tuple[str, list[list[str]]]]:
    """Compare the fastest step of each precision with its goal,
    and with Hugging Face's eager step.
    """
    eager = rows.get("huggingface eager", {}).get("sequences_per_second")
    table = [
        [
            "precision",
            "fastest step",
            "sequences/s",
            "goal on an H200",
            "of the goal",
            "x Hugging Face eager",
        ]
    ]
    for precision, goal in GOALS.items():
        speeds = {
            name: row["sequences_per_second"]
            for name, row in rows.items()
            if "forms" in row
            and "sequences_per_second" in row
            and (row["precision"] or "bf16") == precision
        }
        if speeds:
            name, speed = max(speeds.items(), key=lambda item: item[1])
            ratios = [number(speed / goal, ".1%"), number(speed / eager if eager else None, ".2f")]
            table.append([precision, name, number(speed), number(goal, ".0f"), *ratios])
    return [("goals", table)] if len(table) > 1 else []


def profile_table(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return the groups of kernels of each profiled step."""
    table = [["step", "group", "ms", "share", "rate", "of peak", "longest"]]
    for name, row in rows.items():
        if "groups" not in row:
            table.append([name, "-", "-", "-", "-", "-", state(row)])
        for group, values in row.get("groups", {}).items():
            longest = next(iter(values["names"]), "")[:60]
            cells = [
                number(values["seconds"], ".3f", 1e3),
                number(values["share"], ".1%"),
                rate(values),
            ]
            table.append([name, group, *cells, number(values.get("share_of_peak"), ".0%"), longest])
    return table


def tests_table(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return the number of tests with each outcome, and the failed tests."""
    outcomes = [row["outcome"] for row in rows.values()]
    table = [
        ["test", "outcome"],
        *([f"{outcomes.count(o)} tests", o] for o in sorted(set(outcomes))),
    ]
    table += [
        [name.split("::", 1)[-1], "failed"]
        for name, row in rows.items()
        if row["outcome"] == "failed"
    ]
    return table


def plain_table(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return every row with its numbers and texts, and its result."""
    table = [["row", "found", "result"]]
    for name, row in rows.items():
        shown = {
            key: value for key, value in row.items() if isinstance(value, int | float | str | dict)
        }
        cells = [f"{key} {_short(value)}" for key, value in shown.items() if key not in NOT_SHOWN]
        table.append([name, ", ".join(cells) or "-", row.get("skipped", state(row))])
    return table


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name} {_short(part)}" for name, part in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""``mlaudit check``: run official tools and our own checks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from mlaudit.advice import OWN
from mlaudit.check import check as check_path
from mlaudit.findings import ROUND, STANDARD_OUTPUT, Finding, Outcome, failed, write_json
from mlaudit.scratch_copy import without_parts
from mlbert.host.console import new_table, safe, standard_output, waiting, write_page

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_COLORS = {Outcome.PASS: "green", Outcome.WARN: "yellow", Outcome.ERROR: "bold red"}


@app.command()
def check(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH",
            help="Submission trees, systems in results/, folders of result_*.txt, or logs.",
        ),
    ],
    division: Annotated[
        Literal["open", "closed"] | None, typer.Option(help="Require this division everywhere.")
    ] = None,
    general: Annotated[
        bool,
        typer.Option("--general", help="Run the checks that apply to every benchmark."),
    ] = False,
    ruleset: Annotated[
        str | None,
        typer.Option(
            metavar="X.Y.0", help="Apply this ruleset instead of that of the logs' round."
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Also write all findings there; - prints only JSON."
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the findings as an HTML page.")
    ] = None,
) -> None:
    """Run the official tools and our own checks on a copy of the submission,
    by the rules of its round.

    Exit status: 0 no errors, 1 at least one ERROR, 2 a path cannot be checked.

    \b
    Examples:
      mlbert submission check runs/quickstart/result_0.txt --division open
      mlbert submission check results/SYSTEM --html check.html
    """
    console = standard_output()
    with waiting("checking") as update:
        checked = {
            path: check_path(path, division, update, general=general, ruleset=ruleset)
            for path in without_parts(paths)
        }
    if json_file is not None:
        write_json(json_file, checked)
    if json_file != STANDARD_OUTPUT:
        for path, findings in checked.items():
            for finding in findings:
                if finding.check == ROUND:
                    console.print(safe(finding.words))
            console.print(f"{safe(path)}: {_verdict(findings)}\n")
            console.print(_as_table(findings))
            console.print(safe(_summary(findings)))
    if html is not None:
        from mlaudit.report.page import findings_page  # matplotlib takes a second

        found = [finding for findings in checked.values() for finding in findings]
        write_page(html, findings_page(found, ", ".join(map(str, paths))))
        typer.echo(f"page: {html}")
    if any(failed(findings) for findings in checked.values()):
        raise typer.Exit(1)


def _verdict(findings: list[Finding]) -> str:
    num_failed = sum(finding.outcome is Outcome.ERROR for finding in findings)
    return f"{num_failed} of {len(findings)} checks FAILED" if num_failed else "no errors"


def _as_table(findings: list[Finding]) -> Table:
    """Return a table with the worst findings first and one row per subject for our own passed
    checks.
    """
    table = new_table("", ("result", "check"))
    passed: dict[str, list[str]] = {}
    for finding in sorted(findings, key=lambda finding: -finding.severity):
        if finding.check == ROUND:
            continue
        if finding.outcome is Outcome.PASS and finding.check.startswith(OWN):
            passed.setdefault(finding.subject, []).append(finding.check.removeprefix(OWN))
            continue
        words = finding.words
        if finding.outcome in (Outcome.WARN, Outcome.ERROR) and finding.advice.honest:
            words += f"\nPerhaps {finding.advice.honest}. To settle it: {finding.advice.settle}."
        table.add_row(*_row(finding.outcome, finding.check, finding.subject, words))
    for name, checks in passed.items():
        table.add_row(*_row(Outcome.PASS, "own checks", name, f"{len(checks)} passed"))
    return table


def _summary(findings: list[Finding]) -> str:
    """Return how many checks passed and how many did not, with the reasons of skipped ones."""
    counted = [finding for finding in findings if finding.check != ROUND]
    num_passed = sum(finding.outcome is Outcome.PASS for finding in counted)
    parts = []
    for outcome in (Outcome.ERROR, Outcome.WARN, Outcome.NOTE, Outcome.SKIP):
        found = [finding for finding in counted if finding.outcome is outcome]
        if not found:
            continue
        plural = "s" if len(found) > 1 and outcome is not Outcome.SKIP else ""
        reasons = "; ".join(dict.fromkeys(finding.words for finding in found))
        more = f": {reasons}" if outcome is Outcome.SKIP else ""
        parts.append(f"{len(found)} {outcome.value}{plural}{more}")
    is_bad = any(finding.outcome in (Outcome.ERROR, Outcome.WARN) for finding in counted)
    passed = f"{num_passed} checks passed" if is_bad else f"All {num_passed} checks passed"
    return f"{passed} ({', '.join(parts)})." if parts else f"{passed}."


def _row(outcome: Outcome, check_name: str, subject: str, words: str) -> tuple[str, str]:
    color = _COLORS.get(outcome)
    result = f"[{color}]{outcome.value}[/]" if color else outcome.value
    place = "" if subject == "." else f"  {safe(subject)}"
    return result, f"[bold]{safe(check_name)}[/]{place}\n{safe(words)}"

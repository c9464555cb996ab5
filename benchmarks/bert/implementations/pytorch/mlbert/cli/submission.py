"""``mlbert submission``: check, describe, extend, seal and export a submission tree."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from mlbert.cli import compare
from mlbert.host.errors import UserError
from mlbert.host.provenance import tree_root
from mlbert.host.repository import repository
from mlbert.mlperf import official
from mlbert.mlperf.call_sites import own_trace
from mlbert.mlperf.check import check
from mlbert.mlperf.describe import describe_system, write_description
from mlbert.mlperf.findings import STANDARD_OUTPUT, Finding, Outcome, failed, write_json
from mlbert.mlperf.logs import read_log
from mlbert.mlperf.new_system import new_system
from mlbert.mlperf.scratch_copy import without_parts
from mlbert.mlperf.seal import SUMS, seal
from mlbert.mlperf.trace import Tracer
from mlbert.mlperf.tree_export import export_tree
from mlbert.programs.console import new_table, printable, safe, standard_output, waiting, write_page

app = typer.Typer(
    help="Check, describe, extend, seal, export a submission tree.",
    add_completion=False,
    rich_markup_mode=None,
)

Division = Literal["open", "closed"]
Framework = Literal["PyTorch", "TensorFlow"]
_OWN = "own: "
_COLOURS = {Outcome.PASS: "green", Outcome.WARN: "yellow", Outcome.ERROR: "bold red"}
_NEXT_STEPS = """
Next (details in docs/add_a_system.md):
1. {folder}/env.sh: your site's image, data and LOGDIR, and the submitter.
2. {folder}/{config}: your numbers. Its name states nodes x ranks x batch x accumulation;
   rename it when they change.
3. cd {folder} && source {config} && mlbert train --print-config
4. {folder}/README.md: the machine, and the source of each number.
5. benchmarks/bert/implementations/README.md: add this line to the table:
   {row}
6. On the machine: mlbert submission describe-system --out systems/{name}.json,
   fill in what it could not detect, and remove {template}.
   To pass as a submission, the tree also needs the ten logs of results/{name}/bert."""


@app.command("check")
def check_command(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH", help="Trees, systems in results/, folders of result_*.txt, or logs."
        ),
    ],
    division: Annotated[
        Division | None, typer.Option(help="Require this division everywhere.")
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
    """Run the official tools (ruleset 5.0.0) and our own checks on a copy of the tree.

    Exit status: 0 no errors, 1 at least one ERROR, 2 a path cannot be checked.
    """
    console = standard_output()
    with waiting("checking") as update:
        checked = {path: check(path, division, update) for path in without_parts(paths)}
    if json_file is not None:
        write_json(json_file, checked)
    if json_file != STANDARD_OUTPUT:
        for path, findings in checked.items():
            console.print(_as_table(findings, str(path)))
    if html is not None:
        from mlbert.report.page import findings_page  # matplotlib takes a second

        found = [finding for findings in checked.values() for finding in findings]
        write_page(html, findings_page(found, ", ".join(map(str, paths))))
        typer.echo(f"page: {html}")
    if any(failed(findings) for findings in checked.values()):
        raise typer.Exit(1)


@app.command("trace")
def trace_command(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="A result_<i>.txt.")],
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="One key; default: a line for each key.")
    ] = None,
    tree: Annotated[
        Path | None, typer.Option(help="Tree that contains the log's files; default: this one.")
    ] = None,
) -> None:
    """Say what a log's values mean and what produced them; exit with 1 if a link is broken."""
    content = read_log(log)
    if not content.events:
        raise UserError(
            "log.incomplete", log, "has no line of an MLPerf log", "Give a result_<i>.txt"
        )
    tracer = Tracer(content, _tree(tree))
    words = [str(log.resolve()), *([key] if key else []), "--tree", str(tracer.sources.tree)]
    if (own := own_trace(tracer.sources, words)) is not None:
        typer.echo(printable(f"note: traced with the code of commit {tracer.sources.commit}"))
        typer.echo(own.stdout, nl=False)
        typer.echo(own.stderr, nl=False, err=True)
        raise typer.Exit(own.returncode)
    keys = [key] if key else tracer.keys
    chains = [tracer.chain(name) for name in keys]
    if tracer.sources.gap:
        typer.echo(
            printable(
                f"note: {tracer.sources.gap}; reading the current files in {tracer.sources.tree}"
            )
        )
    for chain in chains:
        if key is None:
            lines = [chain.summary(), *(f"  {link}" for link in chain.broken)]
        else:
            lines = chain.lines()
        for line in lines:
            typer.echo(printable(line))
    if any(chain.broken for chain in chains):
        raise typer.Exit(1)


def _tree(given: Path | None) -> Path:
    if given is not None and not given.is_dir():
        raise UserError(
            "file.missing", "--tree", f"{given} is not a folder", "Name the root of a repository"
        )
    if given is None and repository() is None:
        reason = "is not given, and the installed package has no repository around it"
        raise UserError("config.missing", "--tree", reason, "Name the root of a repository")
    return (given or tree_root()).resolve()


@app.command("describe-system")
def describe_command(
    out: Annotated[Path, typer.Option(help="File to write, systems/<system>.json.")],
    submitter: Annotated[str, typer.Option(help="Organisation, as in the logs.")] = "mlbert",
    division: Annotated[Division, typer.Option(help="Division of the results.")] = "open",
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes like this one.")] = 1,
    framework: Annotated[Framework, typer.Option(help="Training framework.")] = "PyTorch",
) -> None:
    """Write the description of this machine with the 33 fields
    that the official checker requires.
    """
    facts = describe_system(submitter, division, nodes, framework=framework)
    write_description(out, facts)
    console = standard_output()
    table = new_table(safe(out), ("field", "value"))
    for name, value in facts.items():
        table.add_row(name, safe(value))
    console.print(table)
    unknown = [name for name, value in facts.items() if value == "unknown"]
    if unknown:
        console.print(f"Could not be detected, fill in by hand: {', '.join(unknown)}")


@app.command("new-system")
def new_system_command(
    name: Annotated[
        str, typer.Argument(help="Letters, digits and underscores, such as acme_x1_h100_n1.")
    ],
    other: Annotated[str, typer.Option("--from", help="System to copy from.", metavar="OTHER")],
    config: Annotated[
        str | None, typer.Option(help="Which of its configs, if it has several.")
    ] = None,
    tree: Annotated[Path | None, typer.Option(help="Tree to extend; default: this one.")] = None,
) -> None:
    """Create a folder for another machine and a template of its description."""
    root = _tree(tree)
    made = new_system(name, other, root, config)
    for path in (*sorted(made.folder.iterdir()), made.template):
        typer.echo(f"created {path.relative_to(root)}")
    folder = made.folder.relative_to(root)
    template = made.template.relative_to(root)
    typer.echo(
        _NEXT_STEPS.format(
            folder=folder, config=made.config, template=template, name=name, row=made.row
        )
    )


@app.command("seal")
def seal_command(
    system: Annotated[str, typer.Argument(help="Folder in results/.")],
    tree: Annotated[Path | None, typer.Option(help="Its tree; default: this one.")] = None,
    logdir: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="LOGDIR", help="First copy logs and run files from this folder."
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Sign with this private key (ssh or minisign)."),
    ] = None,
) -> None:
    """Write SHA256SUMS over a system's logs, run files and description, for sha256sum -c."""
    root = _tree(tree)
    names = seal(system, root, logdir, key)
    typer.echo(
        f"{root / 'results' / system / SUMS} covers {len(names)} files{', signed' if key else ''}"
    )


@app.command("export")
def export_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="New folder for the tree.")],
    tree: Annotated[Path | None, typer.Option(help="Tree to export; default: this one.")] = None,
) -> None:
    """Export the tree without tests, tools, records, caches and dot files,
    and run the repository checker on it.
    """
    num_files = export_tree(_tree(tree), directory)
    finding = official.run(official.repo_checker(directory.resolve()))[0]
    console = standard_output()
    console.print(safe(f"{num_files} files in {directory}. repo_checker: {finding.words}"))
    if failed([finding]):
        raise typer.Exit(1)


app.command("diff")(compare.diff_command)
app.command("repeat")(compare.repeat_command)


def _as_table(findings: list[Finding], subject: str) -> Table:
    """Return a table with the worst findings first
    and one row per subject for our own passed checks.
    """
    num_failed = sum(finding.outcome is Outcome.ERROR for finding in findings)
    verdict = f"{num_failed} of {len(findings)} checks FAILED" if num_failed else "nothing FAILED"
    table = new_table(f"{safe(subject)}: {verdict}", ("result", "check"))
    passed: dict[str, list[str]] = {}
    for finding in sorted(findings, key=lambda finding: -finding.severity):
        if finding.outcome is Outcome.PASS and finding.check.startswith(_OWN):
            passed.setdefault(finding.subject, []).append(finding.check.removeprefix(_OWN))
            continue
        table.add_row(*_row(finding.outcome, finding.check, finding.subject, finding.words))
    for name, checks in passed.items():
        table.add_row(*_row(Outcome.PASS, "own checks", name, ", ".join(checks)))
    return table


def _row(outcome: Outcome, check_name: str, subject: str, words: str) -> tuple[str, str]:
    colour = _COLOURS.get(outcome)
    result = f"[{colour}]{outcome.value}[/]" if colour else outcome.value
    place = "" if subject == "." else f"  {safe(subject)}"
    return result, f"[bold]{safe(check_name)}[/]{place}\n{safe(words)}"

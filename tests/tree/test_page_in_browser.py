"""The pages of `mlbert report`, `plan` and `submission check` in Chromium, from file://, on desktop
and phone, light and dark. Nothing overlaps, every figure is shown, no page scrolls sideways, and
the console stays empty.
"""

import html
import json
import re
import shutil
from pathlib import Path

import pytest

from mlaudit.findings import Finding, Outcome
from mlaudit.planner.cost import Prices
from mlaudit.report.page import findings_page, report_page
from mlaudit.report.results import read_result
from mlaudit.report.runs import read_systems
from mlbert.cli.main import main
from programs import run_quietly
from simple_logs import write_log

WIDTHS = (1280, 390)
# The policy would block the probe script.
POLICY = re.compile(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>")
PROBE = """<script>addEventListener('load', () => {
  const ink = getComputedStyle(document.body).color;
  const found = {figures: 0, scrolls: 0, problems: [], width: innerWidth, ink};
  const report = (problem, element) =>
    found.problems.push(problem + ': ' + element.textContent.trim().slice(0, 60));
  const before = (end, begin) => end <= begin + 1;
  const apart = (a, b) => before(a.right, b.left) || before(b.right, a.left)
    || before(a.bottom, b.top) || before(b.bottom, a.top);
  const inside = (a, b) => before(b.left, a.left) && before(a.right, b.right)
    && before(b.top, a.top) && before(a.bottom, b.bottom);
  for (const figure of document.querySelectorAll('svg.plot')) {
    const frame = figure.getBoundingClientRect();
    const scale = frame.width / figure.viewBox.baseVal.width;
    found.figures += frame.width > 100 && frame.height > 50;
    const texts = [...figure.querySelectorAll('text')]
      .map(text => [text, text.getBoundingClientRect()]);
    texts.forEach(([text, box], index) => {
      const size = parseFloat(getComputedStyle(text).fontSize) * scale;
      if (!box.width || size < 7) report('too small', text);
      if (!inside(box, frame)) report('cut off', text);
      for (const [other, place] of texts.slice(index + 1))
        if (!apart(box, place)) report('overlaps ' + other.textContent, text);
    });
  }
  const rows = {};
  for (const tile of document.querySelectorAll('.tiles div')) {
    const box = tile.getBoundingClientRect();
    rows[box.top] = Math.max(rows[box.top] || 0, box.right);
  }
  found.rows = Object.values(rows).length;
  for (const right of Object.values(rows))
    if (!before(document.querySelector('.tiles').getBoundingClientRect().right, right))
      found.problems.push('a row of tiles has a gap');
  for (const box of document.querySelectorAll('.scroll'))
    if (box.scrollWidth > box.clientWidth) {
      found.scrolls++;
      const gradients = getComputedStyle(box).backgroundImage.split('linear-gradient').length - 1;
      if (gradients !== 4) report('no shadows', box);
    }
  if (document.documentElement.scrollWidth > innerWidth) found.problems.push('scrolls sideways');
  for (const entry of performance.getEntriesByType('resource'))
    found.problems.push('fetches ' + entry.name);
  const output = parent.document.createElement('pre');
  output.textContent = JSON.stringify(found);
  parent.document.body.append(output);
})</script></body>"""


@pytest.fixture(scope="module")
def chromium() -> str:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("needs a browser: apt-get install chromium")
    return program


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return {name: page}: one system with all figures, many systems with long names,
    many runs, and an audit.
    """
    folder = tmp_path_factory.mktemp("pages")
    logdir = folder / "a_folder_of_runs_with_a_rather_long_name_for_a_headline_of_a_phone"
    for index in range(10):
        curve = [(1000 * k, 60.0 * k + index, 0.7215 - 0.4 / k**2) for k in range(1, 18 + index)]
        status = "aborted" if index == 7 else "success"
        logged = {"seed": index, "global_batch_size": 768}
        write_log(logdir / f"result_{index}.txt", curve, logged=logged, status=status)
        steps = (
            {
                "kind": "step",
                "step": k,
                "samples": 100 * k,
                "seconds": k,
                "loss": 9 / k,
                "learning_rate": 1e-3 / k,
            }
            for k in range(1, 100)
        )
        (logdir / f"run_{index}").mkdir()
        (logdir / f"run_{index}" / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    (logdir / "data").mkdir()
    (logdir / "data" / "baselines.json").write_text(
        '{"most_frequent_accuracy": 0.04, "bigram_accuracy": 0.2}'
    )
    for system in range(14):
        for index in range(3):
            log = (
                folder
                / f"results/{system}xVendorMachine_x8_Accelerator-SXM-141GB/bert/result_{index}.txt"
            )
            curve = [(1e5 * k, 3.0**system * k + index, 0.1 * k) for k in range(1, 9)]
            write_log(log, curve, logged={"seed": index, "global_batch_size": 256 * (system + 1)})
    for index in range(25):
        write_log(
            folder / "many" / f"result_{index}.txt",
            [(50, 8.0, 0.3), (100 + index, 20.0 + index, 0.73)],
        )
    made = {
        name: report_page([read_result(system) for system in read_systems([path])], Prices())
        for name, path in {"one": logdir, "systems": folder, "many": folder / "many"}.items()
    }
    plans = {
        "plan": "--gpu a5000 --gpus 32",
        "sweep": "--gpu gb200 --sweep --price-per-gpu-hour 3 --budget 10",
    }
    for name, options in plans.items():
        with pytest.raises(SystemExit):
            main(["plan", *options.split(), "--html", str(folder / f"{name}.html")])
        made[name] = (folder / f"{name}.html").read_text()
    words = "a word_without_any_break_that_is_as_long_as_a_path_in_somebody_elses_tree " * 3
    made["audit"] = findings_page(
        [Finding("own: layout", words, outcome, words) for outcome in Outcome], words
    )
    return made


def run(chromium: str, page: Path, *flags: str) -> tuple[str, str]:
    command = [
        chromium,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--v=0",
        *flags,
    ]
    end = run_quietly(*command, "--dump-dom", page.as_uri(), timeout=120)
    return end.stdout, end.stderr


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_pages_render_at_every_width(
    chromium: str, pages: dict[str, str], tmp_path: Path, scheme: str
) -> None:
    """The schemes differ in colors only: one page is enough for the dark one."""
    pages = pages if scheme == "light" else {"one": pages["one"]}
    frames = []
    for page in pages.values():
        probed, count = POLICY.subn("", page.replace("</body>", PROBE))
        assert count == 1
        frames += [
            f'<iframe width="{width}" height="900" srcdoc="{html.escape(probed)}"></iframe>'
            for width in WIDTHS
        ]
    (tmp_path / "frames.html").write_text(
        f"<!doctype html><meta charset=utf-8><body>{''.join(frames)}</body>"
    )
    flags = ["--virtual-time-budget=20000", *(["--force-dark-mode"] if scheme == "dark" else [])]
    document, _ = run(chromium, tmp_path / "frames.html", *flags)
    found = [
        json.loads(html.unescape(text)) for text in re.findall(r"<pre>(\{.*?\})</pre>", document)
    ]
    assert len(found) == len(frames)
    assert sorted({one["width"] for one in found}) == sorted(WIDTHS)
    assert {problem for one in found for problem in one["problems"]} == set()
    figures = sorted(page.count('<svg class="plot"') for page in pages.values() for _ in WIDTHS)
    assert sorted(one["figures"] for one in found) == figures
    assert max(one["rows"] for one in found) > 1
    assert any(one["scrolls"] for one in found)
    red = {int(re.findall(r"\d+", one["ink"])[0]) for one in found}
    assert min(red) > 200 if scheme == "dark" else max(red) < 60


def test_the_console_stays_empty(chromium: str, pages: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(pages["one"])
    document, log = run(chromium, tmp_path / "report.html")
    assert "olympic mean" in document
    assert [line for line in log.splitlines() if "CONSOLE" in line] == []


def test_passes_fold_into_one_row_in_print(chromium: str, tmp_path: Path) -> None:
    findings = [
        Finding(f"own: check {number}", "a log", Outcome.PASS, "fine") for number in range(90)
    ]
    (tmp_path / "page.html").write_text(
        findings_page([*findings, Finding("one", "x", Outcome.ERROR, "bad")], "logs")
    )
    run(chromium, tmp_path / "page.html", f"--print-to-pdf={tmp_path}/page.pdf")
    assert len(re.findall(rb"/Type\s*/Page\b", (tmp_path / "page.pdf").read_bytes())) == 1

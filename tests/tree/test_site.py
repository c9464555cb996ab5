"""Build the documentation site and check its pages;
mistakes in a copy of the pages must fail the build.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from programs import run_quietly
from site_hook import PAGES_ELSEWHERE

REPOSITORY = "https://github.com/example/mlbert"
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
BLOCKS = {
    "h1",
    "h2",
    "h3",
    "table",
    "tr",
    "td",
    "ul",
    "ol",
    "li",
    "p",
    "pre",
    "em",
    "strong",
    "img",
}
FOR_THE_API = {
    "a",
    "abbr",
    "article",
    "code",
    "details",
    "div",
    "h4",
    "h5",
    "nav",
    "small",
    "span",
    "summary",
    "b",
}


class Html(HTMLParser):
    """The tags of a page, each with its attributes,
    and its text without white space and anchors of headings.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._is_anchor = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._is_anchor = ("class", "headerlink") in attrs

    def handle_data(self, data: str) -> None:
        if not self._is_anchor:
            self.text += "".join(data.split())
        self._is_anchor = False


def article(page: Path) -> Html:
    found = re.search(r"<article[^>]*>(.*)</article>", page.read_text(encoding="utf-8"), re.DOTALL)
    assert found, page
    return Html(found[1])


def build(root: Path, out: Path, repository: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {
        "REPOSITORY_URL": repository,
        "NO_MKDOCS_2_WARNING": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return run_quietly(
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        out,
        cwd=root,
        env=environ,
    )


@pytest.fixture(scope="module")
def site(tree_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(tree_root, out, REPOSITORY)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def pages(tracked: list[Path], tree_root: Path) -> dict[Path, str]:
    """Return {Markdown file: its page on the site}."""
    names = {
        path: path.relative_to(tree_root / "docs")
        for path in tracked
        if tree_root / "docs" in path.parents
    }
    found = {
        path: name.with_suffix(".html").as_posix()
        for path, name in names.items()
        if path.suffix == ".md"
    }
    elsewhere = {
        tree_root / source: Path(page).with_suffix(".html").as_posix()
        for source, page in PAGES_ELSEWHERE.items()
    }
    return found | {path: page for path, page in elsewhere.items() if path.is_file()}


def test_pages_are_in_the_navigation_and_show_what_the_repository_shows(
    site: Path, pages: dict[Path, str]
) -> None:
    """MkDocs reads Markdown by other rules than repositories do, for example in lists."""
    tags = Html((site / "index.html").read_text(encoding="utf-8")).tags
    linked = {
        attrs.get("href") for _, attrs in tags if "md-nav__link" in (attrs.get("class") or "")
    }
    assert set(pages.values()) - linked == set()
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    for path, page in pages.items():
        if path.parent.name != "api":
            text = COMMENT.sub("", path.read_text(encoding="utf-8"))
            expected = Html(markdown.render(text))
            shown = article(site / page)
            assert shown.text == expected.text, path
            counts = [
                Counter(tag for tag, _ in html.tags if tag in BLOCKS) for html in (shown, expected)
            ]
            assert counts[0] == counts[1], path


def test_docstrings_hold_no_tags(site: Path) -> None:
    """A word in angle brackets must be marked as code to be seen."""
    for page in (site / "api").glob("*.html"):
        assert {tag for tag, _ in article(page).tags} <= BLOCKS | FOR_THE_API, page
        assert "mlbert." in article(page).text, page


def test_pages_link_to_files_of_the_repository_and_load_nothing_from_other_hosts(
    site: Path, tree_root: Path
) -> None:
    """The theme would load fonts, and ask the repository's host for its stars."""
    found = set()
    for page in site.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        tags = Html(html).tags
        links = [attrs.get("href") or "" for _, attrs in tags]
        found |= {
            link.removeprefix(f"{REPOSITORY}/")
            for link in links
            if link.startswith(f"{REPOSITORY}/")
        }
        loaded = [attrs["href"] or "" for tag, attrs in tags if tag == "link" and "href" in attrs]
        loaded += [attrs["src"] or "" for _, attrs in tags if "src" in attrs]
        assert [link for link in loaded if "//" in link] == [], page
        assert 'data-md-component="source"' not in html, page
    assert {
        "tree/HEAD/results/cpu_demo/bert",
        "blob/HEAD/LICENSE",
    } <= found
    for link in found:
        kind, _, path = link.partition("#")[0].partition("/HEAD/")
        place = tree_root / path
        assert place.is_dir() if kind == "tree" else place.is_file(), link
    for style in site.rglob("*.css"):
        assert not re.search(
            r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text(encoding="utf-8")
        ), style


@pytest.mark.slow
def test_mistakes_fail_the_build(tree_root: Path, tmp_path: Path) -> None:
    root = tmp_path / "tree"
    out = tmp_path / "site"
    shutil.copytree(tree_root / "docs", root / "docs")
    (root / "tools").mkdir()
    for name in ("site_hook.py", "site_worker.js"):
        shutil.copy(tree_root / "tools" / name, root / "tools")
    for path in tree_root.iterdir():
        if path.name not in ("docs", "tools"):
            (root / path.name).symlink_to(path)
    with (root / "docs/report.md").open("a", encoding="utf-8") as page:
        page.write(
            "[a](absent_a.md), [b](../absent_b.md), [c](data.md#absent_c), "
            "![d](images/absent_d.png).\n"
        )
        page.write("Not a link: `[e](absent_e.md)`.\n")
    (root / "docs/absent_f.md").write_text("# On no menu\n", encoding="utf-8")
    done = build(root, out, "")
    assert done.returncode != 0
    assert set(re.findall(r"absent_\w", done.stderr)) == {
        f"absent_{letter}" for letter in "abcdf"
    }, done.stderr
    assert "Aborted with 5 warnings" in done.stdout + done.stderr


def test_the_search_works_in_pages_opened_from_disk(site: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs a browser: apt-get install chromium")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"]
    page = f"file://{site / 'index.html'}?q=enroot"
    done = run_quietly(chromium, *words, "--dump-dom", page)
    assert 'href="slurm.html' in done.stdout or 'href="docker.html' in done.stdout
    assert "md-search-result__item" in done.stdout

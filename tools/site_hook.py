"""Hook of MkDocs: turn links between files of the repository into links of the documentation site.

Pages link to pages and other files by relative paths, as a view of the repository shows them. On
the site, a link to a page or to a file in docs/ leads there; a link to any other file leads to the
repository, or becomes text if REPOSITORY_URL is not set. A link to a missing file is a warning,
which fails a strict build.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
IMPLEMENTATIONS = "benchmarks/bert/implementations"
# Pages that stand elsewhere in the repository -> their pages on the site.
PAGES_ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "audit/README.md": "mlaudit.md",
    "benchmarks/bert/README.md": "result_to_code.md",
    "benchmarks/mosaic_bert/README.md": "mosaic_bert.md",
    f"{IMPLEMENTATIONS}/README.md": "systems/index.md",
    "records/README.md": "records/index.md",
}
# Folders with a page for each of their folders -> where these pages are on the site.
FOLDERS_OF_PAGES = {"records": "records", IMPLEMENTATIONS: "systems"}
# The theme's script for search in pages opened from disk, and ours, which needs no other host.
FOREIGN_WORKER = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
WORKER = ROOT / "tools/site_worker.js"
# Code comes first, so that no link is found inside it.
CODE_OR_LINK = re.compile(
    r"^```.*?^```$|`[^`\n]*`|\[([^\[\]]*)\]\(([^)#\s]+)(#[\w-]*)?\)", re.MULTILINE | re.DOTALL
)
log = get_plugin_logger("links")


def files_elsewhere() -> dict[Path, str]:
    """Return {page or image outside docs/: its name on the site}."""
    found = {ROOT / source: page for source, page in PAGES_ELSEWHERE.items()}
    for folder, place in FOLDERS_OF_PAGES.items():
        for page in sorted((ROOT / folder).glob("*/README.md")):
            found[page] = f"{place}/{page.parent.name}.md"
            for image in page.parent.glob("*.png"):
                found[image] = f"{place}/{page.parent.name}/{image.name}"
    return {source: page for source, page in found.items() if source.is_file()}


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that stand outside docs/, and their images."""
    for source, name in files_elsewhere().items():
        files.append(File.generated(config, name, abs_src_path=str(source)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page."""
    uris = {file.abs_src_path: file.src_uri for file in files}
    source = Path(str(page.file.abs_src_path))

    def rewrite(match: re.Match[str]) -> str:
        text = match[1]
        link = match[2]
        anchor = match[3] or ""
        if link is None or "://" in link:
            return match[0]
        target = Path(os.path.normpath(source.parent / link))
        if str(target) in uris:
            folder = posixpath.dirname(page.file.src_uri)
            return f"[{text}]({posixpath.relpath(uris[str(target)], folder)}{anchor})"
        if not target.exists() or not target.is_relative_to(ROOT):
            log.warning(f"{source.relative_to(ROOT)}: {link} does not exist")
        kind = "tree" if target.is_dir() else "blob"
        place = f"{config.repo_url}/{kind}/HEAD/{posixpath.relpath(target, ROOT)}{anchor}"
        return f"[{text}]({place})" if config.repo_url else text

    return CODE_OR_LINK.sub(rewrite, markdown)


def on_post_page(output: str, **_: object) -> str:
    """Remove the mark by which the theme finds the repository's link
    and asks its host for the number of stars, and put our script in place of one of another host.
    """
    own = f"<script>{WORKER.read_text(encoding='utf-8')}</script>"
    return output.replace('data-md-component="source"', "").replace(FOREIGN_WORKER, own)


on_post_template = on_post_page  # for 404.html

"""Write man pages (a folder of .gz files) as plain text without the commands of roff: man_pages.py FOLDER OUT"""

import gzip
import re
import sys
from pathlib import Path

HEADINGS, WORDS = (".SH", ".SS"), (".B", ".I", ".BR", ".IR", ".BI", ".IB", ".RB", ".RI", ".SM")
BREAKS = (*HEADINGS, ".PP", ".P", ".TP", ".IP", ".LP", ".sp")


def plain(page: str) -> str:
    """Return a page's text."""
    lines: list[str] = []
    for line in page.splitlines():
        if not line.startswith((".", "'")):
            lines.append(line)
            continue
        name, *rest = line.split(None, 1) or [""]
        lines += [""] if name in BREAKS else []
        lines += [rest[0].replace('"', "")] if rest and name in (*HEADINGS, *WORDS) else []
    text = re.sub(r"\\f(\[[^]]*\]|\(..|.)", "", "\n".join(lines)).replace("\\-", "-")
    text = re.sub(r"\\s[-+]?\d", "", re.sub(r"\\\((..)|\\\[([^]]*)\]", " ", text))
    for mark, instead in (("\\&", ""), ("\\e", "\\"), ("\\ ", " "), ("\\:", ""), ("\\|", "")):
        text = text.replace(mark, instead)
    return text


out = Path(sys.argv[2])
out.mkdir(parents=True, exist_ok=True)
for path in sorted(Path(sys.argv[1]).rglob("*.gz")):
    try:
        text = "" if path.is_symlink() else plain(gzip.decompress(path.read_bytes()).decode())
    except UnicodeDecodeError:
        continue
    if len(text) >= 300:
        (out / f"{path.name[:-3]}.txt").write_text(text, encoding="utf-8")

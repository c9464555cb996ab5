"""Move modules of the package and rewrite every name and path that mentions them.

    python tools/move_modules.py TABLE [--root DIR]

TABLE has a line for each module or package, "old new", as dotted names below mlbert ("store data.formats"); a longer
old name wins over a shorter one. Files move with `git mv`; imports, dotted names in strings and docs, and file names
are rewritten in all text files of the tree. It only moves: nothing is renamed or reworded, so work
in progress can be carried over by running the same table on it. Records and results are never touched.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

PACKAGE = Path("benchmarks/bert/implementations/pytorch/mlbert")
KEPT = ("records/", "results/", "docs/images/", "tests/assets/", "tools/m", "tools/rooms.txt")
SUFFIXES = {".py", ".md", ".sh", ".sub", ".toml", ".c", ".h", ".cu", ".cpp", ".txt", ".yaml", ".yml", ".cfg", ""}


def read_table(path: Path) -> dict[str, str]:
    """Return old to new dotted names; ``#`` begins a comment."""
    lines = (line.partition("#")[0].split() for line in path.read_text().splitlines())
    return {words[0]: words[1] for words in lines if words}


def modules(root: Path) -> dict[str, Path]:
    """Return every module and package below mlbert, dotted name to its file or folder."""
    found = {}
    for path in (root / PACKAGE).rglob("*"):
        name = ".".join(path.relative_to(root / PACKAGE).with_suffix("").parts)
        if (path.suffix == ".py" and path.stem != "__init__") or (path.is_dir() and (path / "__init__.py").exists()):
            found[name] = path
    return found


def target_of(name: str, table: Mapping[str, str]) -> str:
    """Return a module's new name, by the longest entry that matches it or a parent package."""
    for old in sorted(table, key=len, reverse=True):
        if name == old or name.startswith(f"{old}."):
            return table[old] + name[len(old) :]
    return name


def rewriter(names: Mapping[str, str]) -> Callable[[str], str]:
    """Return the function that rewrites a text.

    Args:
        names: every module that moves, old to new dotted name.
    """
    longest_first = sorted(names, key=len, reverse=True)
    dotted = re.compile(r"\bmlbert\.(" + "|".join(map(re.escape, longest_first)) + r")(?![\w])")
    paths = {old.replace(".", "/"): new.replace(".", "/") for old, new in names.items()}
    slashed = re.compile(
        r"\bmlbert/(" + "|".join(map(re.escape, sorted(paths, key=len, reverse=True))) + r")(?=[/.\"'`\s)])"
    )
    from_import = re.compile(
        r"^(?P<indent>[ \t]*)from mlbert(?P<base>[\w.]*) import (?P<names>\([^)]*\)|[^\n(]+)$", re.M
    )

    def split_import(match: re.Match[str]) -> str:
        """Rewrite ``from mlbert.package import module``; names that go to different packages get a line each."""
        base = match["base"].lstrip(".")
        words = [word.strip() for word in match["names"].strip("()").split(",") if word.strip()]
        lines: dict[str, list[str]] = {}
        for word in words:
            name, _, alias = word.partition(" as ")
            old = f"{base}.{name}" if base else name
            if old not in names:
                lines.setdefault(base, []).append(word)
                continue
            package, _, stem = names[old].rpartition(".")
            kept = alias or name
            lines.setdefault(package, []).append(stem if stem == kept else f"{stem} as {kept}")
        return "\n".join(
            f"{match['indent']}from mlbert{'.' if package else ''}{package} import {', '.join(found)}"
            for package, found in lines.items()
        )

    def rewrite(text: str) -> str:
        text = from_import.sub(split_import, text)
        text = dotted.sub(lambda match: f"mlbert.{names[match[1]]}", text)
        return slashed.sub(lambda match: f"mlbert/{paths[match[1]]}", text)

    return rewrite


def tracked(root: Path) -> list[str]:
    """Return the files that git tracks, or that are new and not ignored."""
    words = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted({name for name in listed if name and (root / name).is_file() and not (root / name).is_symlink()})


def rewrite_files(root: Path, rewrite: Callable[[str, str], str]) -> None:
    """Rewrite the text files of a tree except records and results; ``rewrite`` takes a file's text and suffix."""
    for name in tracked(root):
        path = root / name
        if name.startswith(KEPT) or path.suffix not in SUFFIXES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if (changed := rewrite(text, path.suffix)) != text:
            path.write_text(changed, encoding="utf-8")


def move(root: Path, table: Mapping[str, str]) -> None:
    """Rewrite the text files, then move the modules, and the other files of packages that move as a whole."""
    found = modules(root)
    names = {name: new for name in found if (new := target_of(name, table)) != name}
    rewrite = rewriter(names)
    rewrite_files(root, lambda text, _: rewrite(text))
    base = root / PACKAGE
    for name in tracked(root):
        path = root / name
        if not path.is_relative_to(base):
            continue
        inner = path.relative_to(base)
        # A file that is not a module (a template, a table) moves with its package.
        old = ".".join((inner.with_suffix("") if path.suffix == ".py" else inner.parent).parts).removesuffix(
            ".__init__"
        )
        new = target_of(old, table)
        if new == old:
            continue
        place = base / new.replace(".", "/")
        if path.name == "__init__.py" or path.suffix != ".py":
            place /= path.name
        else:
            place = place.with_suffix(".py")
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists() and path.name == "__init__.py":
            subprocess.run(["git", "-C", str(root), "rm", "-q", "-f", "--ignore-unmatch", str(path)], check=True)
            path.unlink(missing_ok=True)
            continue
        assert not place.exists(), f"{path} and {place}"
        subprocess.run(["git", "-C", str(root), "add", "-N", str(path)], check=True)
        subprocess.run(["git", "-C", str(root), "mv", str(path), str(place)], check=True)
        folder = place.parent
        while folder != base and not (folder / "__init__.py").exists():
            (folder / "__init__.py").touch()
            folder = folder.parent


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Move modules and rewrite what mentions them.")
    parser.add_argument("table", type=Path, help='lines "old new"')
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="checkout")
    given = parser.parse_args()
    move(given.root.resolve(), read_table(given.table))


if __name__ == "__main__":
    main()

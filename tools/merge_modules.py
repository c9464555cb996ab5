"""Rename top-level names, and merge and move modules; rewrite everything that mentions them.

    python tools/merge_modules.py TABLE [--root DIR]

TABLE has three kinds of lines, with dotted names below mlbert; the tool applies them in this order:

    rename module.name new             a top-level name of a module, wherever it is imported
    target: source source ...          merge the sources into the target, which may be new; imported ones come first
    move old new                       as `move_modules.py` does

Docstrings of sources follow the target's as paragraphs. Two merged modules must not define the same name: rename it
first. Afterwards run ``ruff check --fix`` and ``ruff format``.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from move_modules import KEPT, PACKAGE, modules, move, rewrite_files, rewriter, tracked


def top_names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines at its top level, without imports."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return found


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Return the names that a module's top-level imports bind, with their origin."""
    found = {}
    for node in tree.body:
        inner = node.body if isinstance(node, ast.If) else [node]
        for statement in inner:
            if isinstance(statement, ast.ImportFrom):
                found |= {a.asname or a.name: f"{statement.module}.{a.name}" for a in statement.names}
            elif isinstance(statement, ast.Import):
                found |= {a.asname or a.name.partition(".")[0]: a.name for a in statement.names}
    return found


def replace_spans(text: str, spans: list[tuple[int, int, int, int, str]]) -> str:
    """Return a text with spans (line, column, end line, end column; columns in bytes) replaced."""
    lines = [line.encode() for line in text.split("\n")]
    for line, column, end_line, end_column, new in sorted(set(spans), reverse=True):
        tail = lines[end_line - 1][end_column:]
        lines[line - 1 : end_line] = [lines[line - 1][:column] + new.encode() + tail]
    return "\n".join(line.decode() for line in lines)


def drop_empty(text: str) -> str:
    """Return a text without ``if TYPE_CHECKING`` blocks that hold nothing but removed imports."""
    spans = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.If) and all(isinstance(part, ast.Pass) for part in node.body):
            spans.append(span(node, "pass"))
    return replace_spans(text, spans)


def span(node: ast.expr | ast.stmt, new: str) -> tuple[int, int, int, int, str]:
    """Return the span of a node with its new text."""
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0, new


class Merger:
    """One merge: its sources and the new place of their names."""

    def __init__(self, target: str, sources: list[str], root: Path) -> None:
        self.target, self.root, self.base = target, root, root / PACKAGE
        self.members = self._ordered(list(dict.fromkeys([*([target] if self.path(target).exists() else []), *sources])))

    def path(self, name: str) -> Path:
        return self.base / f"{name.replace('.', '/')}.py"

    def _ordered(self, members: list[str]) -> list[str]:
        """Return the members, imported ones first."""
        needs = {m: self._members_imported(ast.parse(self.path(m).read_text()), members) - {m} for m in members}
        found: list[str] = []
        while len(found) < len(members):
            ready = [m for m in members if m not in found and needs[m] <= set(found)]
            found.append(ready[0] if ready else next(m for m in members if m not in found))
        return found

    @staticmethod
    def _members_imported(tree: ast.Module, members: list[str]) -> set[str]:
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlbert"):
                base = (node.module or "")[7:]
                found |= {m for m in members if m == base or any(f"{base}.{a.name}" == m for a in node.names)}
        return found

    def check(self) -> list[str]:
        """Return the conflicting names: defined twice, or imported as one thing and defined as another."""
        trees = {m: ast.parse(self.path(m).read_text()) for m in self.members}
        owners: defaultdict[str, set[str]] = defaultdict(set)
        for member, tree in trees.items():
            for name in top_names(tree):
                owners[name].add(member)
            for name, origin in imported_names(tree).items():
                if not any(origin in (f"mlbert.{m}.{name}", f"mlbert.{m}") for m in self.members):
                    owners[name].add(f"import {origin}")
        return [f"{name}: {', '.join(sorted(places))}" for name, places in owners.items() if len(places) > 1]

    def merge(self) -> None:
        """Write the merged file and remove the others."""
        doc, imports, bodies = [], [], []
        order = (
            [self.target, *[m for m in self.members if m != self.target]]
            if self.target in self.members
            else self.members
        )
        docs = {}
        for member in self.members:
            text = self.path(member).read_text()
            text = self._without_members(text)
            tree = ast.parse(text)
            lines = text.split("\n")
            docs[member] = ast.get_docstring(tree, clean=True)
            start = 0
            if docs[member]:
                start = tree.body[0].end_lineno or 0
            last = start
            for node in tree.body[1 if docs[member] else 0 :]:
                if not isinstance(node, ast.Import | ast.ImportFrom) and not (
                    isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
                ):
                    break
                last = node.end_lineno or last
            imports += [line for line in lines[start:last] if "from __future__" not in line]
            bodies.append("\n".join(lines[last:]).strip("\n"))
        doc = [docs[m] for m in order if docs[m]]
        whole = '"""' + "\n\n".join(doc) + ('\n"""' if len(doc) > 1 or "\n" in doc[0] else '"""')
        body = "\n\n\n".join(part for part in bodies if part)
        text = f"{whole}\n\nfrom __future__ import annotations\n" + "\n".join(imports) + f"\n\n{body}\n"
        for member in self.members:
            if member != self.target:
                subprocess.run(
                    ["git", "-C", str(self.root), "rm", "-qf", "--cached", str(self.path(member))], check=True
                )
                self.path(member).unlink()
        self.path(self.target).parent.mkdir(parents=True, exist_ok=True)
        self.path(self.target).write_text(text)
        subprocess.run(["git", "-C", str(self.root), "add", str(self.path(self.target))], check=True)

    def _without_members(self, text: str) -> str:
        """Return a module's text without its imports of other members; ``module.name`` becomes ``name``."""
        tree = ast.parse(text)
        spans, aliases = [], {}
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("mlbert"):
                continue
            base = (node.module or "")[7:]
            if base in self.members:
                for alias in node.names:
                    if alias.asname and alias.asname != alias.name:
                        aliases[alias.asname] = alias.name
                kept = []
            else:
                kept = [a for a in node.names if f"{base}.{a.name}" not in self.members]
                if len(kept) == len(node.names):
                    continue
                aliases |= {a.asname or a.name: "" for a in node.names if a not in kept}
            words = ", ".join(a.name + (f" as {a.asname}" if a.asname else "") for a in kept)
            spans.append(span(node, f"from {node.module} import {words}" if kept else "pass  # merged"))
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and aliases.get(node.value.id) == ""
            ):
                spans.append(span(node, node.attr))
            elif isinstance(node, ast.Name) and aliases.get(node.id):
                spans.append(span(node, aliases[node.id]))
        return re.sub(r"^[ \t]*pass  # merged\n", "", drop_empty(replace_spans(text, spans)), flags=re.M)


def renamed_imports(tree: ast.Module, module: str, old: str, new: str) -> tuple[set[str], list[tuple]]:
    """Return the name if a file imports it, as a set, and the spans where it is imported or used as ``module.name``."""
    package, _, stem = f"mlbert.{module}".rpartition(".")
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = [
        alias for node in imports if node.module == f"mlbert.{module}" for alias in node.names if alias.name == old
    ]
    spans = [(a.lineno, a.col_offset, a.lineno, a.col_offset + len(old), new) for a in names]
    bound = {a.asname or a.name for node in imports if node.module == package for a in node.names if a.name == stem}
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == old]
    owned = [node for node in attributes if isinstance(node.value, ast.Name) and node.value.id in bound]
    spans += [span(node, f"{ast.unparse(node.value)}.{new}") for node in owned]
    return {old for alias in names if not alias.asname}, spans


def rename_top(root: Path, module: str, old: str, new: str) -> None:
    """Rename a top-level name in its module and wherever it is imported or used as ``module.name``."""
    own = root / PACKAGE / f"{module.replace('.', '/')}.py"
    stem = module.rpartition(".")[2]
    for name in tracked(root):
        path = root / name
        if path.suffix != ".py" or name.startswith(KEPT):
            continue
        text = path.read_text()
        if path != own and (stem not in text or old not in text):
            continue
        tree = ast.parse(text)
        bound, spans = renamed_imports(tree, module, old, new)
        if path == own:
            bound.add(old)
            for node in tree.body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == old:
                    line = text.split("\n")[node.lineno - 1]
                    column = len(line[: line.index(old, line.index(" "))].encode())
                    spans.append((node.lineno, column, node.lineno, column + len(old), new))
        if bound:
            spans += [span(node, new) for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == old]
        if spans or f"{module}.{old}" in text:
            text = re.sub(rf"`{old}\b", f"`{new}", replace_spans(text, spans)) if spans else text
            path.write_text(re.sub(rf"\bmlbert\.{re.escape(module)}\.{old}\b", f"mlbert.{module}.{new}", text))


def rewrite_module_imports(text: str, moved: dict[str, str]) -> str:
    """Rewrite ``from mlbert.package import module`` and the uses ``module.name`` in one file."""
    if "mlbert" not in text:
        return text
    tree = ast.parse(text)
    spans, stems = [], {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("mlbert"):
            continue
        base = (node.module or "")[7:]
        found = [a for a in node.names if (f"{base}.{a.name}" if base else a.name) in moved]
        if not found:
            continue
        lines = []
        kept = [a for a in node.names if a not in found]
        if kept:
            words = ", ".join(a.name + (f" as {a.asname}" if a.asname else "") for a in kept)
            lines.append(f"from {node.module} import {words}")
        for alias in found:
            package, _, stem = moved[f"{base}.{alias.name}" if base else alias.name].rpartition(".")
            if alias.asname:
                lines.append(f"from mlbert.{package} import {stem} as {alias.asname}")
            else:
                lines.append(f"from mlbert.{package} import {stem}")
                stems[alias.name] = stem
        spans.append(span(node, ("\n" + " " * node.col_offset).join(dict.fromkeys(lines))))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in stems and stems[node.id] != node.id:
            spans.append(span(node, stems[node.id]))
    return replace_spans(text, spans)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Merge modules and rewrite what mentions them.")
    parser.add_argument("table", type=Path, help='lines "target: source ..." and "rename module.name new"')
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="checkout")
    given = parser.parse_args()
    root = given.root.resolve()
    lines = [line.partition("#")[0].split() for line in given.table.read_text().splitlines()]
    for words in (words for words in lines if words[:1] == ["rename"]):
        module, _, name = words[1].rpartition(".")
        rename_top(root, module, name, words[2])
    mergers = [Merger(words[0].rstrip(":"), words[1:], root) for words in lines if words and words[0].endswith(":")]
    known = modules(root)
    missing = [m for merger in mergers for m in merger.members if m not in known]
    clashes = [f"{merger.target}: {clash}" for merger in mergers for clash in merger.check()] if not missing else []
    if missing or clashes:
        sys.exit("\n".join([*(f"no module {name}" for name in missing), *clashes]))
    for merger in mergers:
        merger.merge()
    moved = {m: merger.target for merger in mergers for m in merger.members if m != merger.target}
    mentions = rewriter(moved)
    rewrite_files(root, lambda text, suffix: mentions(rewrite_module_imports(text, moved) if suffix == ".py" else text))
    if moves := {words[1]: words[2] for words in lines if words[:1] == ["move"]}:
        move(root, moves)


if __name__ == "__main__":
    main()

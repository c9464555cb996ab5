"""Idioms that save lines and cost readers may only become fewer."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from tree.idioms import idioms_of

# Part of the repository -> idiom -> how many are left.
# If there are fewer, the test asks for the lower number.
LEFT = {
    "package": {"tuples": 0, "splats": 0, "literals": 0, "conditions": 0, "middle": 4},
    "others": {"tuples": 0, "splats": 0, "literals": 0, "conditions": 0, "middle": 3},
}
PACKAGES = ("benchmarks", "audit")
KEPT_AS_THEY_RAN = ("records", "results")


def part_of(path: Path, tree_root: Path) -> str | None:
    """Return the part of the repository that a file counts in."""
    top = path.relative_to(tree_root).parts[0]
    if top in KEPT_AS_THEY_RAN:
        return None
    return "package" if top in PACKAGES else "others"


@pytest.mark.parametrize("part", LEFT)
def test_idioms_become_fewer(
    part: str, syntax_trees: dict[Path, ast.Module], tree_root: Path
) -> None:
    counts = dict.fromkeys(LEFT[part], 0)
    places = []
    for path, tree in syntax_trees.items():
        if part_of(path, tree_root) != part:
            continue
        for idiom, line in idioms_of(tree):
            counts[idiom] += 1
            places.append(f"{idiom}: {path.relative_to(tree_root)}:{line}")
    more = [idiom for idiom, count in counts.items() if count > LEFT[part][idiom]]
    listed = [place for place in places if place.partition(":")[0] in more]
    assert not more, "\n".join(["write one value a line, and arguments out:", *listed])
    assert counts == LEFT[part], "there are fewer: lower the numbers in LEFT"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a, b = 1, 2", {"tuples": 1}),
        ("a, b = b, a", {}),
        ("a, b = point()", {}),
        ("def f():\n    x = 1, 2\n    g(*x)", {"splats": 1}),
        ("def f(x):\n    g(*x)", {}),
        ("a = [*(1, 2), 3]", {"literals": 1}),
        ("f(**{'a': 1})", {"literals": 1}),
        ("a = {**b, **{'c': 1}}", {"literals": 1}),
        ("for x in (y if c else ()):\n    pass", {"conditions": 1}),
        ("x += [1] if c else []", {"conditions": 1}),
        ("n = 2 * (kind == 'cuda')", {"conditions": 1}),
        ("n = (1, 2)[is_late]", {"conditions": 1}),
        ("A = 1\ndef f():\n    pass\nB = 2\nC = 3", {"middle": 1}),
    ],
)
def test_idioms_are_found(source: str, expected: dict[str, int]) -> None:
    assert Counter(idiom for idiom, _ in idioms_of(ast.parse(source))) == expected

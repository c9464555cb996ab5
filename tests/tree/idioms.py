"""Find idioms that make code shorter to store and longer to read.

tuples      a, b = x, y     of values that do not belong together;
                            swaps and unpacked calls do not count
splats      x = a, b        and later f(*x) in the same function
literals    f(*(a, b)), [*(a, b)], {**{"a": 1}}: a literal that is opened where it stands
conditions  for x in (y if c else ()), x += y if c else [], number * (a < b), (a, b)[condition]
middle      modules with constants after the first function or class: two subjects in one module
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

Place = tuple[str, int]  # idiom, line
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
SEQUENCES = (ast.Tuple, ast.List)


def idioms_of(tree: ast.Module) -> Iterator[Place]:
    """Yield each idiom of a module and its line."""
    for node in ast.walk(tree):
        if _is_unrelated_assignment(node):
            yield "tuples", node.lineno
        if _opens_a_literal(node):
            yield "literals", node.lineno
        if _hides_a_condition(node):
            yield "conditions", getattr(node, "lineno", 0) or node.iter.lineno
        if isinstance(node, FUNCTIONS):
            for line in _packed_and_splatted(node):
                yield "splats", line
    for line in _constants_in_the_middle(tree):
        yield "middle", line
        return


def _is_unrelated_assignment(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    names = sorted(ast.unparse(name) for name in target.elts)
    values = sorted(ast.unparse(value) for value in node.value.elts)
    is_swap = names == values
    return not is_swap


def _opens_a_literal(node: ast.AST) -> bool:
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return any(key is None and isinstance(value, ast.Dict) for key, value in pairs)
    if isinstance(node, ast.Call):
        opened = [word.value for word in node.keywords if word.arg is None]
        if any(isinstance(value, ast.Dict) for value in opened):
            return True
        return any(_is_opened_sequence(argument) for argument in node.args)
    if isinstance(node, SEQUENCES):
        return any(_is_opened_sequence(element) for element in node.elts)
    return False


def _is_opened_sequence(node: ast.AST) -> bool:
    return isinstance(node, ast.Starred) and isinstance(node.value, SEQUENCES)


def _hides_a_condition(node: ast.AST) -> bool:
    if isinstance(node, (ast.For, ast.comprehension)):
        return isinstance(node.iter, ast.IfExp)
    if isinstance(node, ast.AugAssign) and isinstance(node.value, ast.IfExp):
        otherwise = node.value.orelse
        return isinstance(otherwise, ast.List) and not otherwise.elts
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return isinstance(node.left, ast.Compare) or isinstance(node.right, ast.Compare)
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, SEQUENCES) and not isinstance(node.slice, ast.Constant)
    return False


def _packed_and_splatted(function: ast.AST) -> Iterator[int]:
    """Yield the lines of f(*x) where x is a tuple that the same function packs."""
    packed = set(_packed_names(function))
    for node in ast.walk(function):
        if not isinstance(node, ast.Starred) or not isinstance(node.value, ast.Name):
            continue
        if node.value.id in packed:
            yield node.lineno


def _packed_names(function: ast.AST) -> Iterator[str]:
    """Yield the variables to which a function assigns a tuple of several values."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        target = node.targets[0]
        if isinstance(target, ast.Name) and len(node.value.elts) > 1:
            yield target.id
        if not isinstance(target, ast.Tuple):
            continue
        for name, value in zip(target.elts, node.value.elts, strict=False):
            if isinstance(name, ast.Name) and isinstance(value, (ast.Tuple, ast.Dict)):
                yield name.id


def _constants_in_the_middle(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of constants after a module's first function or class."""
    has_definitions = False
    for node in tree.body:
        has_definitions = has_definitions or isinstance(node, DEFINITIONS)
        if not has_definitions or not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name) and target.id.strip("_").isupper():
            yield node.lineno

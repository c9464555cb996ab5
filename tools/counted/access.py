"""Find the arguments of a Triton kernel's launch,
and analyze from its source which pointers it reads and writes.

A parameter is read if `tl.load` or an atomic operation gets a pointer derived from it, and written
if `tl.store` or an atomic operation does. The analysis follows helpers that are kernels too.
Pointers are derived through names, sums and differences, and the calls in `_KEEPING`. If constants
decide a branch, only the branch taken counts.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import triton.language as tl
from triton.runtime.jit import JITFunction

_READERS = ("load", "descriptor_load")
_WRITERS = ("store", "descriptor_store")
_UNKNOWN = object()
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_KEEPING = ("multiple_of", "max_contiguous", "make_block_ptr", "make_tensor_descriptor", "advance")
_LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


def bind_launch(
    kernel: JITFunction[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of a launch by name, and Triton's options."""
    options = {name: kwargs[name] for name in _LAUNCH_OPTIONS if name in kwargs}
    bound = kernel.signature.bind(
        *args, **{name: value for name, value in kwargs.items() if name not in options}
    )
    bound.apply_defaults()
    return dict(bound.arguments), options


@dataclass
class Access:
    """Names of parameters that are read, that are written, and that the result points into."""

    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    result: set[str] = field(default_factory=set)


@functools.cache
def access(kernel: JITFunction[Any], constants: tuple[tuple[str, Any], ...] = ()) -> Access:
    """Analyse a kernel or a helper that kernels call;
    ``constants`` are parameters with known values.
    """
    names = [parameter.name for parameter in kernel.params]
    finder = _Finder({name: {name} for name in names}, kernel.fn.__globals__, dict(constants))
    function = kernel.parse().body[0]
    assert isinstance(function, ast.FunctionDef), f"{kernel.fn.__name__} is not a function"
    for _ in range(2):  # in a loop, names may be derived from later ones
        for statement in function.body:
            finder.visit(statement)
    return finder.found


class _Finder(ast.NodeVisitor):
    def __init__(
        self, roots: dict[str, set[str]], names: Mapping[str, Any], constants: Mapping[str, Any]
    ) -> None:
        self.found = Access()
        self._roots = roots
        self._globals = names
        self._constants = constants

    def visit_If(self, node: ast.If) -> None:
        taken = self._decided(node.test)
        for statement in (
            *(node.body if taken is not False else ()),
            *(node.orelse if taken is not True else ()),
        ):
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if node.value is not None:
            self._assign(node.target, node.value)

    def visit_Return(self, node: ast.Return) -> None:
        self.generic_visit(node)
        if node.value is not None:
            self.found.result |= self._of(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = _called(node.func)
        given = self._of(node.args[0]) if node.args else set()
        if isinstance(node.func, ast.Attribute) and not _is_module(node.func.value):
            given = self._of(node.func.value)  # a method of a tensor descriptor
        if name in _READERS or name.startswith("atomic_"):
            self.found.reads |= given
        if name in _WRITERS or name.startswith("atomic_"):
            self.found.writes |= given
        if helper := self._helper(node):
            inside = access(helper)
            for parameter, value in _bound(helper, node):
                roots = self._of(value)
                self.found.reads |= roots if parameter in inside.reads else set()
                self.found.writes |= roots if parameter in inside.writes else set()

    def _helper(self, call: ast.Call) -> JITFunction[Any] | None:
        helper = self._globals.get(call.func.id) if isinstance(call.func, ast.Name) else None
        return helper if isinstance(helper, JITFunction) else None

    def _decided(self, test: ast.expr) -> bool | None:
        """Return the value of the test if constants decide it, else None."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._decided(test.operand)
            return None if inner is None else not inner
        if (
            isinstance(test, ast.Compare)
            and len(test.ops) == 1
            and type(test.ops[0]) in _COMPARISONS
        ):
            sides = [self._constant(side) for side in (test.left, test.comparators[0])]
            return None if _UNKNOWN in sides else bool(_COMPARISONS[type(test.ops[0])](*sides))
        value = self._constant(test)
        return None if value is _UNKNOWN else bool(value)

    def _constant(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if not isinstance(node, ast.Name):
            return _UNKNOWN
        if node.id in self._constants:
            return self._constants[node.id]
        value = self._globals.get(node.id, _UNKNOWN)
        return value.value if isinstance(value, tl.constexpr) else _UNKNOWN

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple):
            parts = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
            pairs = list(zip(target.elts, parts, strict=True))
        for name, part in pairs:
            if isinstance(name, ast.Name):
                self._roots.setdefault(name.id, set()).update(self._of(part))

    def _of(self, node: ast.expr) -> set[str]:
        """Return the parameters that this expression points into, if it is a pointer."""
        if isinstance(node, ast.Name):
            return self._roots.get(node.id, set())
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            return self._of(node.left) | self._of(node.right)
        if isinstance(node, ast.IfExp):
            return self._of(node.body) | self._of(node.orelse)
        if isinstance(node, ast.Call):
            name = _called(node.func)
            if helper := self._helper(node):
                inside = access(helper)
                return set().union(
                    *(
                        self._of(value)
                        for key, value in _bound(helper, node)
                        if key in inside.result
                    )
                )
            return self._of(node.args[0]) if name in _KEEPING and node.args else set()
        return set()


def _called(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_module(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("tl", "libdevice")


def _bound(helper: JITFunction[Any], call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Yield each parameter and argument of a call of a helper."""
    for parameter, value in zip(helper.params, call.args, strict=False):
        yield parameter.name, value
    for keyword in call.keywords:
        if keyword.arg:
            yield keyword.arg, keyword.value

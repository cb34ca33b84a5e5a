"""Small changes of a module's source, each of which some test should notice.

Hides: Python's syntax trees. Promises: every mutant is the source with one expression or statement
changed, and still Python. Left alone is what tests cannot or need not notice: documentation,
annotations, texts, and assertions that only tell the type checker something.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True)
class Mutant:
    """A changed source; first and last: the lines of the statement that was changed, from 1."""

    path: str
    source: str
    changed: str
    first: int
    last: int

    def diff(self) -> str:
        lines = difflib.unified_diff(
            self.source.splitlines(), self.changed.splitlines(), self.path, self.path, "", "", 1, ""
        )
        return "\n".join(list(lines)[2:])


def mutants_of(path: str, source: str) -> list[Mutant]:
    """All mutants of a file, in its order."""
    tree = ast.parse(source)
    found = []
    for statement, node in _places(tree):
        for part, text in _changes(node):
            changed = _replaced(source, part, text)
            try:
                compile(changed, path, "exec")
            except SyntaxError:  # as a return of None where a value is unpacked in its pattern
                continue
            last = statement.end_lineno or statement.lineno
            found.append(Mutant(path, source, changed, statement.lineno, last))
    return found


def _places(tree: ast.AST) -> Iterator[tuple[ast.stmt, ast.AST]]:
    """Nodes that may be changed, each with the innermost statement that it is in."""

    def inside(node: ast.AST, statement: ast.stmt | None) -> Iterator[tuple[ast.stmt, ast.AST]]:
        for child in _children(node):
            within = child if isinstance(child, ast.stmt) else statement
            if within is not None:
                yield within, child
            yield from inside(child, within)

    yield from inside(tree, None)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node that do something when a program runs, other than telling a text."""
    if isinstance(node, ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom | ast.Raise):
        return
    skipped = {"annotation", "returns", "decorator_list", "bases", "type_params"}
    for name, value in ast.iter_fields(node):
        if name in skipped:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_for_typing(child):
                yield child


def _is_for_typing(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    return isinstance(target, ast.Name) and target.id == "__all__"


def _changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Parts of a node, and what can stand in their places."""
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield from _negated(node.test)
    if isinstance(node, ast.comprehension):
        for condition in node.ifs:
            yield from _negated(condition)
    for text in _other_texts(node):
        yield node, text


def _negated(test: ast.expr) -> Iterator[tuple[ast.AST, str]]:
    """Comparisons and the like are changed in themselves."""
    if isinstance(test, ast.Call | ast.Name | ast.Attribute):
        yield test, f"(not {ast.unparse(test)})"


def _other_texts(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Compare(left, [op, *ops], values) if type(op) in _COMPARED:
            yield _text(ast.Compare(left, [_COMPARED[type(op)](), *ops], values))
        case ast.BinOp(left, op, right) if type(op) in _COMPUTED:
            yield _text(ast.BinOp(left, _COMPUTED[type(op)](), right))
        case ast.AugAssign(target, op, value) if type(op) in _COMPUTED:
            yield ast.unparse(ast.AugAssign(target, _COMPUTED[type(op)](), value))
        case ast.BoolOp(ast.And(), values):
            yield _text(ast.BoolOp(ast.Or(), values))
        case ast.BoolOp(ast.Or(), values):
            yield _text(ast.BoolOp(ast.And(), values))
        case ast.UnaryOp(ast.Not() | ast.USub() | ast.Invert(), operand):
            yield _text(operand)
        case ast.Constant(bool() as value):
            yield str(not value)
        case ast.Constant(int() | float() as value):
            yield repr(value + 1)
        case ast.IfExp(test, body, orelse):
            yield _text(ast.IfExp(test, orelse, body))
        case ast.Return(ast.expr() as value) if ast.unparse(value) != "None":
            yield "return None"
        case ast.Raise() | ast.Continue() | ast.Break():
            yield "pass"
        case ast.Expr(ast.Call()):
            yield "pass"


def _text(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def _replaced(source: str, node: ast.AST, text: str) -> str:
    """The source with another text for a node; columns of a tree are those of UTF-8."""
    lines = source.encode().splitlines(keepends=True)
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1  # type: ignore[attr-defined]
    before = lines[first][: node.col_offset]  # type: ignore[attr-defined]
    after = lines[last][node.end_col_offset :]  # type: ignore[attr-defined]
    return b"".join([*lines[:first], before, text.encode(), after, *lines[last + 1 :]]).decode()

"""Mutants of a function: its source with one small mistake each, as graders are to find them.

A function that is too short for `FEWEST` of them gets some with two mistakes, too.
"""

from __future__ import annotations

import ast
import difflib
import functools
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import NamedTuple

_BINARY: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub, ast.Mult),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div, ast.Add),
    ast.Div: (ast.Mult, ast.FloorDiv),
    ast.FloorDiv: (ast.Div, ast.Mult),
    ast.Mod: (ast.FloorDiv, ast.Mult),
    ast.Pow: (ast.Mult,),
}
_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt, ast.NotEq),
    ast.LtE: (ast.Lt, ast.GtE, ast.Eq),
    ast.Gt: (ast.GtE, ast.Lt, ast.NotEq),
    ast.GtE: (ast.Gt, ast.LtE, ast.Eq),
    ast.Eq: (ast.NotEq, ast.LtE, ast.GtE),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_NAMES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "sum": "max",
    "ceil": "floor",
    "popleft": "pop",
    "append": "appendleft",
    "extend": "append",
    "isend": "send",
    "divmod": "max",
    "square": "abs",
    "values": "keys",
    "partition": "rpartition",
    "empty_like": "zeros_like",
    "clone": "detach",
    "send_activation": "send_gradient",
    "send_gradient": "send_activation",
    "recv_activation": "recv_gradient",
    "recv_gradient": "recv_activation",
}

FEWEST = 40


class Mutant(NamedTuple):
    """One changed source; ``change`` names it: the lines taken away and the lines put in, short."""

    change: str
    source: str


@functools.cache
def mutants(source: str) -> tuple[Mutant, ...]:
    """Sources that differ from ``source``, which defines a function, by one mistake; none twice."""
    original = ast.parse(source)
    _drop_docstrings(original)
    plain = ast.unparse(original)
    texts = [text for text in dict.fromkeys(_changed_sources(original)) if text != plain]
    if len(texts) < FEWEST:
        twice = dict.fromkeys(_in_turn([_changed_sources(ast.parse(text)) for text in texts]))
        texts += [text for text in twice if text not in {plain, *texts}][: FEWEST - len(texts)]
    found: dict[str, Mutant] = {}
    for text in texts:
        change = _difference(plain, text)
        # Two may differ in the same words at different places.
        name = next(
            name
            for k in range(1, 100)
            if (name := f"{change} ({k})" if k > 1 else change) not in found
        )
        found[name] = Mutant(name, text)
    return tuple(found.values())


def _changed_sources(tree: ast.Module) -> Iterator[str]:
    for changed in _changed_trees(tree):
        text = ast.unparse(ast.fix_missing_locations(changed))
        if _is_python(text):
            yield text


def _in_turn(iterators: list[Iterator[str]]) -> Iterator[str]:
    """The first of each, then the second of each, and so on."""
    for of_each in itertools.zip_longest(*iterators):
        yield from (text for text in of_each if text is not None)


def _drop_docstrings(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]


def _difference(before: str, after: str) -> str:
    taken, put, above = [], [], "the head"
    for line in difflib.ndiff(before.splitlines(), after.splitlines()):
        text = line[2:].strip()
        if line[0] == "-":
            taken.append(text)
        elif line[0] == "+":
            put.append((text, above))
        if line[0] in " +":
            above = text
    if taken == [text for text, _ in put]:
        return " ; ".join(f"{text}  =>  after: {above}" for text, above in put)
    return f"{' ; '.join(taken) or '-'}  =>  {' ; '.join(text for text, _ in put) or '-'}"


def _changed_trees(tree: ast.Module) -> Iterator[ast.Module]:
    """A copy of the tree for each mistake that can be made at each of its places."""
    n_nodes = sum(1 for _ in ast.walk(tree))
    names, original = _Names(tree), pickle.dumps(tree)
    for index in range(n_nodes):
        n_changes = len(list(_mistakes(tree, index, names)))
        for k in range(n_changes):
            changed = pickle.loads(original)
            list(_mistakes(changed, index, names))[k]()
            yield changed


class _Names:
    """Takes one name for another: a parameter for every other one, a local for the next."""

    def __init__(self, tree: ast.Module) -> None:
        nodes = list(ast.walk(tree))
        self._parameters = [node.arg for node in nodes if isinstance(node, ast.arg)]
        stored = [
            node.id
            for node in nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        ]
        self._locals = list(dict.fromkeys([*self._parameters, *stored]))

    def instead_of(self, name: str) -> Iterator[str]:
        others = self._parameters if name in self._parameters else []
        if name in self._locals:
            others = [*others, self._locals[(self._locals.index(name) + 1) % len(self._locals)]]
        yield from dict.fromkeys(other for other in others if other != name)
        if name in _NAMES:
            yield _NAMES[name]


def _mistakes(tree: ast.Module, index: int, names: _Names) -> Iterator[Callable[[], None]]:
    """What can be done to the ``index``-th node: each changes the tree when called."""
    node = list(ast.walk(tree))[index]
    if any(
        isinstance(each, ast.keyword) and each.arg == "strict" and each.value is node
        for each in ast.walk(tree)
    ):
        return
    yield from _on_statements(node)
    for replacement in _replacements(node, names):
        if (put := _putter(tree, node)) is not None:
            yield lambda put=put, new=replacement: put(new)


def _putter(tree: ast.Module, node: ast.AST) -> Callable[[ast.AST], None] | None:
    """Sets another node in the place of this one."""
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is node:
                return lambda new, parent=parent, field=field: setattr(parent, field, new)
            if isinstance(value, list):
                for i, each in enumerate(value):
                    if each is node:
                        return lambda new, value=value, i=i: value.__setitem__(i, new)
    return None


def _on_statements(node: ast.AST) -> Iterator[Callable[[], None]]:
    """Drops, repeats and swaps the statements of a block, and moves them out of a loop or into it."""
    for field in ("body", "orelse"):
        block = getattr(node, field, None)
        if not isinstance(block, list):
            continue
        for i, statement in enumerate(block):
            if not (isinstance(node, ast.Module) or isinstance(statement, ast.Nonlocal | ast.Pass)):
                yield lambda block=block, i=i: block.__setitem__(i, ast.Pass())
            if isinstance(statement, ast.Expr | ast.AugAssign):
                yield lambda block=block, i=i: block.insert(i, block[i])
            if i + 1 < len(block):
                yield lambda block=block, i=i: block.__setitem__(
                    slice(i, i + 2), [block[i + 1], block[i]]
                )
            if isinstance(statement, ast.For | ast.While | ast.If):
                yield from _across_its_end(block, i)


def _across_its_end(block: list[ast.stmt], i: int) -> Iterator[Callable[[], None]]:
    inner = block[i].body  # type: ignore[attr-defined]
    if len(inner) > 1:
        yield lambda: block.insert(i + 1, inner.pop())
        yield lambda: block.insert(i, inner.pop(0))
    if i + 1 < len(block):
        yield lambda: inner.append(block.pop(i + 1))
    if i > 0:
        yield lambda: inner.insert(0, block.pop(i - 1))


def _replacements(node: ast.AST, names: _Names) -> Iterator[ast.AST]:
    """Nodes that somebody might have written in place of this one."""
    match node:
        case ast.Constant():
            yield from _other_constants(node.value)
        case ast.BinOp(left, op, right):
            yield from (ast.BinOp(left, other(), right) for other in _BINARY.get(type(op), ()))
            yield from (left, right)
            if not isinstance(op, ast.Add | ast.Mult):
                yield ast.BinOp(right, op, left)
            yield from _other_brackets(left, op, right)
        case ast.UnaryOp(_, operand):
            yield operand
        case ast.Compare(left, [op], [right]):
            yield from (ast.Compare(left, [other()], [right]) for other in _COMPARISONS[type(op)])
        case ast.Compare(left, ops, rights):
            for i, op in enumerate(ops):
                for other in _COMPARISONS[type(op)]:
                    yield ast.Compare(left, [*ops[:i], other(), *ops[i + 1 :]], rights)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            yield from (_one_fewer(op, values, i) for i in range(len(values)))
        case ast.IfExp(test, body, orelse):
            yield from (body, orelse, ast.IfExp(test, orelse, body))
        case ast.Call():
            yield from _other_calls(node)
        case ast.Subscript(value, index, context) if isinstance(context, ast.Load):
            yield from (ast.Subscript(value, other, context) for other in _other_indices(index))
        case ast.Tuple(elements, context) if len(elements) > 1 and isinstance(context, ast.Load):
            yield from (ast.Tuple(_swapped(elements, i), context) for i in range(len(elements) - 1))
        case ast.Name(name, context) if isinstance(context, ast.Load):
            yield from (ast.Name(other, context) for other in names.instead_of(name))
        case ast.Attribute(value, name, context) if name in _NAMES:
            yield ast.Attribute(value, _NAMES[name], context)
    yield from _other_flow(node)


def _other_flow(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.If(test, body, orelse):
            yield from (
                ast.If(ast.UnaryOp(ast.Not(), test), body, orelse),
                ast.If(ast.Constant(True), body, orelse),
            )
        case ast.While(test, body, orelse):
            yield ast.If(test, body, orelse)
        case ast.AugAssign(target, op, value):
            yield from (
                ast.AugAssign(target, other(), value) for other in _BINARY.get(type(op), ())
            )
            yield ast.Assign([target], value)
        case ast.For(target, iterated, body, orelse):
            yield from (ast.For(target, other, body, orelse) for other in _other_iterated(iterated))
        case ast.comprehension(target, iterated, conditions, is_async):
            yield from (
                ast.comprehension(target, other, conditions, is_async)
                for other in _other_iterated(iterated)
            )
            for i in range(len(conditions)):
                yield ast.comprehension(
                    target, iterated, conditions[:i] + conditions[i + 1 :], is_async
                )
                other = ast.UnaryOp(ast.Not(), conditions[i])
                yield ast.comprehension(
                    target, iterated, [*conditions[:i], other, *conditions[i + 1 :]], is_async
                )
        case ast.Break() | ast.Continue():
            yield ast.Continue() if isinstance(node, ast.Break) else ast.Break()
        case ast.Return(value) if value is not None:
            yield ast.Return(ast.Constant(None))


def _other_iterated(iterated: ast.expr) -> Iterator[ast.expr]:
    """All but the first, all but the last, and in the other order."""
    as_list = _called("list", iterated)
    for bounds in (ast.Slice(ast.Constant(1)), ast.Slice(None, ast.Constant(-1))):
        yield ast.Subscript(as_list, bounds, ast.Load())
    yield _called("reversed", as_list)


def _other_brackets(left: ast.expr, op: ast.operator, right: ast.expr) -> Iterator[ast.BinOp]:
    """``a op b op c`` bracketed the other way, unless that is the same."""
    same = {ast.Add: (ast.Add, ast.Sub), ast.Mult: (ast.Mult, ast.Div)}
    match left:
        case ast.BinOp(first, inner, second) if not isinstance(op, same.get(type(inner), ())):
            yield ast.BinOp(first, inner, ast.BinOp(second, op, right))
    match right:
        case ast.BinOp(first, inner, second) if not isinstance(inner, same.get(type(op), ())):
            yield ast.BinOp(ast.BinOp(left, op, first), inner, second)


def _other_constants(value: object) -> Iterator[ast.AST]:
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int | float):
        yield from map(ast.Constant, (value + 1, value - 1))
    elif isinstance(value, str):
        yield ast.Constant(value + "x")


def _other_calls(call: ast.Call) -> Iterator[ast.AST]:
    args = call.args
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    for i in range(len(args) - 1):
        # In any order these are the same.
        if name not in ("min", "max") and not any(
            isinstance(each, ast.Starred) for each in args[i : i + 2]
        ):
            yield ast.Call(call.func, _swapped(args, i), call.keywords)
    if len(args) > 1 or call.keywords:
        yield from (
            ast.Call(call.func, args[:i] + args[i + 1 :], call.keywords) for i in range(len(args))
        )
    for i, keyword in enumerate(call.keywords):
        # Without `strict` a zip is the same wherever it does not raise.
        if keyword.arg != "strict":
            yield ast.Call(call.func, args, call.keywords[:i] + call.keywords[i + 1 :])
    if name == "range":
        for i, arg in enumerate(args):
            for op in (ast.Add(), ast.Sub()):
                yield ast.Call(
                    call.func, [*args[:i], ast.BinOp(arg, op, ast.Constant(1)), *args[i + 1 :]], []
                )
    if args and not isinstance(args[0], ast.Starred):
        yield args[0]
    if isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") not in (
        "dist",
        "math",
        "torch",
    ):
        yield call.func.value


def _other_indices(index: ast.expr) -> Iterator[ast.expr]:
    match index:
        case ast.Slice(lower, upper, step):
            if lower is not None:
                yield ast.Slice(None, upper, step)
                yield ast.Slice(ast.BinOp(lower, ast.Add(), ast.Constant(1)), upper, step)
            if upper is not None:
                yield ast.Slice(lower, None, step)
                yield ast.Slice(lower, ast.BinOp(upper, ast.Sub(), ast.Constant(1)), step)
        case ast.Constant():
            return
        case _:
            yield from (ast.BinOp(index, op, ast.Constant(1)) for op in (ast.Add(), ast.Sub()))


def _called(name: str, argument: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), [argument], [])


def _swapped(elements: list[ast.expr], i: int) -> list[ast.expr]:
    return [*elements[:i], elements[i + 1], elements[i], *elements[i + 2 :]]


def _one_fewer(op: ast.boolop, values: list[ast.expr], i: int) -> ast.expr:
    left = values[:i] + values[i + 1 :]
    return left[0] if len(left) == 1 else ast.BoolOp(op, left)


def _is_python(text: str) -> bool:
    """Whether a changed tree can be written down and run: a number added to ``1:`` cannot."""
    try:
        compile(text, "a mutant", "exec")
    except SyntaxError:
        return False
    return True

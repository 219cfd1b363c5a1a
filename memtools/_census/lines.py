"""What the lines of a program do with its variables and attributes, read from its source.

    text ──► acts_of ──► PUT  self.memory    line 19    an entry is put into it
                    ├──► BIND samples_queue  line 17    the name is given a value
                    ├──► CALL tarfile.open   line 24    it is called
                    └──► GIVE send           line 31    it is an argument of a call

One pass goes through the syntax tree. Nothing is executed, and nothing of the text is kept.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from types import CodeType
from typing import NamedTuple

#: Methods that put an entry into the container that they are called of.
PUTS = frozenset(
    ("add", "append", "appendleft", "extend", "extendleft", "insert", "put", "put_nowait",
     "push", "setdefault", "update", "write", "writelines", "__setitem__", "__iadd__")
)  # fmt: skip
#: Methods that return an entry of the container that they are called of.
_GETS = ("get", "setdefault", "__getitem__")
#: Functions that put an entry into their first argument.
_PUTS_INTO = ("heappush", "heappushpop", "insort", "insort_left", "insort_right", "setattr")
#: Methods and functions that take an entry out.
_TAKES = ("pop", "popleft", "popitem")
_TAKES_FROM = ("heappop", "heappushpop", "heapreplace")
#: Methods by which a program empties what it goes on to use, as at the end of an epoch.
EMPTIES = ("clear", "reset", "reset_mock", "cache_clear")
_LEAST_BOUND = 16  # `if len(rows) > 1` is no bound.
PUT, TAKE, BOUND, BIND, EMPTY = "put", "take", "bound", "bind", "empty"
CALL, GIVE, PARAMETER = "call", "give", "parameter"
VARIABLE, OUTER, ATTRIBUTE, ENTRY, RESULT = "variable", "outer", "attribute", "entry", "result"

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
#: What gives values to names: the fields of the value and of the names.
_GIVERS = {
    ast.Assign: ("value", "targets"),
    ast.AnnAssign: ("value", "target"),
    ast.AugAssign: ("value", "target"),
    ast.NamedExpr: ("value", "target"),
    ast.For: ("iter", "target"),
    ast.AsyncFor: ("iter", "target"),
    ast.comprehension: ("iter", "target"),
    ast.withitem: ("context_expr", "optional_vars"),
}
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_LOOPS = (ast.For, ast.AsyncFor, ast.comprehension)
_REPEATS = (ast.For, ast.AsyncFor, ast.While)
_NEW = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.Constant)


class Value(NamedTuple):
    """How a line gets at a value.

    Attributes:
        sort: VARIABLE, OUTER (a variable that the function declares as one of another function or
            of the module), ATTRIBUTE of `base`, ENTRY of `base`, RESULT of a call of `base`, or ""
            where it is not known.
        name: of the variable or the attribute; "" for other sorts.
        base: what it is an attribute or an entry of, or which function has returned it.
    """

    sort: str = ""
    name: str = ""
    base: Value | None = None

    @property
    def container(self) -> Value:
        """The container that it is an entry of, of an entry of, and so on; or itself."""
        return self.base.container if self.sort == ENTRY and self.base is not None else self

    @property
    def depth(self) -> int:
        """Of how many containers, one in the other, it is an entry."""
        return 1 + self.base.depth if self.sort == ENTRY and self.base is not None else 0


class Act(NamedTuple):
    """What a line does with a value.

    Attributes:
        what: PUT, TAKE for an entry that is taken out, EMPTY for all of them, BOUND where its
            length is compared with what may be a maximum, BIND, CALL, GIVE, or PARAMETER for a name
            that a function gets.
        value: with what it does it.
        line: the number of the line.
        function: the qualified name of the function or class that has the line; "" for the module.
        again: whether the name is given a value that is made of the one before, as in `x = f(x)`.
        is_each: whether the name is the variable of a loop.
        is_new: whether the name is given a value that the line makes, as in `rows = []`.
        is_constant: whether that is a constant.
        in_loop: whether a loop of the function repeats the line.
    """

    what: str
    value: Value
    line: int
    function: str
    again: bool = False
    is_each: bool = False
    is_new: bool = False
    is_constant: bool = False
    in_loop: bool = False


def acts_of(text: str) -> list[Act]:
    """What the lines of a text do; nothing if it does not fit the Python that runs. Takes some 15
    ms for 1,000 lines."""
    reader = _Reader()
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        reader.read(ast.parse(text))
    return reader.acts


def acts_of_code(code: CodeType, text: str) -> list[Act]:
    """What one function of a text does, as if there were nothing else in it."""
    lines = text.splitlines(keepends=True)[code.co_firstlineno - 1 :]
    return acts_of(textwrap.dedent("".join(inspect.getblock(lines))))


class _Reader:
    """One pass through a tree."""

    def __init__(self) -> None:
        self.acts: list[Act] = []
        self._function = ""  # the qualified name
        self._inside = ""  # what those of inner functions begin with
        self._loops = 0  # of the function, about the line
        #: other names of attributes and entries, as in `kept = self.values`
        self._aliases: dict[str, Value] = {}

    def read(self, node: ast.AST) -> None:
        is_repeated = isinstance(node, _REPEATS)
        self._loops += is_repeated
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            self._inner(node)
        elif type(node) in _GIVERS:
            given, names = (getattr(node, field) for field in _GIVERS[type(node)])
            if given is not None:
                self.read(given)
                for one in names if isinstance(names, list) else (names,):
                    self._store(one, node, given)
            for field in ("body", "orelse", "ifs"):
                for one in getattr(node, field, ()):
                    self.read(one)
        else:
            for one in ast.iter_child_nodes(node):
                self.read(one)
            if isinstance(node, ast.Call):
                self._call(node)
            elif isinstance(node, ast.Compare):
                self._compare(node)
            elif isinstance(node, ast.Delete):
                for target in node.targets:
                    if isinstance(target, ast.Subscript):
                        self._act(TAKE, self._value(target.value), node)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                for alias in node.names:
                    name = (alias.asname or alias.name).partition(".")[0]
                    self._act(BIND, Value(VARIABLE, name), node)
            elif isinstance(node, (ast.Global, ast.Nonlocal)):
                self._aliases |= {name: Value(OUTER, name) for name in node.names}
            elif isinstance(node, ast.arg):
                self._aliases.pop(node.arg, None)
                self._act(PARAMETER, Value(VARIABLE, node.arg), node)
        self._loops -= is_repeated

    def _act(self, what: str, value: Value, node: ast.AST, **more: bool) -> None:
        line, in_loop = getattr(node, "lineno", 0), self._loops > 0
        self.acts.append(Act(what, value, line, self._function, **more, in_loop=in_loop))

    def _inner(self, node: ast.AST) -> None:
        """A function or a class."""
        name = getattr(node, "name", "<lambda>")
        self._act(BIND, Value(VARIABLE, name), node)
        outer = self._function, self._inside, self._aliases.copy(), self._loops
        self._function, self._loops = self._inside + name, 0
        self._inside = f"{self._function}{'' if isinstance(node, ast.ClassDef) else '.<locals>'}."
        for one in ast.iter_child_nodes(node):
            self.read(one)
        self._function, self._inside, self._aliases, self._loops = outer

    def _call(self, node: ast.Call) -> None:
        function = self._value(node.func)
        self._act(CALL, function, node)
        base = function.base if function.sort == ATTRIBUTE else None
        first = self._value(node.args[0]) if node.args else None
        for what, methods, functions in (
            (PUT, PUTS, _PUTS_INTO), (TAKE, _TAKES, _TAKES_FROM), (EMPTY, EMPTIES, ()),
        ):  # fmt: skip
            if base is not None and function.name in methods:
                self._act(what, base, node)
            if first is not None and function.name in functions:
                self._act(what, first, node)
        for one in (*node.args, *(keyword.value for keyword in node.keywords)):
            self._act(GIVE, self._value(one), one)

    def _compare(self, node: ast.Compare) -> None:
        """A length is compared with what may be a maximum."""
        sides = node.left, *node.comparators
        numbers = [one.value for one in sides if isinstance(one, ast.Constant)]
        is_bound = all(type(one) is int and one >= _LEAST_BOUND for one in numbers)
        if is_bound and all(isinstance(one, _ORDERS) for one in node.ops):
            for one in sides:
                if isinstance(one, ast.Call) and getattr(one.func, "id", "") == "len" and one.args:
                    self._act(BOUND, self._value(one.args[0]), node)

    def _value(self, node: ast.AST) -> Value:
        if isinstance(node, ast.Name):
            return self._aliases.get(node.id, Value(VARIABLE, node.id))
        if isinstance(node, ast.Attribute):
            return Value(ATTRIBUTE, node.attr, self._value(node.value))
        if isinstance(node, ast.Subscript):
            return Value(ENTRY, "", self._value(node.value))
        if isinstance(node, ast.Call):
            function = self._value(node.func)
            is_entry = function.sort == ATTRIBUTE and function.name in _GETS
            return Value(ENTRY, "", function.base) if is_entry else Value(RESULT, "", function)
        return Value()

    def _store(self, target: ast.AST, node: ast.AST, given: ast.expr) -> None:
        """A node gives a target a value."""
        if isinstance(target, (ast.Tuple, ast.List, ast.Starred)):
            parts = [target.value] if isinstance(target, ast.Starred) else target.elts
            for one in parts:
                self._store(one, node, ast.Tuple([given]))  # what a part is given is not known
        elif isinstance(target, ast.Subscript):
            container = self._value(target.value)
            self._act(PUT, container, target)
            self._act(CALL, Value(ATTRIBUTE, "__setitem__", container), target)
        elif isinstance(target, ast.Name):
            bound = self._aliases.pop(target.id, Value())
            bound = bound if bound.sort == OUTER else Value(VARIABLE, target.id)
            self._bind(bound, target, node, given)
            value = self._value(given)
            if bound.sort == OUTER:
                self._aliases[target.id] = bound
            elif isinstance(node, ast.Assign) and value.sort in (ATTRIBUTE, ENTRY):
                self._aliases[target.id] = value
        elif isinstance(target, ast.Attribute):
            self._bind(self._value(target), target, node, given)

    def _bind(self, value: Value, target: ast.AST, node: ast.AST, given: ast.expr) -> None:
        again = isinstance(node, ast.AugAssign) or any(
            type(one) is type(target)
            and value.name in (getattr(one, "id", ""), getattr(one, "attr", ""))
            for one in ast.walk(given)
        )
        is_call = isinstance(given, ast.Call) and isinstance(given.func, (ast.Name, ast.Attribute))
        is_each, is_constant = isinstance(node, _LOOPS), isinstance(given, ast.Constant)
        is_new = not again and not is_each and (is_call or isinstance(given, _NEW))
        self._act(BIND, value, target, again=again, is_each=is_each, is_new=is_new,
                  is_constant=is_constant)  # fmt: skip

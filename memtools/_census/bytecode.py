"""What the lines of a function do with its variables and attributes, read from its bytecode.

    code ──► acts_of ──► Put(self.memory, line 19)      an entry is put into it
                    ├──► Bind(samples_queue, line 17)   the name is given a value
                    └──► Call(tarfile.open, line 24)    it is called

One pass goes through the instructions in their order, and keeps for each value on the stack by
which names the code got at it. Nothing is executed.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from types import CodeType
from typing import NamedTuple, TypeAlias

#: Methods that put an entry into the container that they are called of.
PUTS = frozenset(
    ("add", "append", "appendleft", "extend", "extendleft", "insert", "put", "put_nowait",
     "push", "setdefault", "update", "write", "writelines", "__setitem__", "__iadd__")
)  # fmt: skip
#: Methods that return an entry of the container that they are called of.
_GETS = ("get", "setdefault", "__getitem__")
#: Functions that put an entry into their first argument.
_PUTS_INTO = ("heappush", "heappushpop", "insort", "insort_left", "insort_right", "setattr")
LOCAL, DEREF, GLOBAL, ATTRIBUTE, ENTRY = "local", "deref", "global", "attribute", "entry"


class Value(NamedTuple):
    """How a line gets at a value.

    Attributes:
        sort: LOCAL, DEREF (a variable that an inner function shares), GLOBAL, ATTRIBUTE of `base`,
            ENTRY of `base`, "result" of a call of `base`, "each" of a loop, or "null".
        name: of the variable or the attribute; "" for other sorts.
        base: what it is an attribute or an entry of, or which function has returned it.
    """

    sort: str
    name: str = ""
    base: Value | None = None

    @property
    def container(self) -> Value:
        """The container that it is an entry of, of an entry of, and so on; or itself."""
        found = self
        while found.sort == ENTRY and found.base is not None:
            found = found.base
        return found

    @property
    def depth(self) -> int:
        """Of how many containers, one in the other, it is an entry."""
        return 1 + self.base.depth if self.sort == ENTRY and self.base is not None else 0

    @property
    def names(self) -> list[str]:
        """The names on the way to it, the last one first."""
        return [self.name, *(self.base.names if self.base is not None else ())]


#: Whether the null beside a called function lies below it, and whether LOAD_ATTR has the flag of a
#: method: both depend on the version of Python.
_NULL_FIRST = sys.version_info < (3, 13)
_NULL_IN_ATTRIBUTE = sys.version_info >= (3, 12)
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_LEAVES = ("JUMP_FORWARD", "JUMP_BACKWARD", "RETURN", "RAISE", "RERAISE")
_UNKNOWN, _NULL, _EACH = Value(""), Value("null"), Value("each")


class Put(NamedTuple):
    """A line puts something into a container, or an entry of it."""

    value: Value
    line: int


class Bind(NamedTuple):
    """A line gives a name a value. `again`: the line has read the name before, as in `x = f(x)`.
    `is_each`: it is the variable of a loop."""

    value: Value
    line: int
    again: bool = False
    is_each: bool = False


class Call(NamedTuple):
    """A line calls a function or a class."""

    value: Value
    line: int


Act: TypeAlias = Put | Bind | Call


def has_name(code: CodeType, name: str) -> bool:
    """Whether a code object, without functions in it, has a variable or an attribute of a name."""
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return any(name in some for some in names)


def inner_codes(code: CodeType) -> Iterator[CodeType]:
    """A code object, and those of the functions and classes in it."""
    todo = [code]
    while todo:
        one = todo.pop()
        yield one
        todo += [constant for constant in one.co_consts if type(constant) is CodeType]


def acts_of(code: CodeType) -> list[Act]:
    """What the lines of a code object do, without those of functions in it. Takes some 2 us an
    instruction."""
    return list(_Pass(code).acts())


class _Pass:
    """One pass through the instructions of a code object."""

    def __init__(self, code: CodeType) -> None:
        self._code = code
        self._stack: list[Value] = []
        #: other names of attributes and entries, as in `kept = self.values`
        self._aliases: dict[str, Value] = {}
        #: the names that each line has read
        self._read: dict[int, set[str]] = {}
        self._line = code.co_firstlineno
        #: the stack where a jump leads to, by offset
        self._after_jumps: dict[int, list[Value]] = {}

    def acts(self) -> Iterator[Act]:
        leaves = False
        for one in dis.get_instructions(self._code):
            position = one.positions
            if position is not None and position.lineno is not None:
                self._line = position.lineno
            if leaves:  # it is reached by a jump alone
                self._stack = self._after_jumps.get(one.offset, self._stack)
            yield from self._step(one)
            leaves = one.opname.startswith(_LEAVES)
            if one.opcode in _JUMPS:
                self._after_jumps[one.argval] = self._stack.copy()

    def _pop(self) -> Value:
        return self._stack.pop() if self._stack else _UNKNOWN

    def _pops(self, many: int) -> list[Value]:
        """So many values, the top of the stack last."""
        return [self._pop() for _ in range(many)][::-1]

    def _push(self, *values: Value) -> None:
        self._stack += values

    def _step(self, one: dis.Instruction) -> Iterator[Act]:
        name, argument = one.opname, one.arg or 0
        if name.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE")):
            for variable in one.argval if type(one.argval) is tuple else (one.argval,):
                self._load(variable)
        elif name in ("LOAD_NAME", "LOAD_GLOBAL"):
            null = [_NULL] if name == "LOAD_GLOBAL" and argument & 1 else []
            value = self._variable(one.argval)
            self._push(*null, value) if _NULL_FIRST else self._push(value, *null)
            self._read.setdefault(self._line, set()).add(str(one.argval))
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            base = self._pop()
            self._push(Value(ATTRIBUTE, str(one.argval), base))
            if name == "LOAD_METHOD" or (_NULL_IN_ATTRIBUTE and argument & 1):
                self._push(base)
            self._read.setdefault(self._line, set()).add(str(one.argval))
        elif name == "PUSH_NULL":
            self._push(_NULL)
        elif name == "FOR_ITER":
            self._push(_EACH)
        elif name == "BINARY_SUBSCR" or (name == "BINARY_OP" and one.argrepr == "[]"):
            container, _ = self._pops(2)
            self._push(Value(ENTRY, "", container))
        elif name == "COPY":
            self._push(self._stack[-argument] if argument <= len(self._stack) else _UNKNOWN)
        elif name == "SWAP":
            if argument <= len(self._stack):
                stack = self._stack
                stack[-1], stack[-argument] = stack[-argument], stack[-1]
        elif name in ("CALL", "CALL_KW"):
            yield from self._call(argument, has_names=name == "CALL_KW")
        elif name.startswith("STORE_"):
            yield from self._store(name, one)
        elif name not in ("PRECALL", "KW_NAMES", "NOP", "RESUME", "CACHE", "EXTENDED_ARG"):
            self._other(one)

    def _other(self, one: dis.Instruction) -> None:
        """Any other instruction: what it pushes or changes is not known."""
        try:
            effect = dis.stack_effect(one.opcode, one.arg, jump=False)
        except ValueError:
            effect = 0
        if effect > 0:
            self._push(*[_UNKNOWN] * effect)
            return
        self._pops(-effect)
        if self._stack and not one.opname.startswith(("POP", "JUMP", "RETURN", "DELETE")):
            self._stack[-1] = _UNKNOWN

    def _variable(self, name: str) -> Value:
        if name in self._aliases:
            return self._aliases[name]
        if name in self._code.co_cellvars or name in self._code.co_freevars:
            return Value(DEREF, name)
        return Value(LOCAL if name in self._code.co_varnames else GLOBAL, name)

    def _load(self, name: str) -> None:
        self._push(self._variable(name))
        self._read.setdefault(self._line, set()).add(name)

    def _call(self, many: int, *, has_names: bool) -> Iterator[Act]:
        if has_names:
            self._pop()
        first, second, *arguments = self._pops(many + 2)
        function = second if first == _NULL else first
        yield Call(function, self._line)
        result = Value("result", "", function)
        if function.sort == ATTRIBUTE and function.base is not None:
            if function.name in PUTS:
                yield Put(function.base, self._line)
            if function.name in _GETS:
                result = Value(ENTRY, "", function.base)
        if function.name in _PUTS_INTO and arguments:
            yield Put(arguments[0], self._line)
        self._push(result)

    def _store(self, name: str, one: dis.Instruction) -> Iterator[Act]:
        if name == "STORE_SUBSCR":
            _, container, _ = self._pops(3)
            yield Put(container, self._line)
        elif name == "STORE_SLICE":
            _, container, _, _ = self._pops(4)
            yield Put(container, self._line)
        elif name == "STORE_ATTR":
            value, base = self._pops(2)
            yield self._bind(Value(ATTRIBUTE, str(one.argval), base), value)
        else:  # of one variable, or of two in newer versions of Python
            loads = "LOAD" in name
            names = one.argval if type(one.argval) is tuple else (one.argval,)
            for variable in names[:1] if loads else names:
                value = self._pop()
                self._aliases.pop(variable, None)
                yield self._bind(self._variable(variable), value)
                if value.sort in (ATTRIBUTE, ENTRY):
                    self._aliases[variable] = value
            if loads:
                self._load(names[1])

    def _bind(self, value: Value, given: Value) -> Bind:
        again = value.name in self._read.get(self._line, ())
        return Bind(value, self._line, again, given == _EACH)

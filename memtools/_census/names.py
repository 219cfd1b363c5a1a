"""By which names a program gets at an object: its variables and attributes on the way to it.

    [list, dict, Trainer, dict] ──► Name("losses", Trainer), Name("trainer", module train)

The first of these objects is held by the next one, and so on. Of each name is known whose it is,
and what the functions of that do with it.
"""

from __future__ import annotations

import collections
import functools
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from memtools import _core
from memtools._base.classes import namespace_of
from memtools._base.libraries import USER, owner_of
from memtools._base.place import text_of
from memtools._census.holders import (
    FRAMES,
    LRU_CACHE,
    MRO,
    QUALNAME,
    Local,
    attribute_of,
    hooks_of,
    is_wrapper,
    variable_of,
)
from memtools._census.lines import ATTRIBUTE, OUTER, VARIABLE, Act, acts_of, acts_of_code


class Name(NamedTuple):
    """A name on the way from a container to its root.

    Attributes:
        name: of the variable or the attribute; "" for a cache of a function.
        owner: the class whose instances have the attribute, the code of the function that has the
            variable, the module that has the global, or the function whose results are kept.
        depth: of how many containers, one in the other, the next inner object is an entry there.
        value: of a module's variable.
    """

    name: str
    owner: Any
    depth: int = 0
    value: Any = None


def names_on(way: Sequence[Any]) -> list[Name]:
    """The names by which the program gets at the first of some objects, each of which is held by
    the next one; the innermost first. Attributes of wrappers such as weakref.WeakKeyDictionary are
    left out: what is put into the wrapper is put into them."""
    found, held, before, depth = list[Name](), None, None, 0
    for i, holder in enumerate(way):
        kind, names = type(holder), list[Name]()
        if kind is Local:  # calls of a function, or a variable of one
            return [*found, Name(holder.name or "" if i else "", holder.code, depth)]
        if kind is LRU_CACHE:
            return [*found, Name("", holder.__wrapped__)]
        if i == 0:
            held = holder
            continue
        if kind is types.FunctionType:
            code, values = holder.__code__, _variables_of(holder, held)
            return [*found, *(Name(name, code) for name, value in values if value is before)]
        frames = [getattr(holder, name) for one, (name, _) in FRAMES.items() if kind is one]
        if frames:
            variable = None if frames[0] is None else variable_of(frames[0], held)
            return [*found, Name(variable, frames[0].f_code, depth)] if variable else found
        module = _core._module_of(holder)
        if module is not None:
            key = _core._place(holder, held) if issubclass(kind, dict) else None
            name = Name(str(key), sys.modules.get(module), depth, held)
            return [*found, name] if type(key) is str else found
        if issubclass(kind, dict):
            owner = way[i + 1] if i + 1 < len(way) else None
            if _core._instance_dict(owner) is not holder:
                depth += 1
            elif not is_wrapper(owner):
                names = [Name(str(_core._place(holder, held)), _class_of(owner), depth)]
        elif issubclass(kind, type):
            members = namespace_of(holder)
            names = [Name(key, holder, depth) for key, one in members.items() if one is held]
        elif issubclass(kind, (list, tuple, set, frozenset, collections.deque)):
            depth += 1
        elif not is_wrapper(holder):
            attribute = attribute_of(holder, held) or hooks_of(holder, held)
            names = [Name(attribute, kind, depth)] if attribute else []
        found += names
        held, before, depth = holder, held, 0 if names else depth
    return found


def _class_of(owner: Any) -> type:
    """The class of an object; a class itself."""
    return owner if issubclass(type(owner), type) else type(owner)


def _variables_of(function: types.FunctionType, held: Any) -> Iterable[tuple[str, Any]]:
    """The variables of a closure with their cells, or the arguments with their defaults."""
    code = function.__code__
    if held is function.__closure__:
        return zip(code.co_freevars, held or (), strict=True)
    arguments = code.co_varnames[: code.co_argcount][::-1]
    return zip(arguments, (function.__defaults__ or ())[::-1], strict=False)


# --- whose they are -------------------------------------------------------------------------------


def is_users(owner: Any) -> bool:
    """Whether a class, a function, its code or a module is the user's."""
    code = code_of(owner)
    if code is not None:
        return owner_of(code.co_filename) == USER
    return any(map(is_users_module, modules_of(owner)))


def is_users_module(module: Any) -> bool:
    file = file_of(module)
    if file is None:  # a notebook's cells, `python -c`
        return module is not None and module is sys.modules.get("__main__")
    return owner_of(file) == USER


def modules_of(owner: Any) -> list[Any]:
    """The modules that have an owner's code: of a class also those of its bases."""
    if issubclass(type(owner), type):
        return [sys.modules.get(module_name_of(one)) for one in MRO(owner)]
    return [owner] if issubclass(type(owner), types.ModuleType) else []


def file_of(module: Any) -> str | None:
    file = space_of(module).get("__file__")
    return file if type(file) is str else None


def space_of(module: Any) -> dict[str, Any]:
    """The namespace of a module; empty for other objects."""
    if not issubclass(type(module), types.ModuleType):
        return {}
    return types.ModuleType.__getattribute__(module, "__dict__")  # type: ignore[no-any-return]


def name_in(space: dict[str, Any]) -> str:
    name = space.get("__name__")
    return name if type(name) is str else ""


def module_name_of(kind: type) -> str:
    name = type.__dict__["__module__"].__get__(kind)
    return name if type(name) is str else ""


def code_of(function: Any) -> types.CodeType | None:
    """The code of a function, of a method of any sort, or of what a decorator has wrapped."""
    for _ in range(8):
        kind = type(function)
        if kind is types.CodeType:
            return function  # type: ignore[no-any-return]
        if kind is types.FunctionType:
            function = function.__dict__.get("__wrapped__", function.__code__)
        elif kind is staticmethod or kind is classmethod:
            function = function.__func__
        elif kind is property:
            function = function.fget
        elif kind is LRU_CACHE:
            function = function.__wrapped__
        elif kind is functools.partial:
            function = function.func
        else:
            return None
    return None


def members_of(kind: Any) -> dict[str, Any]:
    """What a class defines or inherits; empty for other objects."""
    found = dict[str, Any]()
    for base in reversed(MRO(kind)) if issubclass(type(kind), type) else ():
        found.update(namespace_of(base))
    return found


# --- what its functions do with it ----------------------------------------------------------------


def uses_of(name: Name) -> dict[str, set[str]]:
    """What the functions of a name's owner do with what it stands for: PUT, TAKE and others of
    each. The methods of a class, the functions of a module and the module itself, or one function.
    """
    sorts = (ATTRIBUTE,) if issubclass(type(name.owner), type) else (VARIABLE, OUTER)
    found = collections.defaultdict[str, set[str]](set)
    for function, act in _acts_in(name.owner, name.name):
        value = act.value.container
        if value.sort in sorts and value.name == name.name:
            found[function].add(act.what)
    return found


def _acts_in(owner: Any, word: str) -> Iterator[tuple[str, Act]]:
    """What the functions that have a word do, by the names of the functions."""
    texts, codes = dict[str, str](), {"": code_of(owner)}
    if issubclass(type(owner), type):
        codes = {key: code_of(member) for key, member in members_of(owner).items()}
    elif codes[""] is None:  # a module
        yield from ((act.function, act) for act in acts_of(text_of(file_of(owner) or "")))
    for key, code in codes.items():
        if code is None or not any(word in some for some in _names_in(code)):
            continue
        texts[code.co_filename] = texts.get(code.co_filename) or text_of(code.co_filename)
        acts = acts_of_code(code, texts[code.co_filename])
        yield from ((key or act.function, act) for act in acts)


def _names_in(code: types.CodeType) -> Iterable[Collection[str]]:
    return code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars


# --- names from another process -------------------------------------------------------------------


def packed(name: Name) -> list[Any]:
    """[name, depth, sort of the owner, and what it is found by], as a text has it."""
    owner = name.owner
    code = code_of(owner)
    if code is not None:
        sort = "code" if code is owner else "function"
        by = [sort, code.co_filename, code.co_qualname, code.co_firstlineno]
    elif issubclass(type(owner), type):
        by = ["class", module_name_of(owner), QUALNAME(owner)]
    else:
        by = ["module", name_in(space_of(owner))]
    return [name.name, name.depth, *by]


def unpacked(one: Sequence[Any]) -> Name | None:
    """The name that another process has packed; None if its owner is not known here. Of code that
    is read by its place in a file a stand-in is enough."""
    name, depth, sort, *by = one
    if sort in ("code", "function"):
        file, function, line = by
        code = unpacked.__code__.replace(
            co_filename=file, co_qualname=function, co_firstlineno=line, co_names=(name,),
            co_name=function.rpartition(".")[2],
        )  # fmt: skip
        return Name(name, code if sort == "code" else types.FunctionType(code, {}), depth)
    # A spawned process has the script under another name.
    owner: Any = sys.modules.get("__main__" if by[0] == "__mp_main__" else by[0])
    if sort == "module":
        return None if owner is None else Name(name, owner, depth, space_of(owner).get(name))
    members = space_of(owner)
    for part in by[1].split("."):
        owner = members.get(part)
        members = members_of(owner)
    return Name(name, owner, depth) if issubclass(type(owner), type) else None

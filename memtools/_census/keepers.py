"""Which line of the user's program keeps a container: where entries are put into it, or where the
library's object that has it is made.

    way from the container to its root ──► names of variables and attributes on it
                                               │ the innermost first
                                               ▼
    the user's code ──► acts of its lines ──► lines that put into it, bind it, or call what does

A name of the user's own code is looked for as it is: `self.memory.append(...)`. For an attribute of
a library's object it is the user's call of a method that puts something into it
(`layer.register_forward_hook(...)`), the line that makes the object (`logging.MemoryHandler(...)`),
or the line that gives the object a name (`archive = tarfile.open(...)`).
"""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import importlib.util
import itertools
import marshal
import os
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from memtools import _core
from memtools._base.libraries import USER, owner_of
from memtools._base.place import Place, name_of
from memtools._census import bytecode
from memtools._census.bytecode import (
    ATTRIBUTE,
    DEREF,
    GLOBAL,
    LOCAL,
    Act,
    Bind,
    Call,
    Put,
    Value,
    acts_of,
    has_name,
    inner_codes,
)
from memtools._census.holders import (
    FRAMES,
    LRU_CACHE,
    MRO,
    QUALNAME,
    Local,
    attribute_of,
    function_name,
    hooks_of,
    is_wrapper,
    short_name,
    type_name,
)

MOST_NAMED = 2  # A finding names at most so many lines.
MOST_PUTS = 3  # More lines than this that put something into it do not show which one to change.
MOST_MODULES = 64  # The code of at most so many modules is read from their cached files.
#: Methods of many classes: a call of one says nothing about the object, unless its name does.
_COMMON = frozenset(name for kind in (list, dict, set) for name in dir(kind)) | bytecode.PUTS


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


class Source(NamedTuple):
    """A code object of the user, without those in it, its file, and its module's namespace."""

    code: types.CodeType
    file: str
    space: dict[str, Any]

    @property
    def runs(self) -> bool:
        """Whether it has run several times: then Python has specialized its instructions."""
        plain, now = (
            dis.get_instructions(self.code, adaptive=adaptive) for adaptive in (False, True)
        )
        return any(
            a.opcode != b.opcode and "__" not in b.opname for a, b in zip(plain, now, strict=False)
        )


# --- names on the way -----------------------------------------------------------------------------


def names_on(way: Sequence[Any]) -> list[Name]:
    """The names by which the program gets at the first of some objects, each of which is held by
    the next one; the innermost first. Attributes of wrappers such as weakref.WeakKeyDictionary are
    left out: what is put into the wrapper is put into them."""
    found, held, depth = list[Name](), way[0], 0
    if type(held) is Local:  # calls of a function
        return [Name("", held.code)]
    if type(held) is LRU_CACHE:
        return [Name("", held.__wrapped__)]
    for i, holder in enumerate(way[1:], 1):
        kind, names = type(holder), list[Name]()
        if kind is Local:
            return [*found, Name(holder.name or "", holder.code, depth)]
        if kind is LRU_CACHE:
            return [*found, Name("", holder.__wrapped__)]
        if kind is types.FunctionType:
            return [*found, *_of_function(held, holder, way[i - 2] if i > 1 else held)]
        frames = [names_of[0] for one, names_of in FRAMES.items() if kind is one]
        if frames:
            frame = getattr(holder, frames[0])
            if frame is None:
                return found
            return [*found, Name(_core._frame_place(frame, held) or "", frame.f_code, depth)]
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
            members = type.__dict__["__dict__"].__get__(holder)
            names = [Name(key, holder, depth) for key, one in members.items() if one is held]
        elif issubclass(kind, (list, tuple, set, frozenset, collections.deque)):
            depth += 1
        elif not is_wrapper(holder):
            attribute = attribute_of(holder, held) or hooks_of(holder, held)
            names = [Name(attribute, kind, depth)] if attribute else []
        found += names
        held, depth = holder, 0 if names else depth
    return found


def _class_of(owner: Any) -> type:
    """The class of an object; a class itself."""
    return owner if issubclass(type(owner), type) else type(owner)


def _of_function(held: Any, function: types.FunctionType, before: Any) -> list[Name]:
    """The variable of a closure or the argument whose default is held."""
    code = function.__code__
    if held is function.__closure__:
        cells = function.__closure__ or ()
        return [
            Name(name, code)
            for name, cell in zip(code.co_freevars, cells, strict=True)
            if cell is before
        ]
    defaults = function.__defaults__
    if held is defaults and defaults is not None:
        first = code.co_argcount - len(defaults)
        return [
            Name(code.co_varnames[first + i], code)
            for i, value in enumerate(defaults)
            if value is before
        ]
    return []


# --- the user's code ------------------------------------------------------------------------------


def is_users(owner: Any) -> bool:
    """Whether a class, a function, its code or a module is the user's."""
    if type(owner) is types.CodeType:
        return owner_of(owner.co_filename) == USER
    if type(owner) is types.FunctionType:
        return owner_of(owner.__code__.co_filename) == USER
    if issubclass(type(owner), type):
        return any(_is_users_module(_module_of_class(base)) for base in MRO(owner))
    return _is_users_module(owner)


def _module_of_class(kind: type) -> Any:
    name = type.__dict__["__module__"].__get__(kind)
    return sys.modules.get(name) if type(name) is str else None


def _is_users_module(module: Any) -> bool:
    file = _file_of(module)
    if file is None:  # a notebook's cells, `python -c`
        return module is not None and module is sys.modules.get("__main__")
    return owner_of(file) == USER


def _file_of(module: Any) -> str | None:
    if not issubclass(type(module), types.ModuleType):
        return None
    file = _space(module).get("__file__")
    return file if type(file) is str else None


def users_code(near: Collection[str] = ()) -> Iterator[Source]:
    """The user's code: of the functions that run now, whose first one has the whole script, and of
    the modules that have been imported, those of the names in `near` first."""
    files = set[str]()
    for code, space in _running():
        if code.co_name == "<module>":
            files.add(os.path.abspath(code.co_filename))
        yield from (Source(one, code.co_filename, space) for one in inner_codes(code))
    many = 0
    first = [sys.modules.get(name) for name in near]
    for module in [*first, *(one for key, one in list(sys.modules.items()) if key not in near)]:
        file = _file_of(module)
        is_main = module is sys.modules.get("__main__")
        if not _is_users_module(module) or (file and os.path.abspath(file) in files):
            continue
        many += 1
        has_code = file is not None and not is_main and many <= MOST_MODULES
        whole = _cached_code(file) if file is not None and has_code else None
        space, known = _space(module), set[tuple[str, int]]()
        for top in [*_functions_of(space), *([] if whole is None else [whole])]:
            for one in inner_codes(top):  # the functions first: of the file there are copies
                if (one.co_qualname, one.co_firstlineno) not in known:
                    known.add((one.co_qualname, one.co_firstlineno))
                    yield Source(one, file or top.co_filename, space)


def _running() -> Iterator[tuple[types.CodeType, dict[str, Any]]]:
    """The code and the globals of the user's functions that run on any thread."""
    seen = set[int]()
    for top in sys._current_frames().values():
        frame: types.FrameType | None = top
        while frame is not None:
            code = frame.f_code
            if id(code) not in seen and owner_of(code.co_filename) == USER:
                seen.add(id(code))
                yield code, frame.f_globals
            frame = frame.f_back


def _cached_code(file: str) -> types.CodeType | None:
    """The code of a module as it was compiled when it was imported; None where no file has it."""
    with contextlib.suppress(OSError, ValueError, EOFError, TypeError, NotImplementedError):
        with open(importlib.util.cache_from_source(file), "rb") as cached:
            data = cached.read()
        changed = int(os.stat(file).st_mtime) & 0xFFFFFFFF
        if data[:12] == importlib.util.MAGIC_NUMBER + bytes(4) + changed.to_bytes(4, "little"):
            code = marshal.loads(data[16:])
            return code if type(code) is types.CodeType else None
    return None


def _space(module: Any) -> dict[str, Any]:
    return types.ModuleType.__getattribute__(module, "__dict__")  # type: ignore[no-any-return]


def _functions_of(space: dict[str, Any]) -> Iterator[types.CodeType]:
    """The code of a module's functions and of the methods of its classes."""
    name = space.get("__name__")
    for value in list(space.values()):
        if issubclass(type(value), type) and type.__dict__["__module__"].__get__(value) == name:
            values = list(type.__dict__["__dict__"].__get__(value).values())
        else:
            values = [value]
        for one in values:
            code = _code_of(one)
            if code is not None and owner_of(code.co_filename) == USER:
                yield code


def _code_of(function: Any) -> types.CodeType | None:
    """The code of a function, of a method of any sort, or of what a decorator has wrapped."""
    for _ in range(8):
        kind = type(function)
        if kind is types.FunctionType:
            inner = function.__dict__.get("__wrapped__")
            if inner is None:
                return function.__code__  # type: ignore[no-any-return]
            function = inner
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


#: Methods by which an object lets go of what it holds, those first that leave it usable.
_RELEASES = ("clear", "reset", "reset_mock", "cache_clear", "close", "shutdown", "terminate")


class Library(NamedTuple):
    """What of a library has a container.

    Attributes:
        name: the class, the function or the module, such as `tarfile.TarFile`.
        release: a method of it that lets go of what it holds, such as `close()`; "" for none.
    """

    name: str = ""
    release: str = ""


def library_of(names: Sequence[Name]) -> Library:
    """What of a library has the container that these names lead to; empty if the user's code has
    it."""
    if not names or is_users(names[0].owner):
        return Library()
    owner = names[0].owner
    if issubclass(type(owner), type):
        members = _methods(owner)
        release = next((name for name in _RELEASES if name in members), "")
        return Library(type_name(owner), f"{release}()" if release else "")
    if issubclass(type(owner), types.ModuleType):
        return Library(f"the module {_name_of_module(_space(owner))}")
    code = _code_of(owner) if type(owner) is not types.CodeType else owner
    if code is None:
        return Library()
    release = "cache_clear()" if not names[0].name else ""
    return Library(function_name(code), release)


# --- lines ----------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """Where a container is kept: `train.py:47 in training_step`, or two such lines; and what of a
    library has it. Each is "" where it is not known."""

    kept_at: str = ""
    library: str = ""
    release: str = ""


class Keepers:
    """Finds the lines of holders, each once in a run.

    Args:
        sources: the user's code; by default `users_code`.
    """

    MOST = 256  # holders that are remembered

    def __init__(self, sources: Callable[[Collection[str]], Iterable[Source]] = users_code) -> None:
        self._sources = sources
        self._known: dict[str, Kept] = {}

    def find(self, path: str, way: Sequence[Any], *, changes: bool) -> Kept:
        """Where a holder is kept. A search takes about a millisecond.

        Args:
            path: the name of the holder.
            way: from what grows to its root, each object held by the next one.
            changes: whether the first object is replaced by a larger one, as a buffer, a graph and
                the head of a chain are. Otherwise entries are put into it.
        """
        if path not in self._known and len(self._known) < self.MOST:
            self._known[path] = Kept()
            with contextlib.suppress(Exception):  # a holder without its line is a finding as well
                names = names_on(way)
                near = {name for one in names for name in _modules_of(one.owner)}
                search = Search(self._sources(near))
                places = search.lines_of(names, changes=changes)
                library = Library() if search.has_own(names) else library_of(names)
                self._known[path] = Kept(" and ".join(map(name_of, places)), *library)
        return self._known.get(path, Kept())


class Search:
    """The search for the lines of one holder, in at most so much of the user's code.

    Args:
        sources: code objects, the most likely ones first. They are taken one by one.
    """

    MOST_SOURCES, MOST_READ = 20_000, 256

    def __init__(self, sources: Iterable[Source]) -> None:
        self._iterator = itertools.islice(sources, self.MOST_SOURCES)
        self._taken = list[Source]()
        self._read: dict[int, list[Act]] = {}  # what the lines of a code object do, by its id

    def lines_of(self, names: Sequence[Name], *, changes: bool) -> list[Place]:
        """The lines that keep what these names lead to, the innermost name first."""
        has_name = False  # whether a name of the user's was found: it is no longer the container's
        for i, name in enumerate(names):
            if not is_users(name.owner):
                found = self._puts(name) if i == 0 and self.has_own(names) else []
                found = found or self._of_library(name, names[i + 1 :])
            elif not name.name and type(name.owner) is types.CodeType:
                found = self._uses(name.owner.co_name)
            elif not name.name:
                code = _code_of(name.owner)
                found = [] if code is None else [_place(code, code.co_filename)]
            else:
                ways = [lambda one: self._binds(one, again=True), self._puts]
                ways = [] if has_name else ways if changes and i == 0 else ways[::-1]
                ways.append(lambda one: self._binds(one, again=False))
                found = next(filter(None, (way(name) for way in ways)), [])
                if not found and not has_name:  # an attribute that a base class of a library has
                    found = self._of_methods(name, names[i + 1 :])
                has_name = True
            if found:
                return found[:MOST_NAMED]
        return []

    def has_own(self, names: Sequence[Name]) -> bool:
        """Whether the user's code itself puts something into an attribute of a library's object, as
        in `arguments.history.append(x)`."""
        return bool(names and names[0].name and self._puts(names[0]))

    @property
    def _sources(self) -> Iterator[Source]:
        yield from self._taken
        for source in self._iterator:
            self._taken.append(source)
            yield source

    def _with(self, word: str) -> Iterator[Source]:
        """The sources in which a name occurs."""
        return (one for one in self._sources if has_name(one.code, word))

    def _acts(self, source: Source) -> list[Act]:
        """What its lines do; nothing once so many sources have been read."""
        key = id(source.code)
        if key not in self._read and len(self._read) < self.MOST_READ:
            self._read[key] = acts_of(source.code)
        return self._read.get(key, [])

    def _meant(self, name: Name) -> Iterator[tuple[Act, int, Source]]:
        """What the user's lines do with what a name stands for, and how surely. Once it is sure in
        the module of the owner, other modules are not searched."""
        near, is_sure = _modules_of(name.owner), False
        for source in self._with(name.name):
            if is_sure and near and _name_of_module(source.space) not in near:
                return
            if type(name.owner) is types.CodeType and not _is_same_file(source, name.owner):
                continue
            for act in self._acts(source):
                value = act.value.container if type(act) is Put else act.value
                sure = _NO if type(act) is Call else _means(value, name, source)
                if sure:
                    is_sure |= sure == _SURELY
                    yield act, sure, source

    def _uses(self, function: str) -> list[Place]:
        """The lines that refer to a function, such as `Thread(target=send)`."""
        found = [
            Place(source.file, one.positions.lineno or 0, _function(source))
            for source in self._with(function)
            for one in dis.get_instructions(source.code)
            if one.argval == function and one.opname.startswith("LOAD") and one.positions
        ]
        return _in_order(found) if len(set(found)) <= MOST_PUTS else []

    def _puts(self, name: Name) -> list[Place]:
        """The lines that put something into it: if there are any, those that are not in a
        constructor, that put it as deep as it lies, and that have run several times."""
        found = list[tuple[tuple[int, bool, bool, bool], Place]]()
        for act, sure, source in self._meant(name):
            if type(act) is Put:
                place = Place(source.file, act.line, _function(source))
                is_first = source.code.co_name == "__init__"
                is_other = act.value.depth != name.depth
                found.append(((-sure, is_first, is_other, not source.runs), place))
        best = min((rank for rank, _ in found), default=None)
        places = _in_order(place for rank, place in found if rank == best)
        return places if len(places) <= MOST_PUTS else []

    def _binds(self, name: Name, *, again: bool) -> list[Place]:
        """The lines that give it a value that is made of the one before (`again`), or the line that
        gives it its first value."""
        found = list[tuple[tuple[int, bool], Place]]()
        for act, sure, source in self._meant(name):
            if type(act) is Bind and act.again >= again:
                is_later = source.code.co_name not in ("__init__", "<module>")
                place = Place(source.file, act.line, _function(source))
                found.append(((-sure, is_later and not again), place))
        best = min((rank for rank, _ in found), default=None)
        places = _in_order(place for rank, place in found if rank == best)
        return places if again else places[:1]

    def _of_library(self, name: Name, outer: Sequence[Name]) -> list[Place]:
        """The user's calls that put something into what a library has: of methods of the object's
        class, of functions of the module, of the function whose results are cached; or the lines
        that make the object."""
        owner = name.owner
        if issubclass(type(owner), type):
            found = self._of_methods(name, outer)
            return found or self._calls({short_name(owner)}, is_class=True)
        if type(owner) is types.FunctionType:
            return self._calls({owner.__name__}, is_class=True)
        if type(owner) is types.CodeType:
            return self._calls({owner.co_name}, is_class=True)
        if issubclass(type(owner), types.ModuleType):
            space = types.ModuleType.__getattribute__(owner, "__dict__")
            functions = {
                key: value
                for key, value in list(space.items())
                if type(value) is types.FunctionType
            }
            return self._calls(_putting(functions, name.name, is_attribute=False))
        return []

    def _of_methods(self, name: Name, outer: Sequence[Name]) -> list[Place]:
        """The user's calls of methods that put something into an attribute."""
        owner = name.owner
        if not issubclass(type(owner), type):
            return []
        if name.name == "state" and "param_groups" in _attributes(owner):
            return self._of_optimizer()
        methods = _putting(_methods(owner), name.name, is_attribute=True)
        return self._calls(methods, outer[0] if outer else None)

    def _of_optimizer(self) -> list[Place]:
        """The lines that change which parameters an optimizer trains: it keeps the state of those
        that it does not train any more."""
        found = [
            Place(source.file, act.line, _function(source))
            for source in self._with("param_groups")
            for act in self._acts(source)
            if type(act) is Put and "param_groups" in act.value.names
        ]
        return _in_order(found) or self._calls({"add_param_group"})

    def _calls(
        self, functions: set[str], holder: Name | None = None, *, is_class: bool = False
    ) -> list[Place]:
        """The user's lines that call one of these: of an object of this name, or of any that may be
        the same, if the name of the function is not a common one."""
        of_it, of_any = list[Place](), list[Place]()
        for source in self._sources:
            if functions.isdisjoint(source.code.co_names):
                continue
            acts = self._acts(source)
            others = {act.value for act in acts if type(act) is Bind and not act.is_each}
            for act in acts:
                if type(act) is not Call or act.value.name not in functions:
                    continue
                base, place = act.value.base, Place(source.file, act.line, _function(source))
                if holder is not None and base is not None and base.name == holder.name:
                    of_it.append(place)
                elif is_class:
                    of_any.append(place)
                elif base is not None and act.value.name not in _COMMON:
                    # Where the program has a name for the object, another name is another object.
                    is_another = base in others and holder is not None and is_users(holder.owner)
                    of_any += [] if is_another else [place]
        places = _in_order(of_it or of_any)
        return places if len(places) <= MOST_PUTS else []


def _place(code: types.CodeType, file: str) -> Place:
    return Place(file, code.co_firstlineno, code.co_qualname)


def _is_function(value: Any) -> bool:
    return type(value) is types.FunctionType


def _function(source: Source) -> str:
    return source.code.co_qualname


def _in_order(places: Iterable[Place]) -> list[Place]:
    """Each line once, in the order of the lines."""
    return sorted(set(places), key=lambda place: (place.file, place.line))


#: How surely a value of a line is what a name stands for: not at all; an attribute of this name, of
#: it is not known which object; the same in the module of the class; surely.
_NO, _MAYBE, _LIKELY, _SURELY = range(4)


def _means(value: Value, name: Name, source: Source) -> int:
    """Whether a value of a line is what the name stands for."""
    owner, code = name.owner, source.code
    if value.name != name.name:
        return _NO
    if issubclass(type(owner), type):
        return _is_attribute(value, owner, source)
    if type(owner) is types.CodeType:
        if value.sort == DEREF:
            return _SURELY if _is_around(code, owner) or _is_around(owner, code) else _NO
        is_same = (code.co_qualname, code.co_firstlineno) == (
            owner.co_qualname,
            owner.co_firstlineno,
        )
        return _SURELY if is_same and value.sort in (LOCAL, GLOBAL) else _NO
    module = _name_of_module(_space(owner))
    if value.sort == GLOBAL:
        is_imported = name.value is not None and source.space.get(name.name) is name.value
        return _SURELY if is_imported or _name_of_module(source.space) == module else _NO
    base, last = value.base, module.rpartition(".")[2]
    is_its = value.sort == ATTRIBUTE and base is not None and base.name == last
    return _SURELY if is_its else _NO


def _is_attribute(value: Value, kind: type, source: Source) -> int:
    """Whether a value is the attribute of its name of an instance of a class, or of the class."""
    code, base, module = source.code, value.base, _name_of_module(source.space)
    classes = [str(QUALNAME(one)) for one in MRO(kind) if _module_name_of(one) == module]
    if value.sort == GLOBAL:  # in the body of the class
        return _SURELY if code.co_qualname in classes else _NO
    if value.sort != ATTRIBUTE or base is None:
        return _NO
    of_class = code.co_qualname.rpartition(".")[0]
    if code.co_argcount > 0 and base == Value(LOCAL, code.co_varnames[0]):
        if of_class in classes:
            return _SURELY
        if of_class and not of_class.endswith("<locals>"):
            return _NO  # `self`, of another class
    if base.sort == DEREF and any(f"{of_class}.".startswith(f"{one}.") for one in classes):
        return _SURELY
    if classes:
        return _LIKELY
    return _MAYBE if source.runs else _NO


def _modules_of(owner: Any) -> list[str]:
    """The names of the modules that have an owner's code: of a class also those of its bases."""
    if issubclass(type(owner), type):
        return [_module_name_of(one) for one in MRO(owner)]
    return [_name_of_module(_space(owner))] if issubclass(type(owner), types.ModuleType) else []


def _name_of_module(space: dict[str, Any]) -> str:
    name = space.get("__name__")
    return name if type(name) is str else ""


def _module_name_of(kind: type) -> str:
    name = type.__dict__["__module__"].__get__(kind)
    return name if type(name) is str else ""


def _is_same_file(source: Source, code: types.CodeType) -> bool:
    return os.path.basename(source.file) == os.path.basename(code.co_filename)


def _is_around(outer: types.CodeType, inner: types.CodeType) -> bool:
    return f"{inner.co_qualname}.".startswith(f"{outer.co_qualname}.")


# --- which functions of a library put something into it -------------------------------------------


def _attributes(kind: type) -> set[str]:
    """The attributes that a class annotates or that its methods use."""
    codes = filter(None, map(_code_of, _methods(kind).values()))
    return {name for code in codes for name in code.co_names}


def _methods(kind: type) -> dict[str, Any]:
    found = dict[str, Any]()
    for base in reversed(MRO(kind)):
        found.update(type.__dict__["__dict__"].__get__(base))
    return found


def _putting(functions: dict[str, Any], name: str, *, is_attribute: bool) -> set[str]:
    """The functions that put something into the attribute of this name of their first argument, or
    into the global of this name; and those that call such a one."""
    codes = {key: code for key, value in functions.items() if (code := _code_of(value)) is not None}
    wanted = ATTRIBUTE if is_attribute else GLOBAL
    direct = {
        key
        for key, code in codes.items()
        if has_name(code, name)
        and any((value.sort, value.name) == (wanted, name) for value in _put_in(code))
    }
    calling = {key for key, code in codes.items() if not direct.isdisjoint(code.co_names)}
    if "__setitem__" in direct:
        calling |= {
            key
            for key, code in codes.items()
            if code.co_argcount > 0 and Value(LOCAL, code.co_varnames[0]) in _put_in(code)
        }
    return {*direct, *calling} - {"__init__", "__new__"}


def _put_in(code: types.CodeType) -> list[Value]:
    """What the lines of a code object put something into."""
    return [act.value.container for act in acts_of(code) if type(act) is Put]

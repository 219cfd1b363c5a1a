"""Which line of the user's program keeps a container: where entries are put into it, or where the
library's object that has it is made.

    way from the container to its root ──► names of variables and attributes on it
                                               │ the innermost first
                                               ▼
    the user's source ──► acts of its lines ──► lines that put into it, bind it, or call what does

A name of the user's own code is looked for as it is: `self.memory.append(...)`. For an attribute of
a library's object it is the user's call of a method that puts something into it
(`layer.register_forward_hook(...)`), the line that makes the object (`logging.MemoryHandler(...)`),
or the line that gives the object a name (`archive = tarfile.open(...)`).
"""

from __future__ import annotations

import contextlib
import dis
import itertools
import os
import sys
import time
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from memtools._base import torch as bridge
from memtools._base.libraries import USER, owner_of
from memtools._base.place import Place, name_of, text_of
from memtools._census.fills import capacity_of, is_bounded, may_fill
from memtools._census.holders import MRO, QUALNAME, function_name, short_name, type_name
from memtools._census.lines import (
    ATTRIBUTE,
    BIND,
    CALL,
    EMPTIES,
    EMPTY,
    GIVE,
    OUTER,
    PARAMETER,
    PUT,
    PUTS,
    VARIABLE,
    Act,
    Value,
    acts_of,
)
from memtools._census.names import (
    Name,
    code_of,
    file_of,
    is_users,
    is_users_module,
    members_of,
    module_name_of,
    modules_of,
    name_in,
    names_on,
    packed,
    space_of,
    unpacked,
    uses_of,
)

MOST_NAMED = 2  # A finding names at most so many lines.
MOST_PUTS = 3  # More lines than this that put something into it do not show which one to change.
_MOST_PACKED = 6  # names on the way to one holder, for another process
MOST_READ = 300_000  # So many characters of source are parsed for one holder.
_BEGIN = time.time()
#: Methods of many classes: a call of one says nothing about the object, unless its name does.
_COMMON = frozenset(name for kind in (list, dict, set) for name in dir(kind)) | PUTS


# --- the user's source ----------------------------------------------------------------------------


class Source:
    """A file of the user's, its text, and the namespace of its module."""

    def __init__(self, file: str, text: str, space: dict[str, Any]) -> None:
        self.file, self.text, self.space = file, text, space
        self.module = name_in(space)
        self.acts: list[Act] | None = None  # not read yet
        self._first = dict[str, str]()  # the first parameter of each function
        self._variables = set[tuple[str, str]]()

    def read(self) -> None:
        """Parse the text."""
        self.acts = acts_of(self.text)
        for act in self.acts:
            if act.what in (BIND, PARAMETER) and act.value.sort == VARIABLE:
                self._variables.add((act.function, act.value.name))
            if act.what == PARAMETER:
                self._first.setdefault(act.function, act.value.name)

    def scope_of(self, value: Value, function: str) -> str:
        """The function or class that has a variable which another one uses; "" for the module."""
        while function and value.sort in (VARIABLE, OUTER):
            if (function, value.name) in self._variables:
                return function
            function = _outer(function)
            while function and not function.endswith("<locals>"):  # Methods see no class's names.
                function = _outer(function)
            function = function.removesuffix(".<locals>")
        return ""

    def class_of(self, value: Value, function: str) -> str:
        """The class of whose methods' first argument, as `self`, a value is; else ""."""
        method = self.scope_of(value, function)
        kind = _outer(method)
        is_self = value.sort == VARIABLE and self._first.get(method) == value.name
        return kind if is_self and not kind.endswith("<locals>") else ""


def _outer(function: str) -> str:
    return function.rpartition(".")[0]


def users_sources(near: Collection[str] = ()) -> Iterator[Source]:
    """The user's source: of the modules that have been imported, those of the names in `near`
    first, of cells of a notebook, and of the functions that run now."""
    main = sys.modules.get("__main__")
    modules = [*map(sys.modules.get, near), main, *list(sys.modules.values())]
    files = {file_of(module): space_of(module) for module in modules if is_users_module(module)}
    codes = [(code, space_of(main)) for code in _codes_in(space_of(main))]
    codes += [(frame.f_code, frame.f_globals) for frame in running()]
    for code, space in codes:
        if owner_of(code.co_filename) == USER:
            files.setdefault(code.co_filename, space)
    for file, space in files.items():
        text = "" if file is None else text_of(file)
        if file is not None and not _has_changed(file, text, space):
            yield Source(file, text, space)


def _codes_in(space: dict[str, Any]) -> Iterator[types.CodeType]:
    """The code of a module's named functions, and of those of its classes."""
    for one in list(space.values()):
        for code in filter(None, map(code_of, (one, *members_of(one).values()))):
            if not code.co_name.startswith("<"):
                yield code


def _has_changed(file: str, text: str, space: dict[str, Any]) -> bool:
    """Whether a file was written since the program began, and its functions lie elsewhere."""
    with contextlib.suppress(OSError, ValueError):  # a cell has no file
        if os.stat(file).st_mtime > _BEGIN:
            lines = dict(enumerate(text.splitlines(), 1))
            codes = [code for code in _codes_in(space) if code.co_filename == file]
            starts = [(f"def {code.co_name}", f"async def {code.co_name}", "@") for code in codes]
            begins = [lines.get(code.co_firstlineno, "").strip() for code in codes]
            return not codes or not all(map(str.startswith, begins, starts))
    return False


# --- what of a library has it ---------------------------------------------------------------------


#: Methods by which an object lets go of what it holds, those first that leave it usable.
_RELEASES = (*EMPTIES, "close", "shutdown", "terminate")


def library_of(name: Name) -> tuple[str, str]:
    """What of a library has a container, such as `tarfile.TarFile`, and the call by which it lets
    go of it, such as `close()`; "" for none."""
    owner = name.owner
    if issubclass(type(owner), type):
        members = members_of(owner)
        release = next((f"{one}()" for one in _RELEASES if one in members), "")
        return type_name(owner), release
    code = code_of(owner)
    if code is None:
        return f"the module {name_in(space_of(owner))}", ""
    return function_name(code), "" if name.name else "cache_clear()"


# --- the search -----------------------------------------------------------------------------------


class Kept(NamedTuple):
    """Where a container is kept: `train.py:47 in training_step`, or two such lines; until when, if
    the program empties it; what of a library has it, each "" where it is not known; whether it may
    be a buffer that fills; and its capacity, where its owner says it."""

    kept_at: str = ""
    kept_until: str = ""
    library: str = ""
    release: str = ""
    may_fill: bool = False
    capacity: int | None = None


#: Whether a holder is replaced by a larger one, and the names on the way to it, packed.
Packed = tuple[bool, list[list[Any]]]


class Ways:
    """Remembers the names on the way to each holder, so that another process can search the lines:
    a search reads the program's code, and in a forked process that copies its pages."""

    reads_code = False

    def __init__(self) -> None:
        #: by the name of the holder
        self.known: dict[str, Packed] = {}
        self._fills: dict[str, bool] = {}

    def find(self, path: str, way: Sequence[Any], *, changes: bool) -> Kept:
        """As Keepers.find, without what the code says."""
        if path not in self._fills and len(self._fills) < Keepers.MOST:
            self._fills[path] = False
            with contextlib.suppress(Exception):
                names = names_on(way)
                self._fills[path] = may_fill(path, way, names)
                self.known[path] = changes, list(map(packed, names[:_MOST_PACKED]))
        return Kept(may_fill=self._fills.get(path, False))


class Keepers:
    """Finds the lines of holders, each once in a run.

    Args:
        sources: the user's source; by default `users_sources`.
    """

    MOST = 256  # holders that are remembered
    reads_code = True

    def __init__(
        self, sources: Callable[[Collection[str]], Iterable[Source]] = users_sources
    ) -> None:
        self._sources = sources
        self._known: dict[str, Kept] = {}

    def find(self, path: str, way: Sequence[Any], *, changes: bool) -> Kept:
        """Where a holder is kept. A search parses the user's files in which the names occur.

        Args:
            path: the name of the holder.
            way: from what grows to its root, each object held by the next one.
            changes: whether the first object is replaced by a larger one, as a buffer, a graph and
                the head of a chain are. Otherwise entries are put into it.
        """
        if self._is_new(path):
            with contextlib.suppress(Exception):  # a holder without its line is a finding as well
                names = names_on(way)
                fills = may_fill(path, way, names)
                capacity = None if changes else capacity_of(path, way, names)
                self._search(path, names, Kept(may_fill=fills, capacity=capacity), changes=changes)
        return self._known.get(path, Kept())

    def find_packed(self, path: str, given: Packed) -> Kept:
        """The same of a holder of another process, whose `Ways` has the names. A class that this
        process does not have has no lines."""
        if self._is_new(path):
            changes, names = given
            known = itertools.takewhile(lambda one: one is not None, map(unpacked, names))
            with contextlib.suppress(Exception):
                self._search(path, list(filter(None, known)), Kept(), changes=changes)
        return self._known.get(path, Kept())

    def _is_new(self, path: str) -> bool:
        is_new = path not in self._known and len(self._known) < self.MOST
        if is_new:
            self._known[path] = Kept()
        return is_new

    def _search(self, path: str, names: Sequence[Name], known: Kept, *, changes: bool) -> None:
        self._known[path] = known
        self._known[path] = known = known._replace(may_fill=known.may_fill or is_bounded(names[0]))
        modules = [one for name in names for one in modules_of(name.owner)]
        search = Search(self._sources([name_in(space_of(one)) for one in modules]))
        kept = search.find(names, changes=changes)
        self._known[path] = kept._replace(
            kept_until=search.until(names), may_fill=known.may_fill, capacity=known.capacity
        )


class Search:
    """The search for the lines of one holder.

    Args:
        sources: the user's source, the most likely files first. They are taken one by one.
    """

    def __init__(self, sources: Iterable[Source]) -> None:
        self._iterator = iter(sources)
        self._taken = list[Source]()
        self._left = MOST_READ
        self._has_many = False  # lines that put something into what was looked for last

    def find(self, names: Sequence[Name], *, changes: bool) -> Kept:
        """Where that is kept to which these names lead, the innermost name first."""
        if is_users(names[0].owner):
            return Kept(self._lines_of(names, changes=changes))
        # The user's code itself may put something in, as in `arguments.history.append(x)`.
        own = self._puts(names[0]) if names[0].name else []
        if own:
            return Kept(_text(own))
        library, release = library_of(names[0])
        lines = self._lines_of(names, changes=changes)
        return Kept(lines, library=library, release=release)

    def until(self, names: Sequence[Name]) -> str:
        """Until when the container is kept, in words, if the program empties it or makes it anew
        while it goes on, as at the end of an epoch; "" if it is not known to."""
        name, is_own = names[0], is_users(names[0].owner)
        if type(name.owner) is types.CodeType and name.name and _is_called_in_loop(name.owner):
            return f"{name.owner.co_name}() returns"
        known = [one for one in (names[:1] if is_own else names[1:]) if is_users(one.owner)]
        words = {one.name for one in known} - {""}
        near = [name_in(space_of(module)) for one in known for module in modules_of(one.owner)]
        first, anew = False, list[Place]()
        for source, acts in self._with(words) if words else ():
            if near and source.module not in near:
                break  # The modules of its owners come first.
            for act in acts:
                is_new = act.what == BIND and act.is_new
                if not is_new and act.what != EMPTY:
                    continue
                is_it = act.value.container.name in words
                if not is_it or (is_own and _means(act, name, source) < _LIKELY):
                    continue
                if not is_new or act.in_loop:
                    return f"{name_of(_place(source, act))} empties it"
                if not act.is_constant:
                    is_first = act.function.endswith("__init__") or not act.function
                    first |= is_first
                    anew += [] if is_first else [_place(source, act)]
        is_anew = is_own and type(name.owner) is not types.CodeType and len(anew) + first > 1
        return f"{name_of(anew[-1])} empties it" if is_anew and anew else ""

    def _lines_of(self, names: Sequence[Name], *, changes: bool) -> str:
        has_name = False  # whether a name of the user's was found: it is no longer the container's
        for i, name in enumerate(names):
            if not is_users(name.owner):
                outer = names[i + 1 :]
                users = next((one for one in outer if is_users(one.owner) and one.name), None)
                # A library's object that is made of the one before, as table = concat([table, x]).
                found = self._binds(users, again=True) if changes and users else []
                found = found or self._of_library(name, outer)
            elif not name.name:
                code = code_of(name.owner)
                if type(name.owner) is types.CodeType:  # calls, as of `Thread(target=send)`
                    found = self._calls({name.owner.co_name}, is_any=True, whats=(CALL, GIVE))
                else:
                    place = code and Place(code.co_filename, code.co_firstlineno, code.co_qualname)
                    found = [place] if place else []
            else:
                ways = [lambda one: self._binds(one, again=True), self._puts]
                ways = [] if has_name else ways if changes and i == 0 else ways[::-1]
                ways.append(lambda one: self._binds(one, again=False))
                found = next(filter(None, (way(name) for way in ways)), [])
                if not found and not has_name:  # an attribute that a base class of a library has
                    found = self._of_methods(name, names[i + 1 :])
                has_name = True
            if found:
                return _text(found)
        return ""

    @property
    def _sources(self) -> Iterator[Source]:
        yield from self._taken
        for source in self._iterator:
            self._taken.append(source)
            yield source

    def _with(self, words: Collection[str]) -> Iterator[tuple[Source, list[Act]]]:
        """The files in which one of some words occurs, and what their lines do."""
        for source in self._sources:
            if not any(word in source.text for word in words):
                continue
            if source.acts is None and self._left >= len(source.text):
                self._left -= len(source.text)
                source.read()
            yield source, source.acts or []

    def _best(
        self, name: Name, wanted: Callable[[Act], bool], rank: Callable[[Act], Any]
    ) -> list[Place]:
        """The lines that do something with what a name stands for: of those that do it most surely
        the ones of the lowest rank. Once it is sure in the module of the owner, other modules are
        not searched."""
        near = [name_in(space_of(module)) for module in modules_of(name.owner)]
        found = list[tuple[int, Any, Place]]()
        for source, acts in self._with([name.name]):
            is_near = not near or source.module in near
            if not is_near and any(sure == _SURELY for sure, *_ in found):
                break
            for act in filter(wanted, acts):
                sure = _means(act, name, source)
                if sure:
                    found.append((sure, rank(act), _place(source, act)))
        best = min(((-sure, order) for sure, order, _ in found), default=(0, None))
        places = _in_order(place for sure, order, place in found if (-sure, order) == best)
        # Another class may have an attribute of the same name.
        return [] if best[0] == -_MAYBE and len(places) > 1 else places

    def _puts(self, name: Name) -> list[Place]:
        """The lines that put something into it: if there are any, those that are not in a
        constructor, and that put it as deep as it lies."""
        places = self._best(
            name,
            lambda act: act.what == PUT,
            lambda act: (act.function.endswith("__init__"), act.value.depth != name.depth),
        )
        self._has_many = len(places) > MOST_PUTS
        return [] if self._has_many else places

    def _binds(self, name: Name, *, again: bool) -> list[Place]:
        """The lines that give it a value that is made of the one before (`again`), or the line that
        gives it its first value, which is not None."""

        def rank(act: Act) -> tuple[bool, bool]:
            is_later = act.function.rpartition(".")[2] not in ("__init__", "")
            return not again and act.is_constant, not again and is_later

        places = self._best(name, lambda act: act.what == BIND and act.again >= again, rank)
        if again and self._has_many:
            return []  # An attribute of this name in another module is another one.
        return places if again else places[:1]

    def _of_library(self, name: Name, outer: Sequence[Name]) -> list[Place]:
        """The user's calls that put something into what a library has: of methods of the object's
        class, of functions of the module, of the function whose results are cached; or the lines
        that make the object."""
        owner = name.owner
        if issubclass(type(owner), types.ModuleType):
            return self._calls(_putting(name))
        code = code_of(owner)
        made = short_name(owner) if code is None else code.co_name
        return self._of_methods(name, outer) or self._calls({made}, is_any=True)

    def _of_methods(self, name: Name, outer: Sequence[Name]) -> list[Place]:
        """The user's calls of methods that put something into an attribute."""
        owner, torch = name.owner, bridge.loaded()
        if not issubclass(type(owner), type):
            return []
        if name.name == "state" and torch and issubclass(owner, torch.optim.Optimizer):
            # It keeps the state of parameters that it does not train any more.
            name = Name("param_groups", object)
            return self._puts(name) or self._calls({"add_param_group"})
        return self._calls(_putting(name), outer[0] if outer else None)

    def _calls(
        self,
        functions: set[str],
        holder: Name | None = None,
        *,
        is_any: bool = False,
        whats: Collection[str] = (CALL,),
    ) -> list[Place]:
        """The user's lines that call one of these: of an object of this name, or of any that may be
        the same, if the name of the function is not a common one."""
        of_it, of_any = list[Place](), list[Place]()
        words = functions if is_any else functions - _COMMON
        for source, acts in self._with(words | ({holder.name} - {""} if holder else set())):
            others = {act.value for act in acts if act.what == BIND and not act.is_each}
            for act in acts:
                if act.what not in whats or act.value.name not in functions:
                    continue
                base, place = act.value.base, _place(source, act)
                if holder is not None and base is not None and base.name == holder.name:
                    of_it.append(place)
                elif is_any:
                    of_any.append(place)
                elif base is not None and act.value.name not in _COMMON:
                    # Where the program has a name for the object, another name is another object.
                    is_another = base in others and holder is not None and is_users(holder.owner)
                    of_any += [] if is_another else [place]
        places = _in_order(of_it or of_any)
        return places if len(places) <= MOST_PUTS else []


def running() -> Iterator[types.FrameType]:
    """The frames of all threads, of each the innermost first. A function that keeps its own frame
    in a variable keeps all that called it until the next collection."""
    frame: types.FrameType | None
    for frame in sys._current_frames().values():
        while frame is not None:
            yield frame
            frame = frame.f_back


def _is_called_in_loop(code: types.CodeType) -> bool:
    """Whether a function that runs now was called by a loop of the user's program."""
    for frame in running():
        caller = frame.f_back
        if frame.f_code is code and caller is not None:
            is_repeated = any(
                "JUMP_BACKWARD" in one.opname and one.argval <= caller.f_lasti <= one.offset
                for one in dis.get_instructions(caller.f_code)
            )
            return is_repeated and owner_of(caller.f_code.co_filename) == USER
    return False


def _place(source: Source, act: Act) -> Place:
    return Place(source.file, act.line, act.function)


def _text(places: Sequence[Place]) -> str:
    return " and ".join(map(name_of, places[:MOST_NAMED]))


def _in_order(places: Iterable[Place]) -> list[Place]:
    """Each line once, in the order of the lines."""
    return sorted(set(places), key=lambda place: (place.file, place.line))


#: How surely a value of a line is what a name stands for: not at all; an attribute of this name, of
#: it is not known which object; the same in the module of the class; surely.
_NO, _MAYBE, _LIKELY, _SURELY = range(4)


def _means(act: Act, name: Name, source: Source) -> int:
    """Whether what a line does something with is what the name stands for."""
    value, owner = act.value.container, name.owner
    if value.name != name.name:
        return _NO
    if issubclass(type(owner), type):
        return _is_attribute(act, owner, source)
    is_variable, scope = value.sort in (VARIABLE, OUTER), source.scope_of(value, act.function)
    if type(owner) is types.CodeType:
        of = "" if owner.co_name == "<module>" else owner.co_qualname
        is_its = scope == of or bool(scope and of.startswith(f"{scope}.<locals>."))
        is_same = os.path.basename(source.file) == os.path.basename(owner.co_filename)
        return _SURELY if is_variable and is_its and is_same else _NO
    module = name_in(space_of(owner))
    if is_variable:
        is_imported = name.value is not None and source.space.get(name.name) is name.value
        return _SURELY if not scope and (is_imported or source.module == module) else _NO
    is_its = value.base is not None and value.base.name == module.rpartition(".")[2]
    return _SURELY if value.sort == ATTRIBUTE and is_its else _NO


def _is_attribute(act: Act, kind: type, source: Source) -> int:
    """Whether a value is the attribute of its name of an instance of a class, or of the class."""
    value = act.value.container
    classes = [str(QUALNAME(one)) for one in MRO(kind) if module_name_of(one) == source.module]
    if value.sort != ATTRIBUTE or value.base is None:  # in the body of the class
        return _SURELY if value.sort == VARIABLE and act.function in classes else _NO
    of_class = source.class_of(value.base, act.function)
    if of_class:
        return _SURELY if of_class in classes else _NO
    return _LIKELY if classes else _MAYBE


def _putting(name: Name) -> set[str]:
    """The functions of a library that put something into what a name stands for, and those that
    call such a one."""
    functions = members_of(name.owner) or space_of(name.owner)
    direct = {function for function, whats in uses_of(name).items() if PUT in whats}
    codes = {key: code_of(function) for key, function in list(functions.items())}
    calling = {key for key, code in codes.items() if code and not direct.isdisjoint(code.co_names)}
    return (direct | calling) - {"", "__init__", "__new__"}

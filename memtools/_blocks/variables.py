"""By which variables of running functions storages are held, and by nothing else.

    frame of train()
      logits ───────────► tensor ─┐                      logits
      out ──► ModelOutput         ├──► storage           out.logits
                .logits ► tensor ─┘

Asked while a step runs, for the storages of some tensors. All references are counted: those that
variables and what they contain have, against those that there are. A storage that something else
holds too (autograd, a list of another object, a library's function) is left out: to delete the
variables would not free it. Nothing is kept alive by the search, and no code of a class runs.
"""

from __future__ import annotations

import gc
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

from memtools import _core
from memtools._base import torch as bridge
from memtools._blocks.dispatch import Frame, frame_of

DEEPEST = 5  # Objects in objects are entered to this depth.
MOST = 20_000  # So many objects are looked at.
#: They contain no tensors, or are not a variable's own.
_CLOSED = (
    str, bytes, bytearray, int, float, type(None), type, types.ModuleType, types.FunctionType,
    types.BuiltinFunctionType, types.MethodType, types.CodeType, types.FrameType,
)  # fmt: skip


class Variable(NamedTuple):
    """A variable that holds a storage.

    Attributes:
        name: of the variable.
        path: from it to the tensor: "" for itself, ".logits", "[0]", ".past_key_values.layers[0]".
        frame: file, line that runs now, and function of the frame that has it.
        is_outer: whether it has an object by which another variable has the tensor; then the path
            is "".
        has_graph: whether the tensor has a graph of autograd.
    """

    name: str
    path: str
    frame: Frame
    is_outer: bool = False
    has_graph: bool = False


@dataclass
class _Seen:
    """An object on the way from a variable to tensors.

    Attributes:
        object: the object itself, as long as the search lasts.
        slots: how many references to it were seen.
        above: the objects that contain it, by id.
    """

    object: Any
    slots: int = 0
    above: set[int] = field(default_factory=set)


class _Search:
    """One search: the objects that the variables of some frames contain."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.seen: dict[int, _Seen] = {}
        self.roots: dict[tuple[int, str], tuple[Frame, int]] = {}  # frame and name: id of the value
        self.found: dict[int, list[tuple[int, str, str]]] = {}  # tensors: (frame, name, path)
        self.tensors: dict[int, Any] = {}
        # Ids of what is not entered, as the namespaces of modules: their values are variables.
        self.spaces = set[int]()

    def enter(self, frame: FrameType) -> None:
        values = [
            (name, inner)
            for name, value in _core._frame_variables(frame)
            for inner in (gc.get_referents(value) if type(value) is types.CellType else (value,))
        ]
        if not values and frame.f_locals is frame.f_globals:
            values = list(frame.f_globals.items())
        place = frame_of(frame)
        for name, value in values:
            is_open = not issubclass(type(value), _CLOSED) and id(value) not in self.spaces
            if is_open and not name.startswith("__"):
                self.roots[id(frame), name] = place, id(value)
                self._walk(value, (id(frame), name))

    def _walk(self, root: Any, of: tuple[int, str]) -> None:
        waiting: list[tuple[Any, str, int, int]] = [(root, "", 0, 0)]
        while waiting and len(self.seen) < MOST:
            value, path, depth, above = waiting.pop()
            seen = self.seen.get(id(value))
            is_new = seen is None
            if seen is None:
                seen = self.seen[id(value)] = _Seen(value)
            seen.slots += 1
            seen.above.add(above)
            if issubclass(type(value), self.torch.Tensor):
                self.tensors[id(value)] = value
                self.found.setdefault(id(value), []).append((*of, path))
            elif is_new and depth < DEEPEST:
                waiting += (
                    (inner, path + step, depth + 1, id(value))
                    for inner, step in _within(value)
                    if not issubclass(type(inner), _CLOSED) and id(inner) not in self.spaces
                )


def _within(value: Any) -> Iterator[tuple[Any, str]]:
    """(object, how it is written) of what an object refers to."""
    kind = type(value)
    if issubclass(kind, dict):
        for key, inner in list(dict.items(value)):
            yield inner, f"[{key!r}]" if type(key) in (str, int) else "[...]"
    elif issubclass(kind, (list, tuple, deque)):
        names = getattr(kind, "_fields", ()) if issubclass(kind, tuple) else ()
        built_in: Any = next(one for one in (list, tuple, deque) if issubclass(kind, one))
        for i, inner in enumerate(list(built_in.__iter__(value))):
            yield inner, f".{names[i]}" if i < len(names) else f"[{i}]"
    own = _core._instance_dict(value)
    if own is not None:
        for key, inner in list(dict.items(own)):
            yield inner, f".{key}"


def holding(
    frame: FrameType | None,
    is_users: Callable[[str], bool],
    wanted: Collection[int],
    without: object = None,
) -> dict[int, Sequence[Variable]]:
    """The variables that hold storages, and nothing else does.

    Args:
        frame: the innermost frame of the stack; all its callers are looked at.
        is_users: whether a file is the user's code.
        wanted: the storages, by `_cdata`.
        without: an object in which nothing is looked for, as the tracer with its many objects.

    Returns the variables of each storage that only variables of the user's functions hold, and ()
    of one that something else holds too.
    """
    search = _Search(bridge.connect().torch)
    search.spaces.add(id(without))
    frames = list[FrameType]()
    while frame is not None:
        search.spaces.add(id(frame.f_globals))
        if is_users(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    for one in frames:
        search.enter(one)
    by_storage: dict[int, list[int]] = {}
    for number in search.tensors:  # No variable may have a tensor now: it would count.
        key = _key(search.tensors[number])
        if key in wanted:
            by_storage.setdefault(key, []).append(number)
    found = dict[int, Sequence[Variable]]()
    for key, numbers in by_storage.items():
        above, found[key] = _above(search, numbers), ()
        if _have_all(search, numbers) and all(_is_all_known(search, one) for one in above):
            places = {
                one: search.tensors[number].grad_fn is not None
                for number in numbers
                for one in search.found[number]
            }
            named = {(where, name) for where, name, _ in places}
            # Other variables have an object that contains it, too.
            more = [
                root for root, (_, value) in search.roots.items()
                if value in above and root not in named
            ]  # fmt: skip
            found[key] = [
                Variable(name, path, search.roots[where, name][0], has_graph=has_graph)
                for (where, name, path), has_graph in places.items()
            ] + [Variable(name, "", search.roots[where, name][0], True) for where, name in more]
    return found


def _key(tensor: Any) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except Exception:  # sparse, nested, of a functional transform
        return 0


def _above(search: _Search, numbers: list[int]) -> set[int]:
    """The ids of tensors, and of the objects by which variables have them."""
    above, waiting = set(numbers), list(numbers)
    while waiting:
        for outer in search.seen[waiting.pop()].above - above:
            if outer:
                above.add(outer)
                waiting.append(outer)
    return above


def _have_all(search: _Search, numbers: list[int]) -> bool:
    """Whether these tensors have all references to their storage, and nothing in C++ has them."""
    tensors = [search.tensors[number] for number in numbers]
    bases = [tensor._base if tensor._is_view() else None for tensor in tensors]
    others = {id(base): base for base in bases if base is not None and id(base) not in numbers}
    tensors += others.values()
    storage = tensors[0].untyped_storage()  # the Python object has one reference of its own
    if search.torch._C._storage_Use_Count(storage._cdata) - 1 != len(tensors):
        return False
    # A view has a reference to its base. Autograd has others to what it saves.
    return all(
        tensor._use_count() - 1 == sum(base is tensor for base in bases) for tensor in tensors
    )


def _is_all_known(search: _Search, number: int) -> bool:
    seen = search.seen[number]
    # The search has one reference, and getrefcount() another one.
    own = 2
    if number in search.tensors:
        own += 1
        own += seen.object._use_count() > 1  # C++ refers to the Python object
    return sys.getrefcount(seen.object) - own <= seen.slots

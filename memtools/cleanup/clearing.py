"""What `managed(policy, clear=...)` names, found at the end of a call, and cleared."""

from __future__ import annotations

import difflib
import inspect
import keyword
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from memtools._base import torch as bridge

#     "model.blocks.*.gate_history"      of the parameter `model`, else of the first argument
#      └ start  └ each item  └ asked to clear(), else to reset(); a tensor or number becomes None

#: A name, an object with clear() or reset(), (object, name), or several of them in a tuple or list.
Clear = Any

_MISSING: Any = object()
_DROP = ""  # the way of what is replaced by None
_MOST_TYPES = 64


class Target(NamedTuple):
    """One thing to clear: a name from a call's arguments, from an object, or an object itself."""

    text: str  # as it was written, for errors
    owner: Any  # _MISSING: the call's
    path: tuple[str, ...]

    def check_block(self) -> None:
        if self.owner is _MISSING:
            raise TypeError(
                f"{self.text}: a `with` block has no arguments that a name could begin at; give "
                "the object itself, or (object, 'name')"
            )


def parsed(clear: Clear) -> list[Target]:
    """The targets that `clear` names. Raises TypeError and ValueError for one that makes no
    sense."""
    several = isinstance(clear, (tuple, list, set, frozenset)) and not _is_attribute(clear)
    return [_target(one) for one in (clear if several else (clear,))]


def _is_attribute(one: Any) -> bool:
    """Whether it is (object, name)."""
    if not isinstance(one, tuple) or len(one) != 2:
        return False
    return isinstance(one[1], str) and not isinstance(one[0], (str, tuple))


def _target(one: Any) -> Target:
    if isinstance(one, str):
        return Target(f"clear={one!r}", _MISSING, _path(one, f"clear={one!r}"))
    if _is_attribute(one):
        text = f"clear=({type(one[0]).__name__}, {one[1]!r})"
        return Target(text, one[0], _path(one[1], text))
    text = f"clear={_name_of(one)}"
    if _way(one) is None:
        raise TypeError(
            f"{text} has neither clear() nor reset(); give a name like 'model.gate_history', an "
            "object that has one of them, or (object, 'name')"
        )
    return Target(text, one, ())


def _path(text: str, written: str) -> tuple[str, ...]:
    path = tuple(text.split("."))
    for i, part in enumerate(path):
        good = part.isidentifier() and not keyword.iskeyword(part)
        if not good and (i == 0 or not (part == "*" or (part.isascii() and part.isdigit()))):
            raise ValueError(
                f"{written} is no name: {part!r} is neither an attribute nor (after the first) an "
                "item's number or '*'"
            )
    return path


class Names:
    """The targets of one function: called with its arguments, clears them."""

    __slots__ = ("_first", "_owner", "_parameters", "_plans", "_targets", "_ways")

    def __init__(self, function: Callable[..., Any] | None, targets: list[Target]) -> None:
        self._owner = getattr(function, "__self__", _MISSING)  # of a bound method
        if not inspect.ismethod(function):
            self._owner = _MISSING
        self._parameters = {} if function is None else _parameters(function)
        self._first = next((name for name, (at, _) in self._parameters.items() if at == 0), None)
        self._targets = targets
        for target in targets:
            self._check(target, function)
        self._plans = [self._plan(target) for target in targets]
        self._ways: dict[type, str] = {}  # by the type of what was cleared

    def _check(self, target: Target, function: Callable[..., Any] | None) -> None:
        if target.owner is not _MISSING or target.path[0] in self._parameters:
            return
        if self._first is None and self._owner is _MISSING:
            raise ValueError(
                f"{target.text}: {getattr(function, '__qualname__', 'the function')}() has no "
                f"parameter {target.path[0]!r}, nor a first one whose attribute it could be"
            )

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Clears all; then raises what failed first, with notes of the others."""
        failed: Exception | None = None
        for target, plan in zip(self._targets, self._plans, strict=True):
            try:
                if plan is None or not self._usual(plan, args, kwargs):
                    self._clear(target, args, kwargs or {})
            except Exception as error:
                if failed is None:
                    failed = error
                else:
                    failed.add_note(f"and {type(error).__name__}: {error}")
        if failed is not None:
            try:
                raise failed
            finally:
                failed = None  # it holds this frame

    def _plan(self, target: Target) -> tuple[int, str, tuple[str, ...]] | None:
        """For the usual case, a chain of attributes: position and name of the argument that it
        begins at."""
        owner, path = target.owner, target.path
        if owner is not _MISSING or self._owner is not _MISSING:
            return None
        name = path[0] if path[0] in self._parameters else self._first
        path = path[1:] if path[0] in self._parameters else path
        if name is None or not path or not all(part.isidentifier() for part in path):
            return None
        return self._parameters[name][0], name, path

    def _usual(
        self,
        plan: tuple[int, str, tuple[str, ...]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
    ) -> bool:
        """Clears what is of a type that was cleared before; False where there is more to find."""
        position, name, path = plan
        if not 0 <= position < len(args) or (kwargs and name in kwargs):
            return False
        owner = value = args[position]
        try:
            for part in path:
                owner, value = value, getattr(value, part)
        except AttributeError:
            return False
        if value is None:
            return True
        way = self._ways.get(type(value))
        if way is None:
            return False
        if way == _DROP:
            setattr(owner, part, None)
        else:
            getattr(value, way)()
        return True

    def _clear(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        owner, path = target.owner, target.path
        if owner is _MISSING:
            owner, path = self._start(path, args, kwargs)
            if owner is _MISSING:  # the call does not fit the function, which has raised
                return
        places = [_Place(owner, lambda _: _refuse_argument(target.text))]
        for part in path:
            places = [new for place in places for new in _places(place.value, part, target.text)]
        for place in places:
            way = _empty(place, target.text)
            if way is not None and len(self._ways) < _MOST_TYPES:
                self._ways[type(place.value)] = way

    def _start(
        self, path: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[str, ...]]:
        if path[0] in self._parameters:
            return self._argument(path[0], args, kwargs), path[1:]
        if self._owner is not _MISSING:
            return self._owner, path
        assert self._first is not None
        return self._argument(self._first, args, kwargs), path

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in kwargs:
            return kwargs[name]
        position, default = self._parameters[name]
        return args[position] if 0 <= position < len(args) else default


def _parameters(function: Callable[..., Any]) -> dict[str, tuple[int, Any]]:
    """Position and default of each; -1 for one that is given by name only. Of *args the first."""
    try:
        found = inspect.signature(function).parameters.values()
    except ValueError:  # of a C function that does not tell: its first argument
        return {"": (0, _MISSING)}
    parameters = {}
    for i, one in enumerate(found):
        if one.kind is not one.VAR_KEYWORD:
            default = _MISSING if one.default is one.empty else one.default
            name = f"*{one.name}" if one.kind is one.VAR_POSITIONAL else one.name
            parameters[name] = (-1 if one.kind is one.KEYWORD_ONLY else i, default)
    return parameters


# --- along a path ---------------------------------------------------------------------------------


class _Place(NamedTuple):
    value: Any
    put: Callable[[Any], object]  # something else in its place


def _refuse_argument(text: str) -> None:
    raise TypeError(f"{text} is an argument, which cannot be set to None for its caller")


def _places(owner: Any, part: str, text: str) -> list[_Place]:
    """What a part of a name means at one object."""
    if part == "*":
        return [_item(owner, key) for key in _keys(owner, text)]
    try:
        if part.isdigit() and hasattr(type(owner), "__getitem__"):
            return [_item(owner, int(part))]
        return [_Place(getattr(owner, part), lambda new: setattr(owner, part, new))]
    except (AttributeError, LookupError) as error:
        if isinstance(owner, Mapping) and part in owner:
            return [_item(owner, part)]
        raise AttributeError(_unknown(owner, part, text)) from error


def _item(owner: Any, key: Any) -> _Place:
    return _Place(owner[key], lambda new: owner.__setitem__(key, new))


def _keys(owner: Any, text: str) -> Iterable[Any]:
    keys = getattr(owner, "keys", None)
    if callable(keys):
        return list(keys())
    if hasattr(type(owner), "__getitem__") and hasattr(type(owner), "__len__"):
        return range(len(owner))
    raise TypeError(f"{text}: '*' means every item, and {_name_of(owner)} has none")


def _unknown(owner: Any, part: str, text: str) -> str:
    kind = type(owner).__name__
    if owner is None:
        return f"{text} ends at None, which has no {part!r}"
    if part.isdigit():
        return f"{text}: {kind} has no item {part}"
    near = difflib.get_close_matches(part, dir(owner), 3)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    return f"{text}: {kind} has no attribute {part!r}{hint}"


# --- clearing -------------------------------------------------------------------------------------


def _empty(place: _Place, text: str) -> str | None:
    """Clears it; returns how, where the next of its type can be cleared alike unseen."""
    value, torch = place.value, bridge.loaded()
    if value is None:
        return None
    parameter = torch is not None and isinstance(value, torch.nn.Parameter)
    tensor = torch is not None and issubclass(type(value), torch.Tensor) and not parameter
    if tensor or isinstance(value, numbers.Number):
        place.put(None)
        # Of a subclass of Tensor some may be parameters.
        plain = type(value) in (int, float) or (tensor and type(value) is torch.Tensor)
        return _DROP if plain else None
    way = _way(value)
    if way is None:
        what = "a parameter of the model" if parameter else _name_of(value)
        raise TypeError(
            f"{text} is {what}, which has neither clear() nor reset() and is no tensor or number "
            "that could be dropped"
        )
    getattr(value, way)()
    return way if hasattr(type(value), way) else None


def _way(value: Any) -> str | None:
    """The name of what clears it."""
    if isinstance(value, type):
        return None
    return next((name for name in ("clear", "reset") if callable(getattr(value, name, None))), None)


def _name_of(value: Any) -> str:
    kind = type(value).__name__
    return f"class {value.__name__}" if isinstance(value, type) else f"an object of type {kind}"

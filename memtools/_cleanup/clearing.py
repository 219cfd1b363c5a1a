"""Find what `managed(policy, clear=...)` names at the end of a call, and clear it.

"model.blocks.*.gate_history"      of the parameter `model`, else of the first argument
 └ start  └ each item  └ asked to clear(), else to reset(); a tensor or a number becomes None
"""

from __future__ import annotations

import difflib
import inspect
import keyword
import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from memtools._base import torch as bridge

#: A name, an object with clear() or reset(), (object, name), or several of them in a tuple or list.
Clear = Any

_MISSING: Any = object()
#: Types whose values None replaces. torch.Tensor joins them when the first one is seen.
_DROPPED: set[type] = {int, float}


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
    if _method(one) is None:
        raise TypeError(
            f"{text} has neither clear() nor reset(); give a name like 'model.gate_history', an "
            "object that has one of them, or (object, 'name')"
        )
    return Target(text, one, ())


def _path(text: str, written: str) -> tuple[str, ...]:
    path = tuple(text.split("."))
    for i, part in enumerate(path):
        is_name = part.isidentifier() and not keyword.iskeyword(part)
        if not is_name and (i == 0 or not (part == "*" or (part.isascii() and part.isdigit()))):
            raise ValueError(
                f"{written} is not a name: {part!r} is neither an attribute nor (after the first) "
                "an item's number or '*'"
            )
    return path


class _Start(NamedTuple):
    """Where the name of a target begins: at an object, or at an argument of the call."""

    text: str
    path: tuple[str, ...]
    owner: Any  # _MISSING: an argument, by its position, -1 for none, or by its name
    position: int = -1
    name: str = ""
    default: Any = _MISSING


class Names:
    """The targets of one function: called with its arguments, clears them."""

    __slots__ = ("_starts",)

    def __init__(self, function: Callable[..., Any] | None, targets: list[Target]) -> None:
        self._starts = [_start(target, function) for target in targets]

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Clear all; then raise what failed first, with notes of the others."""
        failed: Exception | None = None
        for text, path, owner, position, name, default in self._starts:
            if owner is _MISSING:
                if kwargs and name in kwargs:
                    owner = kwargs[name]
                else:
                    owner = args[position] if 0 <= position < len(args) else default
                if owner is _MISSING:  # The call does not fit the function, which has raised.
                    continue
            try:
                _clear(owner, path, text)
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


def _start(target: Target, function: Callable[..., Any] | None) -> _Start:
    """Find the argument. Raises ValueError if no call of the function could have it."""
    text, owner, path = target
    if owner is not _MISSING or function is None:
        return _Start(text, path, owner)
    parameters = _parameters(function)
    if path[0] in parameters:
        name, path = path[0], path[1:]
    elif inspect.ismethod(function):
        return _Start(text, path, function.__self__)
    else:
        first = [name for name, (position, _) in parameters.items() if position == 0]
        if not first:
            raise ValueError(
                f"{text}: {getattr(function, '__qualname__', 'the function')}() has no parameter "
                f"{path[0]!r}, nor a first one whose attribute it could be"
            )
        name = first[0]
    return _Start(text, path, _MISSING, parameters[name][0], name, parameters[name][1])


def _parameters(function: Callable[..., Any]) -> dict[str, tuple[int, Any]]:
    """Position and default of each; -1 for one that is given by name only. Of *args the first."""
    try:
        found = inspect.signature(function).parameters.values()
    except ValueError:  # a C function without a signature: its first argument
        return {"": (0, _MISSING)}
    parameters = {}
    for i, one in enumerate(found):
        if one.kind is not one.VAR_KEYWORD:
            default = _MISSING if one.default is one.empty else one.default
            name = f"*{one.name}" if one.kind is one.VAR_POSITIONAL else one.name
            parameters[name] = (-1 if one.kind is one.KEYWORD_ONLY else i, default)
    return parameters


# --- along a path ---------------------------------------------------------------------------------


def _clear(start: Any, path: tuple[str, ...], text: str) -> None:
    """Clear what a path means at an object."""
    owner, value = None, start
    try:
        for part in path:
            owner, value = value, getattr(value, part)
    except AttributeError:
        _clear_items(start, path, text)
        return
    if not _is_cleared(value, text):
        if not path:
            raise TypeError(f"{text} is an argument, which cannot be set to None for its caller")
        setattr(owner, path[-1], None)


def _clear_items(owner: Any, path: tuple[str, ...], text: str) -> None:
    """The same where a part of the path is an item, or every item."""
    for i, part in enumerate(path):
        if hasattr(owner, part):
            owner = getattr(owner, part)
            continue
        rest = path[i + 1 :]
        for key in _keys(owner, text) if part == "*" else [_key(owner, part, text)]:
            if rest:
                _clear(owner[key], rest, text)
            elif not _is_cleared(owner[key], text):
                owner[key] = None
        return


def _key(owner: Any, part: str, text: str) -> Any:
    """The key of the item that a part names. Raises AttributeError if there is none."""
    for key in (int(part), part) if part.isdigit() else (part,):
        try:
            if isinstance(owner, Mapping):  # A look-up in a defaultdict would create an item.
                if key in owner:
                    return key
            elif key is not part:
                owner[key]
                return key
        except (LookupError, TypeError):
            continue
    try:
        return getattr(owner, part)  # Raise the error again, which may be a property's own.
    except AttributeError as error:
        raise AttributeError(_unknown(owner, part, text)) from error


def _keys(owner: Any, text: str) -> list[Any]:
    keys = getattr(owner, "keys", None)
    if callable(keys):
        return list(keys())
    if hasattr(type(owner), "__getitem__") and hasattr(type(owner), "__len__"):
        return list(range(len(owner)))
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


def _is_cleared(value: Any, text: str) -> bool:
    """Clear an object, unless it is None; False for a tensor or a number, which None replaces."""
    if value is None:
        return True
    if type(value) in _DROPPED:
        return False
    method = _method(value)
    if method is not None:
        method()
        return True
    torch = bridge.loaded()
    parameter = torch is not None and isinstance(value, torch.nn.Parameter)
    if isinstance(value, numbers.Number) or (
        torch is not None and isinstance(value, torch.Tensor) and not parameter
    ):
        if torch is not None and type(value) is torch.Tensor:
            _DROPPED.add(torch.Tensor)
        return False
    what = "a parameter of the model" if parameter else _name_of(value)
    raise TypeError(
        f"{text} is {what}, which has neither clear() nor reset() and is not a tensor or a number "
        "that could be dropped"
    )


def _method(value: Any) -> Callable[[], object] | None:
    """Return the method that clears an object; None if there is none."""
    method = getattr(value, "clear", None)
    if not callable(method):
        method = getattr(value, "reset", None)
    return method if callable(method) and not isinstance(value, type) else None


def _name_of(value: Any) -> str:
    kind = type(value).__name__
    return f"class {value.__name__}" if isinstance(value, type) else f"an object of type {kind}"

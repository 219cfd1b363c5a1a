"""Fields out of what a program has, a dict or a TensorDict, and a TensorDict of all fields.

tensordict is not needed: what looks like a TensorDict is taken as one, and only `as_tensordict()`
imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memtools._trajectory.field import Field


def named_tensors(
    call: str, entries: Any, keywords: Mapping[str, Any], states: frozenset[str], dims: int
) -> dict[str, tuple[Any, ...]]:
    """What a call was given, by name: the parts of each field, which follow each other in time.
    Only a state of a TensorDict has two parts. Fields of a TensorDict within another are named by
    their path, like "next.reward".

    Args:
        call: of the user, for errors.
        entries: a dict, a TensorDict or None.
        keywords: more of them.
        states: fields with an entry more than there are steps. A TensorDict of whole trajectories
            has them as `x` and `("next", "x")`, of which the last entry is the one more.
        dims: how many dimensions of the batch a TensorDict has: 1 for a time step, 2 for several.

    Raises TypeError if `entries` is something else, ValueError if it names nothing, names a field
    twice or has another batch size.
    """
    if entries is None:
        found: dict[str, tuple[Any, ...]] = {}
    elif hasattr(entries, "batch_size") and hasattr(entries, "flatten_keys"):
        found = _of_tensordict(call, entries, states, dims)
    elif isinstance(entries, Mapping):
        found = {str(name): (value,) for name, value in entries.items()}
    else:
        raise TypeError(
            f"{call} takes tensors by name, a dict or a TensorDict, got {type(entries).__name__}"
        )
    twice = sorted(found.keys() & keywords.keys())
    if twice:
        raise ValueError(f"{call} was given {twice[0]!r} twice, by name and in {_kind(entries)}")
    found.update((name, (value,)) for name, value in keywords.items())
    if not found:
        raise ValueError(f"{call} was given no field; pass tensors by name: {call[:-1]}latents=x)")
    return found


def _of_tensordict(
    call: str, given: Any, states: frozenset[str], dims: int
) -> dict[str, tuple[Any, ...]]:
    if len(given.batch_size) < dims:
        wanted = "[samples]" if dims == 1 else "[steps, samples]"
        raise ValueError(
            f"{call} takes a TensorDict of batch_size {wanted}, got {list(given.batch_size)}"
        )
    flat = given.flatten_keys(".")
    names = [str(name) for name in flat.keys()]  # noqa: SIM118 - not a dict
    found: dict[str, tuple[Any, ...]] = {name: (flat.get(name),) for name in names}
    for name in states & found.keys() if dims == 2 else ():
        after = found.pop(f"next.{name}", None)
        if after is not None:
            found[name] += (after[0][-1:],)
    return found


def _kind(value: object) -> str:
    return f"the {type(value).__name__}"


def tensordict_of(fields: list[Field], num_steps: int, samples: int) -> Any:
    """A TensorDict [T, samples] over the blocks, without a copy.

    A state is in it twice, as torchrl has it: the one before each step, and under "next" the one
    after it. A field of samples is expanded over the steps.

    Raises ImportError if tensordict is not installed.
    """
    try:
        from tensordict import TensorDict
    except ImportError as error:
        raise ImportError(
            "as_tensordict() needs tensordict: pip install --no-deps tensordict, and what it names "
            f"as missing then ({error})"
        ) from error
    values: dict[str, Any] = {}
    for field in fields:
        if field.kind == "states":
            values[field.name] = field.values[:-1]
            values[f"next.{field.name}"] = field.values[1:]
        elif field.kind == "samples":
            values[field.name] = field.values.expand(num_steps, *field.values.shape)
        else:
            values[field.name] = field.values
    return TensorDict(values, batch_size=[num_steps, samples]).unflatten_keys(".")

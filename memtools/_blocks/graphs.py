"""held_by_graphs: which storages live at the peak only because a value is kept with its graph.

    p ──► p.log() ──► p * ... ──► entropy      the graph of `entropy` has saved p.log() and others
                                     │
          backward() never comes     └── stats["entropy"]: with .detach() they end where it is made

The graphs themselves are not looked at. What a value was made of is known by the operators; that it
is what keeps a storage, by both ending at the same moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from memtools._base.peak import BACKWARD
from memtools._blocks.lifetimes import Life, Op, Trace


def held_by_graphs(
    trace: Trace, position: int, over: Iterable[Life], twins: Mapping[int, Life]
) -> dict[int, list[Life]]:
    """The values whose graphs hold a storage and nothing else does, by the id of that storage.

    Args:
        trace: with the variables at its peak.
        position: of the peak.
        over: what lives there though nothing reads it again.
        twins: for each life of one traced step, that of the other.
    """
    waiting = {life.id: life for life in over if life.id not in trace.variables}
    if not waiting:
        return {}
    writers, found = _writers(trace), dict[int, list[Life]]()
    lives = {life.id: life for life in trace.lives}
    for number, variables in trace.variables.items():
        value = lives[number]
        has_graph = not variables or any(one.has_graph for one in variables)
        if not has_graph or value.birth < 0 or not value.is_alive(position):
            continue
        made_of = waiting.keys() & _made_of(trace, writers, value)
        if made_of and (not variables or _is_passed_back(trace, value, twins.get(number))):
            for one in made_of:  # Something holds it that cannot be detached.
                del waiting[one]
                found.pop(one, None)
        else:
            for one in made_of:
                found.setdefault(one, []).append(value)
    return {
        number: values
        for number, values in found.items()
        if _end_together(waiting[number], values, twins)
    }


def _keeps_graph(op: Op) -> bool:
    """Whether the result of an operator has a graph that leads to its arguments."""
    return op.has_grad and op.phase != BACKWARD and not op.name.startswith("aten.detach")


def _writers(trace: Trace) -> dict[int, list[Op]]:
    """By storages, the operators that have made and changed them."""
    found: dict[int, list[Op]] = {}
    for life in trace.lives:
        if life.birth >= 0:
            found[life.id] = [trace.ops[life.birth]]
    for op in trace.ops:
        if op.reads and op.name.split(".")[1:2] and op.name.split(".")[1].endswith("_"):
            found.setdefault(op.reads[0], []).append(op)
    return found


def _made_of(trace: Trace, writers: Mapping[int, list[Op]], value: Life) -> set[int]:
    """The ids of all that a value's graph has gone through."""
    found, to_do = {value.id}, [value.id]
    while to_do:
        for op in writers.get(to_do.pop(), ()):
            new = set(op.reads) - found if _keeps_graph(op) else ()
            found.update(new)
            to_do += new
    return found - {value.id}


def _is_passed_back(trace: Trace, *values: Life | None) -> bool:
    """Whether a backward pass begins at a value, or at what is made of it with its graph, or reads
    any of that."""
    reached = {one.id for one in values if one is not None}
    births: dict[int, list[int]] = {}
    for life in trace.lives:
        births.setdefault(life.birth, []).append(life.id)
    for position, op in enumerate(trace.ops):
        if not reached.isdisjoint(op.reads):
            if op.phase == BACKWARD or op.name.startswith("aten.ones_like"):
                return True
            if _keeps_graph(op):
                reached.update(births.get(position, ()))
    return False


def _end_together(life: Life, values: Iterable[Life], twins: Mapping[int, Life]) -> bool:
    """Whether a storage ends where the last of these values does, in one of the traced steps."""
    same = [life, *values]
    if any(one.death is None for one in same):
        same = [twins.get(one.id, one) for one in same]
    first, *others = (one.death for one in same)
    return first is not None and None not in others and first == max(filter(None, others))

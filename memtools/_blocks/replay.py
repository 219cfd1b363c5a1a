"""What the peak of a traced step would be after changes of the program, by arithmetic.

    Trace ──► ended_at_last_use ──► in_micro_batches(4) ──► Trace.peak()

A change takes a trace and returns one; it runs nothing. So changes compose: `replay` applies them
in order. A trace that was changed has the operators of the real one, which it may not run again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from memtools._base.peak import BACKWARD, FORWARD, GRADIENTS, INPUTS, OPTIMIZER, OPTIMIZERS
from memtools._blocks.lifetimes import MARKED, Life, Trace

Change = Callable[[Trace], Trace]
#: (path of a list of modules, number of its entry) of the path of a module
_ENTRY = re.compile(r"(?:(.*?)\.)?([0-9]+)(?:\.|$)")


def replay(trace: Trace, changes: Iterable[Change]) -> Trace:
    """The trace with changes applied, one after the other."""
    for change in changes:
        trace = change(trace)
    return trace


def ended(deaths: Mapping[int, int]) -> Change:
    """These storages end before the operators at these positions, if they live so long."""

    def change(life: Life) -> Life:
        death = deaths.get(life.id)
        if death is None or (life.death is not None and life.death <= death):
            return life
        return life._replace(death=max(death, life.last_use + 1))

    return lambda trace: _each(trace, change)


def ended_at_last_use(ids: Collection[int]) -> Change:
    """`del` right after the last use of these storages."""
    return ended(dict.fromkeys(ids, 0))


def without_optimizers_temporaries(trace: Trace) -> Trace:
    """An optimizer that makes none, as with fused=True."""
    kept = tuple(life for life in trace.lives if life.category != OPTIMIZERS)
    return replace(trace, lives=kept)


def gradients_end_with_the_step(trace: Trace) -> Trace:
    """`zero_grad(set_to_none=True)` right after the optimizer's step: a gradient exists from the
    backward pass that makes it to the end of the optimizer's step that reads it. What was added to
    an old gradient is then the gradient itself."""
    gradients = {life.id: life for life in trace.lives if life.category == GRADIENTS}
    uses: dict[int, list[int]] = {number: [] for number in gradients}
    for position, op in enumerate(trace.ops):
        if op.phase in (BACKWARD, OPTIMIZER):  # zero_() and a norm between them are no ends
            for number in gradients.keys() & op.reads:
                uses[number].append(position)
    ends = [
        position + 1
        for position, op in enumerate(trace.ops)
        if op.phase == OPTIMIZER
        and (position + 1 == len(trace.ops) or trace.ops[position + 1].phase != OPTIMIZER)
    ]
    added = {(life.death, life.bytes): life for life in trace.lives if life.phase == BACKWARD}
    changed, dropped = list[Life](), set[int]()
    for number, life in gradients.items():
        begin, last = 0, len(trace.ops) if life.death is None else life.death
        for end in (*ends, last):
            own = [use for use in uses[number] if begin <= use < end]
            if own:
                birth = max(own[0], life.birth)
                other = added.get((birth + 1, life.bytes))
                if life.birth < birth and other and other.id in trace.ops[birth].reads:
                    birth = other.birth
                    dropped.add(other.id)
                changed.append(life._replace(birth=birth, last_use=own[-1], death=min(end, last)))
            begin = end
    kept = (life for life in trace.lives if life.id not in gradients and life.id not in dropped)
    return replace(trace, lives=(*kept, *changed))


def in_micro_batches(parts: int) -> Change:
    """Each batch in so many equal parts, whose gradients are summed. What is made of inputs takes
    1/parts; not so what has the shape of a parameter. From the second part on all gradients exist,
    and each pass makes one that is added to them; those of the step before end before the first."""

    def change(trace: Trace) -> Trace:
        scaled, found = scales_with_batch(trace), list[Life]()
        begins, ends = _beginnings_of_passes(trace), last_uses_in_backward(trace)
        made: dict[str, list[tuple[int, int]]] = {}  # (birth of a gradient, of its pass) by name
        for life in trace.lives:
            if life.category == GRADIENTS and life.phase == BACKWARD and life.name:
                made.setdefault(life.name, []).append((life.birth, begins[life.birth]))
        for life in trace.lives:
            if life.category == GRADIENTS and life.death is not None:
                later = (
                    begin
                    for birth, begin in made.get(life.name, ())
                    if life.birth < begin < life.death <= birth
                )
                life = life._replace(death=min(later, default=life.death))
            if life.id in scaled:
                life = life._replace(bytes=math.ceil(life.bytes / parts))
            elif life.category == GRADIENTS and life.phase == BACKWARD and parts > 1:
                found.append(life._replace(death=ends.get(life.id, life.birth) + 1))
                life = life._replace(birth=begins[life.birth])
            found.append(life)
        ops = tuple(
            op if scaled.isdisjoint(op.reads) else op._replace(scratch=op.scratch // parts)
            for op in trace.ops
        )
        return replace(trace, lives=tuple(found), ops=ops)

    return change


def repeated_blocks(trace: Trace) -> list[str]:
    """The paths of lists of modules of which at least two run in forward passes: "blocks" for
    "blocks.0", "blocks.1"; "" for a model that is such a list itself. Lists within the entries of
    another one are not among them."""
    entries: dict[str, set[str]] = {}
    for op in trace.ops:
        if op.phase == FORWARD and (found := _ENTRY.match(op.module)):
            entries.setdefault(found[1] or "", set()).add(found[2])
    return [path for path, numbers in entries.items() if len(numbers) > 1]


def entry_of(module: str) -> str:
    """The part of a module's path that leads to an entry of a list of modules: "blocks.0" of
    "blocks.0.attention"; "" if there is none."""
    found = _ENTRY.match(module)
    return found[0].rstrip(".") if found else ""


def checkpointed(blocks: str) -> Change:
    """`torch.utils.checkpoint` around each entry of a list of modules: what it saves for the
    backward pass ends with its forward pass, which runs again in front of the first operator of the
    backward pass that reads some of it. What it was called with lives until then. A cache of keys
    and values would keep more, so that there must be none."""

    def change(trace: Trace) -> Trace:
        trace = without_cache(trace)
        lives = {life.id: life for life in trace.lives}
        ops, born = list(trace.ops), _births(trace)
        readers, made_again = _readers(trace), list[Life]()
        for begin, end in calls_of(trace, blocks):
            read = {one for op in trace.ops[begin:end] for one in op.reads if one in lives}
            own = [lives[number] for number in read if begin <= lives[number].birth < end]
            saved = [
                life
                for life in own
                if life.category not in MARKED
                and _is_only_saved(life, readers[life.id], trace, end)
            ]
            if not saved:
                continue
            uses = [use for life in saved for use in readers[life.id] if use >= end]
            if not uses:
                continue
            again, over = min(uses), max(uses) + 1
            more = _forward_again(trace, own, saved) - sum(born.get(again, {}).values())
            ops[again] = ops[again]._replace(scratch=max(ops[again].scratch, more))
            for life in saved:
                last = max(use for use in readers[life.id] if use < end)
                lives[life.id] = life._replace(last_use=last, death=last + 1)
                made_again.append(life._replace(birth=again))
            for life in (lives[number] for number in read):
                if life.birth < begin and life.death is not None and life.death < over:
                    lives[life.id] = life._replace(death=over)
        return replace(trace, lives=(*lives.values(), *made_again), ops=tuple(ops))

    return change


def _forward_again(trace: Trace, own: Sequence[Life], saved: Sequence[Life]) -> int:
    """The bytes by which a forward pass that runs again is higher than what it saves: it stops when
    it has made all of that."""
    begin, stop = min(life.birth for life in own), max(life.birth for life in saved) + 1
    highest = 0
    for position in range(begin, stop):
        there = sum(life.bytes for life in own if life.is_alive(position))
        highest = max(highest, there + trace.ops[position].scratch)
    return highest - sum(life.bytes for life in saved)


def _births(trace: Trace) -> dict[int, dict[int, int]]:
    """By position, the bytes of the storages that are made there, by their ids."""
    found: dict[int, dict[int, int]] = {}
    for life in trace.lives:
        found.setdefault(life.birth, {})[life.id] = life.bytes
    return found


def _is_only_saved(life: Life, readers: Sequence[int], trace: Trace, end: int) -> bool:
    """Whether only autograd has a storage after a forward pass: what reads it is a backward pass,
    or it ends in one unread."""
    later = [trace.ops[use].phase for use in readers if use >= end]
    if later:
        return all(phase == BACKWARD for phase in later)
    death = life.death
    return (
        death is not None
        and end < death < len(trace.ops)
        and trace.ops[death - 1].phase == BACKWARD
    )


def calls_of(trace: Trace, blocks: str) -> list[tuple[int, int]]:
    """The positions at which calls of a list's entries begin and end."""
    found, entry = list[tuple[int, int]](), ""
    for position, op in enumerate(trace.ops):
        match = _ENTRY.match(op.module) if op.phase == FORWARD else None
        now = match[2] if match and (match[1] or "") == blocks else ""
        if now and now == entry:
            found[-1] = found[-1][0], position + 1
        elif now:
            found.append((position, position + 1))
        entry = now
    return found


def _readers(trace: Trace) -> dict[int, list[int]]:
    """The positions of the operators that read or make each storage."""
    found: dict[int, list[int]] = {}
    for position, op in enumerate(trace.ops):
        for number in op.reads:
            found.setdefault(number, []).append(position)
    return found


def without_cache(trace: Trace) -> Trace:
    """No cache of keys and values (use_cache=False). A fused attention then reads what the cache
    has copied from. Others make a copy of their own, which ends with its last use."""
    copies, lives = copies_for_caches(trace), {life.id: life for life in trace.lives}
    fused = {one for op in trace.ops if "dot_product" in op.name for one in op.reads}
    for copy, source in copies.items():
        last, own = lives[copy].last_use, lives[source]
        if copy in fused:
            death = None if own.death is None else max(own.death, last + 1)
            lives[source] = own._replace(last_use=max(own.last_use, last), death=death)
            del lives[copy]
        else:
            lives[copy] = lives[copy]._replace(death=last + 1)
    return replace(trace, lives=tuple(lives.values()))


def copies_for_caches(trace: Trace) -> dict[int, int]:
    """The ids of what caches have copied in the forward pass, by the ids of the copies: a cache
    appends it to something that is empty at first."""
    found = dict[int, int]()
    for _, source, copy in _appended(trace):
        found[copy] = found.get(source, source)
    return found


def empty_caches(trace: Trace) -> set[int]:
    """The ids of the empty storages of caches."""
    return {empty for empty, _, _ in _appended(trace)}


def _appended(trace: Trace) -> Iterator[tuple[int, int, int]]:
    lives = {life.id: life for life in trace.lives}
    for position, op in enumerate(trace.ops):
        if op.name.startswith("aten.cat") and op.phase == FORWARD and len(op.reads) == 3:
            empty, source, copy = (lives.get(one) for one in op.reads)
            if empty and source and copy and not empty.bytes and copy.birth == position:
                yield empty.id, source.id, copy.id


def scales_with_batch(trace: Trace) -> set[int]:
    """The ids of the storages of forward and backward passes that are as large as the batch: those
    that are made of inputs, and of which no gradient of a parameter is made. Inputs themselves are
    not among them: parts of a batch are views of it."""
    if trace.scaled is not None:
        return set(trace.scaled)
    made_of = {life.id for life in trace.lives if life.category == INPUTS}
    births = _births(trace)
    elements = {life.id: math.prod(life.shape) for life in trace.lives}
    of_gradients = _parts_of_gradients(trace, elements)
    for position, op in enumerate(trace.ops):
        if not made_of.isdisjoint(op.reads):
            made_of.update(births.get(position, ()))
    beside = _beside_of_passes(trace)
    return {
        life.id
        for life in trace.lives
        if life.id in made_of
        and life.id not in beside
        and life.phase in (FORWARD, BACKWARD)
        and life.category not in MARKED
        and (life.phase == FORWARD or life.id not in of_gradients)
    }


def _parts_of_gradients(trace: Trace, elements: Mapping[int, int]) -> set[int]:
    """The ids of what backward passes make gradients of and is as large as they are, also by
    several sums: a weight that is used twice has two parts of a gradient."""
    gradients = {life.id for life in trace.lives if life.category == GRADIENTS}
    found = set[int]()
    for op in reversed(trace.ops):
        if op.phase == BACKWARD:
            whole = gradients | found if op.name.startswith("aten.add.") else gradients
            sizes = {elements[number] for number in whole.intersection(op.reads)}
            found.update(number for number in op.reads if elements.get(number) in sizes)
    return found


def _beside_of_passes(trace: Trace) -> set[int]:
    """The ids of what is made under no_grad in functions that call the one that calls backward(): a
    rollout, for example, whose parts are not those of a batch."""
    calls = {op.frames[0][::2] for op in trace.ops if op.phase == BACKWARD and op.frames}
    return {
        life.id
        for life in trace.lives
        if life.birth >= 0 and not (op := trace.ops[life.birth]).has_grad
        if calls and calls.isdisjoint(frame[::2] for frame in op.frames)
    }


def _beginnings_of_passes(trace: Trace) -> list[int]:
    """For each position, where the forward pass before it began."""
    found, begin, before = list[int](), 0, ""
    for position, op in enumerate(trace.ops):
        if op.phase == FORWARD and before != FORWARD:
            begin = position
        before = op.phase
        found.append(begin)
    return found


def last_uses_in_backward(trace: Trace) -> dict[int, int]:
    """Of the storages that a backward pass has made, the last use in that pass."""
    births = {life.id: life.birth for life in trace.lives if life.phase == BACKWARD}
    found, pass_began = dict[int, int](), 0
    for position, op in enumerate(trace.ops):
        if op.phase == BACKWARD:
            if position and trace.ops[position - 1].phase != BACKWARD:
                pass_began = position
            found |= {one: position for one in op.reads if births.get(one, -1) >= pass_began}
    return found


def _each(trace: Trace, change: Callable[[Life], Life]) -> Trace:
    return replace(trace, lives=tuple(map(change, trace.lives)))

"""kept, restored: a trace as a short text, by which changes of the program can be replayed when
there is only the record.

    Trace ──► small storages become bytes of no life ──► operators that touch no other are joined
          ──► columns of small numbers ──► zlib ──► text, at most MOST characters

What is left has the same highest moments, to 1/GRAINS of the peak. It has no frames, variables and
names of parameters. The numbers are differences: layers and steps are alike, and what is alike is
short.
"""

from __future__ import annotations

import base64
import bisect
import itertools
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from memtools._base.peak import BACKWARD, BETWEEN, FORWARD, GRADIENTS, INPUTS, OPTIMIZER, PARTS
from memtools._blocks.lifetimes import BEFORE, Life, Op, Trace
from memtools._blocks.replay import empty_caches, entry_of, scales_with_batch

#: characters of a text, which a record keeps beside what else it says of the peak
MOST = 40_000
_PART = 2_000  # A field of a record has fewer characters than a text.
#: Storages are left out that take less than these shares of the peak: more, until the text fits.
LEAST = (1 / 65536, 1 / 4096, 1 / 512)
GRAINS = 1 << 14  # Bytes that are of no life are rounded to this share of the peak.
_PHASES = (BETWEEN, FORWARD, BACKWARD, OPTIMIZER)
_PLAIN_BYTES = 1 << 24  # A text has at most so many before zlib,
_NUMBER = 1 << 62  # and no number that is larger.


def kept(trace: Trace, deaths: Mapping[int, int]) -> tuple[str, ...]:
    """The text of a trace, in parts that fit into fields of a record.

    Args:
        trace: a trace.
        deaths: by the ids of lives, the positions at which a `del` would end them.

    Returns () if it would be longer than MOST.
    """
    for least in LEAST:
        text = _text(*_shortened(trace, deaths, least))
        if len(text) <= MOST:
            return tuple(text[i : i + _PART] for i in range(0, len(text), _PART))
    return ()


def restored(parts: Sequence[str]) -> tuple[Trace, dict[int, int]]:
    """The trace and the deaths of a text in parts. Raises ValueError if it is not one of `kept`."""
    try:
        unzip = zlib.decompressobj()
        data = unzip.decompress(base64.b85decode("".join(parts)), _PLAIN_BYTES)
        if not unzip.eof:
            raise ValueError("it is too long or has no end")
        size = int.from_bytes(data[:4], "little")
        head = json.loads(data[4 : 4 + size])
        return _read(head, _numbers(data[4 + size :]))
    except (ValueError, KeyError, IndexError, TypeError, ArithmeticError, RecursionError,
            zlib.error, StopIteration) as error:  # fmt: skip
        raise ValueError(f"its trace cannot be read: {error}") from None


# --- shorter --------------------------------------------------------------------------------------


def _shortened(
    trace: Trace, deaths: Mapping[int, int], least: float
) -> tuple[Trace, dict[int, int]]:
    """The trace without its small storages, and without operators that touch no other."""
    peak_bytes = trace.peak()[1]
    born = sorted(trace.lives, key=lambda life: life.birth)
    empty = empty_caches(trace)
    large = {
        life.id: life
        for life in born
        if life.bytes >= least * peak_bytes or life.category == INPUTS or life.id in empty
    }
    before = trace.curve()
    lives = replace(trace, lives=tuple(large.values())).curve()
    grain = max(1, peak_bytes // GRAINS)
    # Where an operator begins a group: where a life begins or ends, or a step, or something else.
    begins = {0, *trace.steps, *deaths.values()}
    for life in large.values():
        begins |= {life.birth, life.birth + 1, life.last_use, life.last_use + 1}
        begins.add(len(trace.ops) if life.death is None else life.death)
    ops, starts = list[Op](), list[int]()
    for position, op in enumerate(trace.ops):
        reads = tuple(number for number in op.reads if number in large)
        small = op.others + before[position] - lives[position]
        scratch, others = (grain * round(size / grain) for size in (op.scratch, small))
        now = Op(op.name, op.phase, entry_of(op.module), (), reads, scratch, others)
        is_alone = reads or position in begins or ops[-1].reads
        if is_alone or (now.phase, now.module) != (ops[-1].phase, ops[-1].module):
            ops.append(now)
            starts.append(position)
        elif now.scratch + now.others > ops[-1].scratch + ops[-1].others:
            ops[-1] = now

    def at(position: int) -> int:
        return position if position < 0 else bisect.bisect_right(starts, position) - 1

    def end(position: int) -> int:
        """Of a death: the first group that has no operator at which the storage lived."""
        return bisect.bisect_left(starts, position)

    found, numbers = list[Life](), {number: i for i, number in enumerate(large)}
    gradients = dict[str, str]()
    for life in large.values():
        name = gradients.setdefault(life.name, str(len(gradients))) if life.name else ""
        found.append(
            Life(
                numbers[life.id], life.bytes, at(life.birth), at(life.last_use),
                None if life.death is None else end(life.death),
                life.phase, life.category, name if life.category == GRADIENTS else "",
                life.operator, dtype=life.dtype, shape=life.shape,
            )
        )  # fmt: skip
    renamed = tuple(op._replace(reads=tuple(numbers[one] for one in op.reads)) for op in ops)
    scaled = frozenset(numbers[one] for one in scales_with_batch(trace) if one in numbers)
    steps = tuple(at(one) for one in trace.steps)
    short = Trace(tuple(found), renamed, steps, trace.device, scaled=scaled)
    return short, {numbers[one]: end(at) for one, at in deaths.items() if one in numbers}


# --- text -----------------------------------------------------------------------------------------


class _Table:
    """Values by their numbers, in the order of their first use."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))


def _text(trace: Trace, deaths: Mapping[int, int]) -> str:
    kinds, forms, names, columns = _Table(), _Table(), _Table(), list[int]()
    grain = math.gcd(*(size for op in trace.ops for size in (op.scratch, op.others))) or 1
    before = 0
    for op in trace.ops:
        columns.append(kinds.number((op.name, _PHASES.index(op.phase), op.module)))
        columns += (op.scratch // grain, op.others // grain - before, len(op.reads))
        before = op.others // grain
    births = [life.birth for life in trace.lives]
    for position, op in enumerate(trace.ops):
        newest = bisect.bisect_right(births, position)
        columns += (newest - one for one in op.reads)
    last = BEFORE
    for life in trace.lives:
        is_scaled = trace.scaled is not None and life.id in trace.scaled
        form = (life.bytes, PARTS.index(life.category), life.dtype, life.shape, is_scaled)
        columns += (forms.number(form), life.birth - last, life.last_use - life.birth)
        columns.append(-1 if life.death is None else life.death - life.last_use)
        columns.append(names.number(life.name) if life.name else -1)
        last = life.birth
    for one, at in sorted(deaths.items()):
        columns += (one, at)
    head = {
        "grain": grain, "ops": len(trace.ops), "lives": len(trace.lives), "deaths": len(deaths),
        "steps": trace.steps, "device": trace.device,
        "kinds": list(kinds.numbers), "forms": list(forms.numbers), "names": list(names.numbers),
    }  # fmt: skip
    encoded = json.dumps(head, separators=(",", ":")).encode()
    plain = len(encoded).to_bytes(4, "little") + encoded + bytes(_varints(columns))
    return base64.b85encode(zlib.compress(plain, 9)).decode()


def _varints(numbers: Iterable[int]) -> Iterator[int]:
    """Each number in groups of seven bits, the lowest first; small negative ones are short too."""
    for number in numbers:
        rest = 2 * number if number >= 0 else -2 * number - 1
        while rest > 127:
            yield rest & 127 | 128
            rest >>= 7
        yield rest


def _numbers(data: bytes) -> Iterator[int]:
    value = shift = 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if value >= _NUMBER:
            raise ValueError("a number is too large")
        if byte < 128:
            yield value >> 1 if value % 2 == 0 else -(value + 1 >> 1)
            value = shift = 0


def _read(head: dict[str, Any], numbers: Iterator[int]) -> tuple[Trace, dict[int, int]]:
    grain, count, lives = (_whole(head[key]) for key in ("grain", "ops", "lives"))
    kinds = [
        (str(name), _PHASES[_whole(phase)], str(module)) for name, phase, module in head["kinds"]
    ]
    read = [tuple(itertools.islice(numbers, 4)) for _ in range(min(count, _PLAIN_BYTES))]
    ops, others = list[Op](), 0
    relative = [[next(numbers) for _ in range(_whole(reads))] for *_, reads in read]
    found, birth, scaled = list[Life](), BEFORE, set[int]()
    for number in range(lives):
        form, later, used, death, name = itertools.islice(numbers, 5)
        nbytes, category, dtype, shape, is_scaled = head["forms"][_whole(form)]
        birth += _whole(later)
        last_use = birth + _whole(used)
        if last_use >= count:
            raise ValueError("a storage is used after the end")
        if is_scaled:
            scaled.add(number)
        born = kinds[_whole(read[birth][0])] if birth >= 0 else ("", BETWEEN, "")
        found.append(
            Life(
                number, _whole(nbytes), birth, last_use,
                None if death < 0 else min(last_use + death, count), born[1],
                PARTS[_whole(category)], str(head["names"][name]) if name >= 0 else "", born[0],
                dtype=str(dtype), shape=tuple(map(_whole, shape)),
            )
        )  # fmt: skip
    births = [life.birth for life in found]
    for position, ((kind, scratch, more, _), own) in enumerate(zip(read, relative, strict=True)):
        newest, others = bisect.bisect_right(births, position), others + more
        operator, phase, module = kinds[_whole(kind)]
        reads = tuple(_whole(newest - one, lives) for one in own)
        sizes = _whole(scratch) * grain, _whole(others) * grain
        ops.append(Op(operator, phase, module, (), reads, *sizes))
    deaths = dict[int, int]()
    for _ in range(_whole(head["deaths"])):
        one, at = itertools.islice(numbers, 2)
        deaths[_whole(one, lives)] = _whole(at, count + 1)
    steps: Sequence[int] = head["steps"]
    places = tuple(sorted({0, *(_whole(one, count) for one in steps)}))
    trace = Trace(tuple(found), tuple(ops), places, str(head["device"]), scaled=frozenset(scaled))
    return trace, deaths


def _whole(value: Any, end: int = _NUMBER) -> int:
    if type(value) is not int or not 0 <= value < end:
        raise ValueError(f"a number is not between 0 and {end - 1}")
    return value

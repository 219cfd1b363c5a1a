"""What lived at the peak of a recorded step, and over the step: the blocks of
memtools._core.Blocks, sorted by what they were.

    Blocks.contents() ──► contents_of ──► PeakContents
      bytes, phases of birth and death,      ▲
      operator, shape, site            Tensors (tensors.py): parameters and the like, by name

The life of a block shows what it was: a block that was allocated in the forward pass and freed in
the backward pass was saved for it; one that was allocated in the optimizer's step, and is not its
state, is a temporary of that step. What the program holds longer than the backward pass may have
been saved for it as well: that is not known. Parameters, gradients, state and inputs are known by
their addresses, which were marked while they lived. The core returns blocks and sums of blocks by
the same kinds, so the parts of the peak and the layers of the step agree.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from memtools._base.peak import (
    AFTER,
    BACKWARDS,
    BUFFERS,
    GRADIENTS,
    INPUTS,
    OLDER,
    OPTIMIZERS,
    OTHERS,
    PARAMETERS,
    PARTS,
    PHASES,
    SAVED,
    STATE,
    UNSEEN,
    Large,
    Layer,
    Part,
    PeakContents,
    Saver,
    Span,
)
from memtools._base.place import line_of

if TYPE_CHECKING:
    from memtools import _core

LARGEST = 10  # So many blocks are listed one by one.
SAVERS = 5  # So many modules or functions are listed.
OF_A_TEXT = 160  # A name has up to so many characters.
PARAMETER, GRADIENT, OF_STATE, INPUT, BUFFER = 1, 2, 3, 4, 5  # categories of Blocks.mark
BEFORE, FORWARD, BACKWARD, OPTIMIZER = range(4)  # phases of births; death 0: the block lives
FREED, OUTLIVED = 1, 2  # what backward passes did to a block
_MARKED = {PARAMETER: PARAMETERS, GRADIENT: GRADIENTS, OF_STATE: STATE, INPUT: INPUTS,
           BUFFER: BUFFERS}  # fmt: skip
#: operators that take logits, and what their backward passes are called
_OF_LOGITS = re.compile(r"log_?softmax|cross_?entropy|nll_?loss", re.IGNORECASE)
CLASSES = 256  # Logits of fewer classes are small beside what leads to them.

# (bytes, category, birth phase, death phase, what backward passes did, operator, module, site,
# dtype, shape)
Block = tuple[int, int, int, int, int, str, str, int, str, tuple[int, ...] | None]
# (bytes, category, birth phase, what backward passes did, has a shape, how many blocks)
Rest = tuple[int, int, int, int, bool, int]
# (order, phase, bytes)
Interval = tuple[int, int, int]
# (category, birth phase, what backward passes did, has a shape, bytes of each interval)
OfKind = tuple[int, int, int, bool, tuple[int, ...]]


class Marked(NamedTuple):
    """A storage of the program that was marked: where it was, its category, and what it is."""

    address: int
    category: int
    bytes: int
    dtype: str
    shape: tuple[int, ...]
    name: str


class Spot(NamedTuple):
    """A place of the program: its line in words, and the function; "" if unknown."""

    line: str
    function: str


class _Seen(NamedTuple):
    """A block at the peak, with what it was."""

    block: Block
    address: int  # 0 for one that has died
    what: str
    spot: Spot


def contents_of(
    found: _core.Contents,
    marked: Iterable[Marked],
    spot_of: Callable[[int], Spot],
    step: int,
    ms: float = 0.0,
    library: Container[str] = (),
) -> PeakContents:
    """Return what lived at the peak of a recording.

    Args:
        found: the result of memtools._core.Blocks.contents().
        marked: the storages that were marked, each once.
        spot_of: returns the place of a site.
        step: the number of the step that was recorded.
        ms: the milliseconds that memtools took at both ends of the step.
        library: names of torch's own classes of modules. What they save is listed under the
            function that calls them. Empty, the default: there are none.
    """
    names = _Names(marked)
    spots: dict[int, Spot] = {}
    seen = []
    for block, address in zip(found.blocks, found.addresses, strict=True):
        if block[7] not in spots:
            spots[block[7]] = spot_of(block[7])
        seen.append(_Seen(block, address, _what_of(block), spots[block[7]]))
    return PeakContents(
        step=step,
        peak_bytes=found.peak_bytes,
        base_bytes=found.base_bytes,
        phase=PHASES[found.phase],
        operator=found.operator[:OF_A_TEXT],
        line=spot_of(found.site).line[:OF_A_TEXT],
        backward=found.backward,
        parts=_parts(found, seen),
        saved=_savers(seen, library),
        largest=_largest(seen, names),
        logits_bytes=_logits_bytes(seen),
        repeats=_repeats(seen, names, with_backward=found.backward),
        old_gradients_bytes=sum(
            one.block[0] for one in seen if one.what == GRADIENTS and one.block[2] == BEFORE
        ),
        lost=found.lost,
        ms=round(ms, 3),
        layers=_layers(found),
        spans=_spans(found),
    )


# --- what a block was -----------------------------------------------------------------------------


def _what_of(block: Block) -> str:
    return _what(block[1], block[2], block[4], block[9] is not None)


def _what(category: int, birth: int, backward: int, has_shape: bool) -> str:
    if category in _MARKED:
        return _MARKED[category]
    if birth == BEFORE:
        return OLDER
    if birth == OPTIMIZER:
        return OPTIMIZERS
    if backward == FREED:
        return SAVED
    if backward == OUTLIVED:
        return AFTER
    if not has_shape:
        return UNSEEN
    return BACKWARDS if birth == BACKWARD else OTHERS


def _parts(found: _core.Contents, seen: Sequence[_Seen]) -> tuple[Part, ...]:
    size, count = Counter[str](), Counter[str]()
    for one in seen:
        size[one.what] += one.block[0]
        count[one.what] += 1
    for nbytes, category, birth, backward, has_shape, blocks in found.rest:
        what = _what(category, birth, backward, has_shape)
        size[what] += nbytes
        count[what] += blocks
    return tuple(Part(what, nbytes, count[what]) for what, nbytes in size.most_common() if nbytes)


def _layers(found: _core.Contents) -> tuple[Layer, ...]:
    sums: dict[str, list[int]] = {}
    for category, birth, backward, has_shape, each in found.layers:
        what = _what(category, birth, backward, has_shape)
        sums[what] = list(map(operator.add, sums.get(what, [0] * len(each)), each))
    return tuple(
        Layer(what, tuple(map(operator.sub, sums[what], [0, *sums[what]])))
        for what in PARTS
        if what in sums
    )


def _spans(found: _core.Contents) -> tuple[Span, ...]:
    phases = itertools.groupby(phase for _, phase, _ in found.intervals)
    return tuple(Span(PHASES[phase], len(list(same))) for phase, same in phases)


def _savers(seen: Sequence[_Seen], library: Container[str]) -> tuple[Saver, ...]:
    """By module if it is known, else by function, each with the line that saves most."""
    size, count = Counter[str](), Counter[str]()
    lines: dict[str, Counter[str]] = {}
    for one in seen:
        if one.what == SAVED:
            path = one.block[6]
            is_torchs = path.rpartition(".")[2] in library
            who = (not is_torchs and path) or one.spot.function or one.spot.line or path
            size[who] += one.block[0]
            count[who] += 1
            lines.setdefault(who, Counter())[one.spot.line] += one.block[0]
    found = []
    for who, nbytes in size.most_common(SAVERS):
        line = line_of(lines[who].most_common(1)[0][0])
        where = f"{who} ({line})" if line and not who.startswith(line) else line_of(who)
        found.append(Saver(where[:OF_A_TEXT], nbytes, count[who]))
    return tuple(found)


# --- names ----------------------------------------------------------------------------------------


class _Names:
    """Finds what was marked: by address for a block that lives, else by category and size."""

    def __init__(self, marked: Iterable[Marked]) -> None:
        self._found: dict[tuple[int, int], list[Marked]] = {}
        self._at: dict[tuple[int, int], Marked] = {}
        for one in marked:
            self._at.setdefault((one.address, one.category), one)
            alike = self._found.setdefault((one.category, one.bytes), [])
            if all(other.name != one.name for other in alike) or not one.name:
                alike.append(one)

    def most_alike(self) -> int:
        """The largest number of parameters of one size, at least 1: a network of so many layers
        runs the same line so often."""
        sizes = (len(alike) for key, alike in self._found.items() if key[0] == PARAMETER)
        return max(sizes, default=1)

    def of(self, seen: _Seen, number: int, count: int) -> tuple[str, Marked | None]:
        """The name of a block, and a marked storage like it.

        Args:
            seen: the block.
            number: its number among those of its kind and size, from 0.
            count: how many of its kind and size lived at the peak.
        """
        block = seen.block
        itself = self._at.get((seen.address, block[1]))
        if itself is not None and itself.bytes == block[0]:
            return itself.name, itself
        alike = self._found.get((block[1], block[0]), [])
        if not alike and seen.what == GRADIENTS:
            alike = self._found.get((PARAMETER, block[0]), [])
        if not alike:
            return "", None
        if len(alike) == count:  # All of them lived, so the order does not matter.
            return alike[number].name, alike[number]
        name = alike[0].name
        return f"{name} or one like it" if name and len(alike) > 1 else name, alike[0]


def _largest(seen: Sequence[_Seen], names: _Names) -> tuple[Large, ...]:
    counts = Counter((one.what, one.block[0]) for one in seen)
    numbers, found = Counter[tuple[str, int]](), []
    for one in sorted(seen, key=lambda one: -one.block[0])[:LARGEST]:
        key = one.what, one.block[0]
        name, like = names.of(one, numbers[key], counts[key])
        numbers[key] += 1
        dtype, shape = one.block[8], one.block[9]
        if shape is None and like is not None:
            dtype, shape = like.dtype, like.shape
        found.append(
            Large(
                one.block[0],
                one.what,
                dtype,
                tuple(shape or ()),
                name[:OF_A_TEXT],
                one.block[5][:OF_A_TEXT],
                one.spot.line[:OF_A_TEXT],
            )
        )
    return tuple(found)


# --- what the advice needs ------------------------------------------------------------------------


def _logits_bytes(seen: Sequence[_Seen]) -> int:
    """Bytes of all blocks with as many elements and classes as one of a cross entropy."""
    shapes = {
        (_elements(one.block[9]), one.block[9][-1])
        for one in seen
        if one.block[9] and one.block[9][-1] >= CLASSES and _OF_LOGITS.search(one.block[5])
    }
    return sum(
        one.block[0]
        for one in seen
        if one.block[9]
        and one.what in (SAVED, AFTER, BACKWARDS, OTHERS)
        and (_elements(one.block[9]), one.block[9][-1]) in shapes
    )


def _elements(shape: tuple[int, ...]) -> int:
    elements = 1
    for size in shape:
        elements *= size
    return elements


def _repeats(seen: Sequence[_Seen], names: _Names, *, with_backward: bool) -> int:
    what = OTHERS
    if with_backward:
        what = max((SAVED, AFTER), key=lambda w: sum(s.block[0] for s in seen if s.what == w))
    groups, sizes = Counter[tuple[int, str, int]](), Counter[tuple[int, str, int]]()
    for one in seen:
        if one.what == what:
            key = one.block[7], one.block[5], one.block[0]
            groups[key] += 1
            sizes[key] += one.block[0]
    if not sizes:
        return 1
    return max(1, groups[sizes.most_common(1)[0][0]] // names.most_alike())

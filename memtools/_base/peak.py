"""PeakContents: what lived when a step's tensors took most memory, and over the step, as one part
of memtools finds it and others write, read and show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from memtools._base.size import format_bytes

PARAMETERS = "parameters"
BUFFERS = "buffers"
GRADIENTS = "gradients"
STATE = "optimizer state"
OPTIMIZERS = "optimizer's temporaries"
SAVED = "saved for backward"
INPUTS = "inputs"
AFTER = "alive after backward"
BACKWARDS = "backward's temporaries"
OTHERS = "other temporaries"
OLDER = "older than the step"
UNSEEN = "not seen"
#: The kinds of blocks. `SAVED`: a backward pass has freed what the forward pass made. `AFTER`: none
#: has, so the program holds it, and may have saved it, too. `OLDER`: the block existed before the
#: step, and is of no other kind. `UNSEEN`: no tensor has shown what it is; an operator has used it
#: internally.
PARTS = (PARAMETERS, BUFFERS, GRADIENTS, STATE, OPTIMIZERS, SAVED, INPUTS, AFTER, BACKWARDS, OTHERS,
         OLDER, UNSEEN)  # fmt: skip

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
BETWEEN = "between"  # of a traced step, outside of the others: data, zero_grad, what is logged
#: The phases of a step by their numbers in memtools._core.Contents; everything that is neither
#: backward nor optimizer is the forward pass.
PHASES = ("", FORWARD, BACKWARD, OPTIMIZER)


def in_phase(phase: str) -> str:
    """`in the optimizer's step`, `in the backward pass` or `between the passes`."""
    if phase == BETWEEN:
        return "between the passes"
    return "in the optimizer's step" if phase == OPTIMIZER else f"in the {phase} pass"


class Part(NamedTuple):
    """Blocks of one category."""

    #: such as "gradients"
    what: str
    #: of these blocks
    bytes: int
    #: their number
    blocks: int


class Saver(NamedTuple):
    """Who has saved for the backward pass: a module, or a function with the line that saves most;
    the bytes and how many blocks they were."""

    where: str
    bytes: int
    blocks: int


class Large(NamedTuple):
    """One block: `what` it was, one of PARTS; `name` is that of the parameter, or of what belongs
    to one. "" and an empty shape are what is not known."""

    bytes: int
    what: str
    dtype: str
    shape: tuple[int, ...]
    name: str
    operator: str
    line: str


INTERVALS = 128  # A step is divided into at most this many intervals.


class Layer(NamedTuple):
    """All blocks that were the same, one of PARTS, over a step: its bytes in each interval of the
    step, as the difference to the interval before; the first difference is to 0."""

    what: str
    changes: tuple[int, ...]


class Span(NamedTuple):
    """The number of successive intervals of a step in one of PHASES. "": nothing was allocated, or
    what came after the optimizer's step released memory."""

    phase: str
    intervals: int


class Held(NamedTuple):
    """What was held in vain at a peak: the variable, as in "old" or "out.logits", its bytes, and
    the line that made it, such as "train.py:23"."""

    name: str
    bytes: int
    line: str


class Remedy(NamedTuple):
    """What to write, such as "del old, logits", and the place: "before loss.backward()
    (train.py:27)"."""

    text: str
    place: str


class Lowered(NamedTuple):
    """A change of the program that lowers the peak of a step."""

    #: such as "an optimizer with fused=True"
    change: str
    #: the new peak
    peak_bytes: int
    #: for `memtools explain --with`, such as "fused"
    name: str = ""
    #: of the new peak, such as "backward"
    phase: str = ""
    #: of the program, at the new peak
    line: str = ""
    #: milliseconds per step of operators that run twice, if known
    again_ms: float = 0.0

    def where(self) -> str:
        """Return the phase and the line of the new peak."""
        if not self.phase:
            return ""
        return f"{in_phase(self.phase)} ({self.line})" if self.line else in_phase(self.phase)

    def text(self) -> str:
        """Return the change and its cost in time."""
        again = f" (about {self.again_ms:,.3g} ms a step)" if self.again_ms else ""
        return f"{self.change}{again}"


class TracedPeak(NamedTuple):
    """What two traced steps say of the peak of the second one. What nothing reads after that moment
    is held in vain.

    Attributes:
        peak_bytes: of the storages that operators touched.
        bytes: what of these was held in vain, and the program can let go.
        lowered_bytes: the peak with the remedies.
        held: the variables, the most bytes first.
        remedies: what to write.
        changes: those that lower the peak, the one that does most first.
        why: why the steps were not traced, in words; "" if they were.
        kept: parts of the text of the trace, by which changes can be replayed together; () if it is
            too long for a record.
        step: the number of the second step; 0 if it has none.
    """

    peak_bytes: int = 0
    bytes: int = 0
    lowered_bytes: int = 0
    held: tuple[Held, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    changes: tuple[Lowered, ...] = ()
    why: str = ""
    kept: tuple[str, ...] = ()
    step: int = 0

    def to_write(self) -> str:
        """`"del old, logits" before loss.backward() (train.py:27)`: the remedies; "" for none."""
        return " and ".join(f'"{one.text}" {one.place}' for one in self.remedies)

    def found(self) -> str:
        """`two steps after it were traced: 4 changes make it smaller`, in a few words."""
        if self.why:
            return f"the steps after it were not traced: {self.why}"
        make = "change makes" if len(self.changes) == 1 else "changes make"
        return f"two steps after it were traced: {len(self.changes) or 'no'} {make} it smaller"

    def sentence(self) -> str:
        """`at the peak 62.5 of 276.5 MiB are held though nothing reads them again: old
        (train.py:23), logits (train.py:24); "del old, logits" before loss.backward()
        (train.py:27) makes the peak 214.0 MiB`; "" if nothing is."""
        if not self.held:
            return ""
        total, part = format_bytes(self.peak_bytes), format_bytes(self.bytes)
        if total.rpartition(" ")[2] == part.rpartition(" ")[2]:
            part = part.rpartition(" ")[0]
        names = ", ".join(f"{one.name} ({one.line})" for one in self.held)
        make = "makes" if len(self.remedies) == 1 else "make"
        return (
            f"at the peak {part} of {total} are held though nothing reads them again: {names}; "
            f"{self.to_write()} {make} the peak {format_bytes(self.lowered_bytes)}"
        )


@dataclass(frozen=True)
class PeakContents:
    """What lived at the peak of a step, by torch's own reports on the host.

    Attributes:
        step: its number.
        peak_bytes: of all tensors, those from before the reports too where they are known.
        base_bytes: when the step began.
        phase: of the moment: one of PHASES.
        operator: the innermost at that moment, such as "aten::_foreach_sqrt"; "" for none.
        line: of the program at that moment, such as "train.py:31 in main"; "" where unknown.
        backward: whether there was a backward pass in the step.
        parts: what there was, the most first.
        saved: who has saved for the backward pass, the most first, a few of them.
        largest: the largest blocks, ten at most.
        logits_bytes: of blocks that are as large as what a log_softmax or a cross entropy takes.
        repeats: how many times as often as there are layers the line has run that makes most of
            what is saved, or of what is alive after backward where that is more; 1 for a network
            that is run once.
        old_gradients_bytes: gradients of the step before that still lived.
        lost: blocks that found no room in the recording: then it is not complete.
        ms: what memtools itself did for it at the two ends of the step, in milliseconds.
        layers: what there was over the step, in the order of PARTS: of up to INTERVALS parts of it
            the bytes at the moment when most was in use. At the highest of them, `parts`.
        spans: the phases of these intervals, from the step's beginning to its end.
        traced: what the two steps after it, which are traced, say; None if that is not known yet.
        of: the phase whose own steps these are, such as "evaluate"; "" for the steps of the run.
        trainer: the class of the library's trainer that made the step, of those whose options are
            known; "" for a loop of the program's own.
    """

    step: int
    peak_bytes: int
    base_bytes: int = 0
    phase: str = ""
    operator: str = ""
    line: str = ""
    backward: bool = False
    parts: tuple[Part, ...] = ()
    saved: tuple[Saver, ...] = ()
    largest: tuple[Large, ...] = ()
    logits_bytes: int = 0
    repeats: int = 1
    old_gradients_bytes: int = 0
    lost: int = 0
    ms: float = 0.0
    layers: tuple[Layer, ...] = ()
    spans: tuple[Span, ...] = ()
    traced: TracedPeak | None = None
    of: str = ""
    trainer: str = ""

    def bytes_of(self, what: str) -> int:
        """Bytes of one of PARTS."""
        return sum(part.bytes for part in self.parts if part.what == what)

"""Trace: the life of every storage over some steps, in the order of torch's operators.

    position       0     1     2     3     4     5     6     7
    phase        between | forward         | backward  | optimizer
                               ┌───────────────────┐ . . . death: nothing refers to it
    logits                     ■ . . . . ■         │       of these it is held in vain
                            birth    last use      │
    peak()                                   ▲ the highest sum of what is alive

Why: a profile of allocations knows births and deaths. With the last use it is also known what was
held although nothing read it again, and what the peak would be after a change of the program,
by arithmetic on the same list (replay.py).

Tracer fills it. It is a dispatch mode of torch for a few steps, real ones or, unchanged, under
FakeTensorMode: it identifies a storage by its `_cdata` while a weak reference to it lives, and
never looks at memory. It knows modules, with their parameters, and optimizers, with gradients and
state, by the frames of their calls: hooks would show in the program's tracebacks, and the end of a
trace may come in a hook of a step, which must not change hooks. What else there is, the caller
marks.

Storages that no operator has touched have no life in it, nor has what a kernel allocates for
itself. Where torch's host allocator reports (memtools._core.Blocks), their bytes are known.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import operator
import sys
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import Any, NamedTuple

from memtools import _core
from memtools._base import torch as bridge
from memtools._base.libraries import is_torchs, library_paths
from memtools._base.peak import (
    AFTER,
    BACKWARD,
    BACKWARDS,
    BETWEEN,
    BUFFERS,
    FORWARD,
    GRADIENTS,
    INPUTS,
    OLDER,
    OPTIMIZER,
    OPTIMIZERS,
    OTHERS,
    PARAMETERS,
    SAVED,
    STATE,
)
from memtools._base.trainers import is_entry
from memtools._blocks.dispatch import Frame, Operators, flat, frame_of, is_of_a_library
from memtools._blocks.variables import Variable, holding

BEFORE = -1  # the birth of a storage that is older than the trace
NEAR = 0.999  # Variables are looked for from this share of the peak of the steps before on,
HIGHER = 1.002  # and again if it is so many times as high.
FRAMES = 12  # An operator has up to so many frames of the user's code, the innermost first.
#: whose the code of a frame is; an entry is the method by which the user has entered a trainer
_USER, _ENTRY, _TORCHS, _LIBRARY = "user", "entry", "torch", "library"
#: what a program marks, or a module or an optimizer has
MARKED = (PARAMETERS, BUFFERS, GRADIENTS, STATE, INPUTS)


class Op(NamedTuple):
    """An operator that ran.

    Attributes:
        name: such as "aten.mm.default".
        phase: FORWARD, BACKWARD, OPTIMIZER or BETWEEN.
        module: the path of the innermost module whose call it belongs to, from the outermost one
            that was called: "blocks.0.attention"; the class of that one itself; "" for none.
        frames: of the user's code, the innermost first; of a library's where there is none.
        reads: the ids of the storages of its arguments and results.
        scratch: bytes that its kernel had in use for itself; 0 where that is not known.
        others: bytes in use that are of no life of the trace; 0 where that is not known.
        has_grad: whether autograd was on.
        ns: nanoseconds that it took.
    """

    name: str
    phase: str
    module: str
    frames: tuple[Frame, ...]
    reads: tuple[int, ...]
    scratch: int = 0
    others: int = 0
    has_grad: bool = True
    ns: int = 0


class Life(NamedTuple):
    """The life of a storage. Positions are indices of Trace.ops.

    Attributes:
        id: its number in the trace, in the order of births.
        bytes: of the storage, all views together.
        birth: the operator that made it; BEFORE if it is older than the trace.
        last_use: the last operator that had it as an argument or a result; `birth` for none.
        death: the first operator that ran without it, `len(ops)` if it died after the last one;
            None if it was alive when the trace ended.
        phase: of its birth; BETWEEN for one that no operator of the trace has made.
        category: one of memtools._base.peak.PARTS.
        name: of the parameter, buffer or state, or of the parameter of a gradient; "" for others.
        operator, module, made: of its birth, as in Op; "", "" and () for one that no operator of
            the trace has made.
        used: the frames of its last use.
        dtype, shape: of the first tensor that showed it.
    """

    id: int
    bytes: int
    birth: int
    last_use: int
    death: int | None
    phase: str
    category: str
    name: str = ""
    operator: str = ""
    module: str = ""
    made: tuple[Frame, ...] = ()
    used: tuple[Frame, ...] = ()
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def is_alive(self, position: int) -> bool:
        """Whether it exists while the operator at this position runs."""
        return self.birth <= position and (self.death is None or position < self.death)


@dataclass(frozen=True)
class Trace:
    """The lives of all storages that operators touched, in the order of their births.

    Attributes:
        lives: one for each storage.
        ops: the operators that ran.
        steps: the positions at which the traced steps begin; the first is 0.
        device: the type of the device whose storages these are.
        variables: the variables that hold a storage at the peak, and nothing else does, by the id
            of its life; () for one that something else holds too; of what was looked for.
        scaled: the ids of what takes half with half of a batch, of a trace that has no small
            storages; None: that follows from the operators.
    """

    lives: tuple[Life, ...]
    ops: tuple[Op, ...] = field(repr=False)
    steps: tuple[int, ...] = (0,)
    device: str = "cpu"
    variables: Mapping[int, Sequence[Variable]] = field(default_factory=dict, repr=False)
    scaled: frozenset[int] | None = field(default=None, repr=False)

    def curve(self) -> list[int]:
        """The bytes that are in use while each operator runs."""
        end = len(self.ops)
        changes = [0] * (end + 1)
        for life in self.lives:
            changes[min(max(life.birth, 0), end)] += life.bytes
            changes[end if life.death is None else min(life.death, end)] -= life.bytes
        lives = itertools.accumulate(changes[:end])
        return [size + op.scratch + op.others for size, op in zip(lives, self.ops, strict=True)]

    def peak(self, first: int = 0, end: int | None = None) -> tuple[int, int]:
        """(position, bytes) of the first highest point among operators `first` to `end`, which is
        not included; (first, 0) if there are none."""
        curve = self.curve()[first:end]
        highest = max(curve, default=0)
        return (first + curve.index(highest) if curve else first), highest

    def at(self, position: int) -> list[Life]:
        """What is alive while the operator at this position runs, the largest first."""
        return sorted(
            (life for life in self.lives if life.is_alive(position)), key=lambda one: -one.bytes
        )

    def phases(self) -> list[tuple[str, int]]:
        """(phase, the position at which it begins) of successive phases."""
        found = list[tuple[str, int]]()
        for position, op in enumerate(self.ops):
            if not found or found[-1][0] != op.phase:
                found.append((op.phase, position))
        return found


class _Storage:
    """What is known of a storage while the trace goes on."""

    __slots__ = (
        "birth", "bytes", "category", "death", "dtype", "id", "is_freed_in_backward", "is_made",
        "last_use", "name", "shape",
    )  # fmt: skip

    def __init__(self, number: int, nbytes: int, birth: int, tensor: Any, *, is_made: bool) -> None:
        self.is_made = is_made  # by an operator of the trace
        self.id, self.bytes, self.birth, self.last_use = number, nbytes, birth, birth
        self.death: int | None = None
        self.is_freed_in_backward = False
        self.category = self.name = ""
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.shape = tuple(int(size) for size in tensor.shape)


class Tracer:
    """Traces the operators of the thread that begins it, with their backward passes.

        with Tracer() as tracer:
            step()
            tracer.step_ended(look=True)  # at the peak of the next one, who holds what?
            step()
        trace = tracer.trace()

    It changes no result, and leaves nothing on. `begin` and `end` may be called in place of `with`;
    what was traced is the same if `end` comes late or on another thread.

    Args:
        libraries: prefixes of paths whose files are not the user's code.
        device: the type of the device whose storages are counted. Fake tensors count as of the
            device that they claim to be on.
        blocks: the reports of torch's host allocator, which are on; None, the default: what is in
            use beside the lives is not known.
        most: the trace is over after so many operators.
        until: or at this time of time.monotonic().
    """

    def __init__(
        self,
        libraries: Sequence[str] = (),
        device: str = "cpu",
        blocks: _core.Blocks | None = None,
        most: int = sys.maxsize,
        until: float = math.inf,
    ) -> None:
        self.device = device
        #: whether it notes nothing more, because it took too long
        self.is_over = False
        self._most, self._until = most, until
        self._blocks = blocks
        self._in_use: list[int] = []  # after each operator, by these reports
        self._libraries = (*library_paths(), *libraries, "<")
        self._operators = Operators(self._ran)
        self._is_on = False
        self._storages: list[_Storage] = []
        self._living: dict[int, tuple[_Storage, Any]] = {}  # by _cdata; with a weak reference
        self._ops: list[Op] = []
        self._steps = [0]
        self._alive = 0  # bytes
        self._summed: list[tuple[int, int, int]] = []  # (position, first operand, sum)
        self._look_at: float | None = None  # from so many bytes on variables are looked for
        self._variables: dict[int, Sequence[Variable]] = {}
        self._phase = BETWEEN
        self._step_code: CodeType | None = None  # of what calls an optimizer's step()
        self._optimizers: dict[int, weakref.ref[Any]] = {}  # that have acted, by id
        self._call_code: CodeType | None = None  # of what calls a module's forward()
        self._paths: dict[int, str] = {}  # of known modules, by id
        self._known: list[weakref.ref[Any]] = []  # known modules, so that ids are not used again
        self._parameters: list[tuple[str, weakref.ref[Any]]] = []
        self._sites: dict[tuple[Frame, ...], tuple[Frame, ...]] = {}
        self._name_of = functools.cache(str)  # of an operator
        # Of the code of frames, by its id: equal code may be of two files.
        self._kinds: dict[int, tuple[CodeType, str]] = {}

    def __enter__(self) -> Tracer:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self) -> None:
        """Begin on this thread. Raises ImportError without torch."""
        torch = bridge.connect().torch
        self._call_code = torch.nn.Module.__call__.__code__
        constants = torch.optim.Optimizer.profile_hook_step.__code__.co_consts
        self._step_code = next((one for one in constants if isinstance(one, CodeType)), None)
        if self._blocks is not None:
            self._blocks.highest()
        self._is_on = True
        self._operators.begin()

    def end(self) -> None:
        """End. May be called twice."""
        if self._is_on:
            self._mark_gradients()
            self._mark_state()
        self._is_on = False
        self._operators.end()

    def step_ended(self, *, look: bool = False) -> None:
        """A step has ended; the next operator belongs to the next one.

        Args:
            look: whether to look for the variables that hold storages at the next step's peak.
        """
        self._mark_gradients()
        self._mark_state()
        self._phase = BETWEEN if self._phase == FORWARD else self._phase
        self._look_at = NEAR * self.trace().peak()[1] if look else None
        self._steps.append(len(self._ops))

    def mark(self, category: str, tensors: Iterable[tuple[str, Any]]) -> None:
        """Say what tensors are.

        Args:
            category: one of MARKED.
            tensors: (name, tensor). They may be older than the trace; then they count from its
                beginning, also if no operator touches them.
        """
        for name, tensor in tensors:
            found = self._storage_of(tensor, is_older=True)
            if found is not None and found.category in ("", category) and not found.name:
                found.category, found.name = category, name

    def trace(self) -> Trace:
        """What was traced so far."""
        ops, storages, in_use = tuple(self._ops), list(self._storages), list(self._in_use)
        # Without a dispatch mode autograd adds to a gradient that nothing else has in place.
        replaced = dict[int, int]()
        for position, first, total in self._summed:
            one = storages[first]
            if one.death == position + 1 and one.bytes == storages[total].bytes:
                replaced[first] = position
                if position < len(in_use):
                    in_use[position] -= one.bytes
        steps = tuple(step for step in self._steps if step < len(ops)) or (0,)
        in_passes = set[int]()  # read by a forward or backward pass
        for op in ops:
            if op.phase in (FORWARD, BACKWARD):
                in_passes.update(op.reads)
        begins = [at for phase, at in Trace((), ops).phases() if phase == BACKWARD]
        lives, end = [], len(ops) + 1
        for one in storages:
            born = ops[one.birth] if one.is_made and one.birth < len(ops) else None
            last = ops[one.last_use] if 0 <= one.last_use < len(ops) else None
            phase = BETWEEN if born is None else born.phase
            lives.append(
                Life(
                    one.id,
                    one.bytes,
                    one.birth,
                    min(one.last_use, replaced.get(one.id, end) - 1),
                    replaced.get(one.id, one.death),
                    phase,
                    one.category or _category(phase, one, begins, one.id in in_passes),
                    one.name,
                    "" if born is None else born.name,
                    "" if born is None else born.module,
                    () if born is None else born.frames,
                    () if last is None else last.frames,
                    one.dtype,
                    one.shape,
                )
            )
        variables = dict(self._variables)
        found = Trace(tuple(lives), ops, steps, self.device, variables)
        if len(in_use) != len(ops):
            return found
        scratches = (op.scratch for op in ops)
        beside = map(operator.sub, map(operator.add, in_use, scratches), found.curve())
        return replace(
            found,
            ops=tuple(
                op._replace(others=max(size, 0)) for op, size in zip(ops, beside, strict=True)
            ),
        )

    # --- operators ---

    def _ran(
        self, func: Any, arguments: Iterable[Any], result: Any, frame: FrameType | None
    ) -> None:
        torch, position = bridge.connect().torch, len(self._ops)
        if position % 64 == 0 and (position >= self._most or time.monotonic() > self._until):
            self.is_over = True  # Within an operator the dispatch mode cannot be left.
        if self.is_over:
            return
        reads = dict[int, None]()  # in their order, each once
        has_gradient = False
        for value in flat(arguments):
            if isinstance(value, torch.Tensor):
                found = self._storage_of(value, is_older=True)
                if found is not None:
                    found.last_use = position
                    reads[found.id] = None
                has_gradient = has_gradient or value.requires_grad
        known = len(self._storages)
        is_new = False  # and may have a gradient
        for value in flat((result,)):
            if isinstance(value, torch.Tensor):
                found = self._storage_of(value, is_older=False)
                if found is not None:
                    found.last_use = position
                    reads[found.id] = None
                    can_have_gradient = value.is_floating_point() or value.is_complex()
                    is_new = is_new or (found.id >= known and can_have_gradient)
        frames, called, stepping = self._frames_of(frame)
        if stepping is not None and self._phase != OPTIMIZER:
            self._step_begins(stepping)
        module = self._path_of(called)
        is_passed_on = has_gradient and is_new
        before, self._phase = (
            self._phase,
            self._phase_now(torch, stepping is not None, bool(module), is_passed_on),
        )
        if before == BACKWARD != self._phase:
            self._mark_gradients()  # Without an optimizer they may end before the step does.
        if self._phase == BACKWARD and len(reads) == 3 and _is_sum_of_gradients(func, frame):
            first = next(one for one in flat(arguments) if isinstance(one, torch.Tensor))
            if not first._is_view():  # Its base has the storage, too.
                numbers = list(reads)
                self._summed.append((position, numbers[0], numbers[2]))
        # A storage that dies from here on has died after this operator.
        scratch = self._read_in_use()
        has_grad = torch.is_grad_enabled()
        self._ops.append(
            Op(
                self._name_of(func),
                self._phase,
                module,
                frames,
                tuple(reads),
                scratch,
                has_grad=has_grad,
                ns=self._operators.took_ns,
            )
        )
        if self._look_at is not None:
            # Reports that began late do not know older storages.
            now = max((self._alive, *self._in_use[-1:])) + scratch
            if now >= self._look_at:
                self._look_at = HIGHER * now
                self._look(frame)

    def _read_in_use(self) -> int:
        """Note the bytes in use after an operator; return its scratch."""
        if self._blocks is None or not self._blocks.is_on:
            return 0
        highest, in_use = self._blocks.highest()
        # Otherwise the highest point was at the end of the operator before.
        scratch = highest - in_use if self._in_use and highest > self._in_use[-1] else 0
        self._in_use.append(in_use)
        return scratch

    def _phase_now(
        self, torch: Any, is_stepping: bool, is_in_module: bool, is_passed_on: bool
    ) -> str:
        """The phase of an operator; `is_passed_on`: whether its new result is one of an argument
        that requires a gradient, unlike that of `loss.item()` and `loss.detach()`."""
        if torch._C._current_graph_task_id() != -1:
            return BACKWARD
        if is_stepping:
            return OPTIMIZER
        # A loss is computed in the forward pass too, after the calls of modules.
        is_forward = is_in_module or self._phase == FORWARD
        is_forward = is_forward or (is_passed_on and torch.is_grad_enabled())
        return FORWARD if is_forward else BETWEEN

    def _storage_of(self, tensor: Any, *, is_older: bool) -> _Storage | None:
        """The storage of a tensor, which is noted if it is not known yet: as made by this operator,
        or as older than the step."""
        try:
            if tensor.device.type != self.device:
                return None
            storage = tensor.untyped_storage()
            key, nbytes = storage._cdata, int(storage.nbytes())
        except Exception:  # sparse, nested, of a functional transform; symbolic sizes
            return None
        position, known = len(self._ops), self._living.get(key)
        if known is not None:
            found = known[0]
            if nbytes > found.bytes:  # It was resized.
                self._alive += nbytes - found.bytes
                found.birth = position if found.bytes == 0 and found.birth >= 0 else found.birth
                found.bytes = nbytes
            return found
        # What no operator has made counts from its first use in later steps.
        birth = BEFORE if is_older and len(self._steps) == 1 else position
        found = _Storage(len(self._storages), nbytes, birth, tensor, is_made=not is_older)
        if is_older and tensor.requires_grad and tensor.is_leaf:
            found.category = PARAMETERS
            self._parameters.append(("", weakref.ref(tensor)))
        living, ops, tracer = self._living, self._ops, weakref.ref(self)
        in_backward = bridge.connect().torch._C._current_graph_task_id

        def died(_: object) -> None:
            living.pop(key, None)
            found.death = len(ops)
            found.is_freed_in_backward = in_backward() != -1
            if (one := tracer()) is not None:
                one._alive -= found.bytes

        self._alive += nbytes
        self._living[key] = found, weakref.ref(storage, died)
        self._storages.append(found)
        return found

    def _frames_of(
        self, frame: FrameType | None
    ) -> tuple[tuple[Frame, ...], FrameType | None, FrameType | None]:
        """The frames of the user's code up to the call of a trainer, or if there are none, the
        innermost of a library, in a trainer's of one that is not torch; the innermost frame that
        calls a module, and the one that calls an optimizer's step()."""
        found, library, beyond_torch = list[Frame](), tuple[Frame, ...](), tuple[Frame, ...]()
        kinds, called, stepping = self._kinds, None, None
        while frame is not None and len(found) < FRAMES:
            code = frame.f_code
            kind = (kinds.get(id(code)) or self._kind_of(code))[1]
            if kind == _ENTRY:
                library = beyond_torch or library
                break
            if kind == _USER:
                found.append(frame_of(frame))
            elif code is self._call_code:
                called = called or frame
            elif code is self._step_code:
                stepping = frame
            elif not library:
                library = (frame_of(frame),)
            if kind == _LIBRARY and not beyond_torch:
                beyond_torch = (frame_of(frame),)
            frame = frame.f_back
        key = tuple(found) or library
        return self._sites.setdefault(key, key), called, stepping

    def _kind_of(self, code: CodeType) -> tuple[CodeType, str]:
        """Note whose a code object is, once, as an operator has some 13 frames; and keep it, so
        that its id is not used again."""
        file, kind = code.co_filename, _LIBRARY
        if is_entry(file, code.co_name):
            kind = _ENTRY
        elif not is_of_a_library(file, self._libraries):
            kind = _USER
        elif is_torchs(file):
            kind = _TORCHS
        noted = self._kinds[id(code)] = code, kind
        return noted

    def _look(self, frame: FrameType | None) -> None:
        """Look for the variables that hold what was made in the traced steps. What is small may
        have a large graph."""
        wanted = {
            key: one.id
            for key, (one, _) in list(self._living.items())
            if one.birth >= 0 and one.category in ("", INPUTS)
        }
        users = {code.co_filename for code, kind in self._kinds.values() if kind == _USER}
        # What the search makes would have the collector go through all objects of the program.
        is_on = gc.isenabled()
        gc.disable()
        try:
            found = holding(frame, users.__contains__, wanted, self)
        finally:
            if is_on:
                gc.enable()
        self._variables |= {wanted[key]: variables for key, variables in found.items()}

    # --- modules and optimizers ---

    def _path_of(self, frame: FrameType | None) -> str:
        """The path of the module that a frame calls; "" without one."""
        if frame is None:
            return ""
        module = dict(_core._frame_variables(frame))["self"]
        if id(module) not in self._paths:
            calls = list[Any]()
            above: FrameType | None = frame
            while above is not None:
                if above.f_code is self._call_code:
                    calls.append(dict(_core._frame_variables(above))["self"])
                above = above.f_back
            for outer in reversed(calls):
                if id(outer) not in self._paths:
                    self._know(outer)
        return self._paths[id(module)]

    def _know(self, root: Any) -> None:
        """Note the modules of an outermost one by their paths, and mark what they hold."""
        for path, module in root.named_modules():
            if id(module) not in self._paths:
                self._paths[id(module)] = path or type(root).__name__
                self._known.append(weakref.ref(module))
            dot = f"{path}." if path else ""
            own = vars(module)
            for category, kind in ((PARAMETERS, "_parameters"), (BUFFERS, "_buffers")):
                held = own.get(kind) or {}
                named = [(dot + name, one) for name, one in held.items() if one is not None]
                self.mark(category, named)
                if category == PARAMETERS:
                    self._parameters += ((name, weakref.ref(one)) for name, one in named)

    def _step_begins(self, frame: FrameType) -> None:
        """The first operator of an optimizer's step has run, which this frame has called."""
        arguments = dict(_core._frame_variables(frame)).get("args") or (None,)
        optimizer, names = arguments[0], self._names()
        for group in getattr(optimizer, "param_groups", ()):
            for one in group["params"]:
                name = names.get(id(one), "")
                self.mark(PARAMETERS, [(name, one)])
                if one.grad is not None:
                    self.mark(GRADIENTS, [(name, one.grad)])
        with contextlib.suppress(TypeError):  # It allows no weak references.
            self._optimizers[id(optimizer)] = weakref.ref(optimizer)

    def _mark_state(self) -> None:
        names = self._names()
        torch = bridge.connect().torch
        for ref in self._optimizers.values():
            for owner, kept in list(getattr(ref(), "state", {}).items()):
                of = names.get(id(owner), "")
                for name, value in list(kept.items()) if isinstance(kept, dict) else []:
                    text = " of ".join(filter(None, (str(name), of)))
                    found = [one for one in flat((value,)) if isinstance(one, torch.Tensor)]
                    self.mark(STATE, [(text, one) for one in found])

    def _names(self) -> dict[int, str]:
        """The names of parameters by their ids."""
        return {id(one): name for name, ref in self._parameters if (one := ref()) is not None}

    def _mark_gradients(self) -> None:
        for name, ref in self._parameters:
            parameter = ref()
            if parameter is not None and parameter.is_leaf and parameter.grad is not None:
                self.mark(GRADIENTS, [(name, parameter.grad)])


def _is_sum_of_gradients(func: Any, frame: FrameType | None) -> bool:
    """Whether this is autograd itself, which adds what two nodes have handed on."""
    is_engine = frame is not None and frame.f_code.co_name == "_engine_run_backward"
    return is_engine and str(func) == "aten.add.Tensor"


def _category(phase: str, one: _Storage, begins: Sequence[int], is_in_passes: bool) -> str:
    """What a storage was that nobody has marked, by its birth and its death, as in a recorded step
    (peak.py). `begins`: the positions at which backward passes begin."""
    if phase == OPTIMIZER:
        return OPTIMIZERS
    if phase == BACKWARD:
        return BACKWARDS
    if phase != FORWARD and is_in_passes:
        return INPUTS
    if one.birth == BEFORE:
        return OLDER
    begin = next((at for at in begins if at > one.birth), None)
    if begin is None or (one.death is not None and one.death <= begin):
        return OTHERS
    return SAVED if one.is_freed_in_backward else AFTER

"""The forward pass and loss under `torch.autocast("cpu", torch.bfloat16)`: a change of a trace.

    as it is      x ───────────────► linear ──► y               read again by backward: x, weight
    autocast      x ──► copy of x ─► linear ──► y/2             the copies
                  weight ──► copy ──┘    one for all calls of a forward pass
    backward      gradient of y/2 ──► gradient of x/2, or of the weight, which is then converted

torch has a list of operators that run in bfloat16 and one of those that run in float32; all others
take what comes. The rules are those of torch 2.13 on the host. Not followed are what kernels use
for themselves in bfloat16, and gradients that are converted on their way, so that the peak is
"about" what this says: twelve loops come within 10 %. Recurrent layers keep something else in
bfloat16, so that nothing is said of a step with one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from memtools._base.peak import BACKWARD, BUFFERS, FORWARD, GRADIENTS, PARAMETERS, SAVED
from memtools._blocks.lifetimes import MARKED, Life, Op, Trace

#: Operators that run in bfloat16, with those of their backward passes, and losses, in float32.
LOWER = ("mm.", "addmm.", "bmm.", "convolution")
LOSSES = ("mse_loss", "nll_loss", "binary_cross_entropy", "smooth_l1_loss", "huber_loss")
#: What scaled_dot_product_attention makes of several operators runs in float32: from the product
#: before this one to the product after it.
SOFTMAX, PRODUCT = ("_safe_softmax",), ("bmm.",)
#: These fail if what they add to has another dtype than what they add.
STRICT = ("index_add", "index_copy", "index_put", "scatter")
SUMS, RECURRENT = ("scatter_add.",), ("mkldnn_rnn",)
FULL, LOW = "float32", ("bfloat16", "float16")


def can_run_in_bfloat16(trace: Trace) -> bool:
    """Whether operators that autocast runs in bfloat16 run in float32 on the host, nothing in the
    trace is in a lower precision, no operator would fail under autocast, and none is recurrent."""
    if trace.device != "cpu" or any(life.dtype in LOW for life in trace.lives):
        return False
    walk = _Autocast(trace)
    walk.changed()
    return walk.lowers and not walk.fails and not any(_is(op, RECURRENT) for op in trace.ops)


def in_bfloat16(trace: Trace) -> Trace:
    """The forward passes and losses under autocast. Operators between steps stay as they are."""
    return _Autocast(trace).changed()


def _is(op: Op, names: tuple[str, ...]) -> bool:
    return op.name.removeprefix("aten.").startswith(names)


class _Autocast:
    """One walk over the operators of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._lives = {life.id: life for life in trace.lives}
        self._low = set[int]()  # of the trace's own, what is bfloat16
        self._copies = dict[int, Life]()
        self._scaled = set(trace.scaled or ())
        self._next = max(self._lives, default=0) + 1
        self._weights = dict[int, int]()  # the copies of weights in this forward pass
        #: the copies that backward passes read in place of what they are of, the first one first
        self._saved: dict[int, list[int]] = defaultdict(list)
        self._reads = [list(op.reads) for op in trace.ops]
        self._scratch = [op.scratch for op in trace.ops]
        self._attention = set(self._of_attention())
        self.lowers = False  # whether an operator runs in bfloat16
        self.fails = False  # whether an operator cannot run so

    def changed(self) -> Trace:
        ops = self._trace.ops
        for position, op in enumerate(ops):
            lives = [self._lives[one] for one in op.reads if one in self._lives]
            given = [one for one in lives if one.birth != position and one.dtype == FULL]
            made = [one for one in lives if one.birth == position and one.dtype == FULL]
            if op.phase == FORWARD:
                if position == 0 or ops[position - 1].phase != FORWARD:
                    self._weights = {}
                self._forward(position, given, made)
            elif op.phase == BACKWARD:
                self._backward(position, given, made)
        return replace(
            self._trace,
            lives=tuple(self._ended()),
            ops=tuple(
                op._replace(reads=tuple(dict.fromkeys(reads)), scratch=scratch)
                for op, reads, scratch in zip(ops, self._reads, self._scratch, strict=True)
            ),
            scaled=None if self._trace.scaled is None else frozenset(self._scaled),
        )

    def _forward(self, position: int, given: Sequence[Life], made: Sequence[Life]) -> None:
        op = self._trace.ops[position]
        if position in self._attention:
            self._low.difference_update(one.id for one in given)
        elif _is(op, LOSSES):
            for one in given:
                if one.id in self._low:
                    self._saved[one.id].append(self._copy(position, one, one.bytes))
        elif _is(op, LOWER):
            self.lowers = self.lowers or bool(given)
            for one in given:
                if one.id not in self._low:
                    copy = self._weights.get(one.id) or self._copy(position, one, one.bytes // 2)
                    self._saved[one.id].append(copy)
                    if one.category == PARAMETERS:
                        self._weights[one.id] = copy
            self._low.update(life.id for life in made)
        else:
            self._as_it_comes(position, given, made)

    def _backward(self, position: int, given: Sequence[Life], made: Sequence[Life]) -> None:
        op = self._trace.ops[position]
        if not _is(op, (*LOWER, *LOSSES)):
            return self._as_it_comes(position, given, made)
        for one in given:
            if self._saved[one.id]:
                copy, reads = self._saved[one.id].pop(), self._reads[position]
                self._reads[position] = [copy if x == one.id else x for x in reads]
        if _is(op, LOSSES):  # The gradient of a copy is then converted.
            if any(one.id in self._low for one in given):
                self._low.update(life.id for life in made)
                self._scratch[position] += sum(life.bytes for life in made)
        else:
            weights = [life for life in made if life.category == GRADIENTS]
            self._low.update(life.id for life in made if life not in weights)
            self._scratch[position] //= 2
            self._scratch[position] += sum(life.bytes // 2 for life in weights)
        return None

    def _as_it_comes(self, position: int, given: Sequence[Life], made: Sequence[Life]) -> None:
        """Results are bfloat16 if all arguments beside weights are. A gradient is as precise as
        what it is of."""
        op = self._trace.ops[position]
        given = [one for one in given if one.category not in (PARAMETERS, BUFFERS)]
        if op.phase == BACKWARD:
            given = [one for one in given if one.phase == FORWARD] or given
        low = {one.id in self._low for one in given}
        self.fails = self.fails or (op.phase == FORWARD and _is(op, STRICT) and len(low) > 1)
        if low == {True}:
            self._low.update(life.id for life in made)
            if _is(op, SUMS):  # It adds in float32, and without a trace to what it is given.
                self._scratch[position] += sum(life.bytes // 2 for life in made)

    def _of_attention(self) -> Iterator[int]:
        """The positions of what attention without a kernel of its own makes in a forward pass."""
        ops = self._trace.ops
        for at, op in enumerate(ops):
            if op.phase == FORWARD and _is(op, SOFTMAX):
                first = next((i for i in range(at, -1, -1) if _is(ops[i], PRODUCT)), at)
                last = next((i for i in range(at, len(ops)) if _is(ops[i], PRODUCT)), at)
                yield from range(first, last + 1)

    def _copy(self, position: int, of: Life, nbytes: int) -> int:
        """The id of a new copy, which an operator makes for itself and its backward pass."""
        op, number = self._trace.ops[position], self._next + len(self._copies)
        category = PARAMETERS if of.category == PARAMETERS else SAVED  # as large as the batch
        if of.id in self._scaled:
            self._scaled.add(number)
        self._copies[number] = Life(
            number, nbytes, position, position, 0, op.phase, category, operator="aten._to_copy",
            module=op.module, dtype=LOW[0], shape=of.shape,
        )  # fmt: skip
        self._reads[position].insert(0, number)
        return number

    def _ended(self) -> Iterator[Life]:
        """The lives with their new sizes and ends: that of what backward passes read is its last
        use."""
        uses, ops = dict[int, int](), self._trace.ops
        for position, reads in enumerate(self._reads):
            uses.update(dict.fromkeys(reads, position))
        for life in self._trace.lives:
            if life.id in self._low:
                life = life._replace(bytes=life.bytes // 2, dtype=LOW[0])
            last = uses.get(life.id, life.last_use)
            if last < life.last_use:
                is_read_last = life.phase == FORWARD and ops[life.last_use].phase == BACKWARD
                is_saved = is_read_last and life.category not in MARKED
                death = last + 1 if is_saved else life.death
                life = life._replace(last_use=last, death=death)
            yield life
        for copy in self._copies.values():
            last = uses.get(copy.id, copy.birth)
            yield copy._replace(last_use=last, death=last + 1)

"""The forward pass and loss under `torch.autocast("cpu", torch.bfloat16)`: a change of a trace.

    as it is      x ───────────────► linear ──► y               read again by backward: x, weight
    autocast      x ──► copy of x ─► linear ──► y/2             the copies
                  weight ──► copy ──┘    one for all calls of a forward pass
    backward      gradient of y/2 ──► gradient of the copy ──► gradient of x or of the weight

torch has a list of operators that run in bfloat16 and one of those that run in float32; all others
take what comes. The rules are those of torch 2.13 on the host. What kernels use for themselves in
bfloat16 is not known, so that the peak is "about" what this says.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from memtools._base.peak import BACKWARD, BACKWARDS, FORWARD, PARAMETERS, SAVED
from memtools._blocks.lifetimes import Life, Op, Trace

#: Operators that run in bfloat16, and in backward passes those of their gradients.
LOWER = ("mm.", "addmm.", "bmm.", "baddbmm.", "convolution", "mkldnn_", "_scaled_dot_product")
#: Losses run in float32, and with a cross entropy its log_softmax.
#: What scaled_dot_product_attention makes of several operators runs in float32: from the product
#: before this one to the product after it.
SOFTMAX, PRODUCT, SHAPES = "_safe_softmax", "bmm.", ("mul.", "clone.")
#: What a recurrent layer keeps for its backward pass without a dtype, and what is left of it.
RECURRENT, OF_RECURRENT = "aten.mkldnn_rnn", 0.7
#: These fail if what they add to has another dtype than what they add.
STRICT = ("index_add", "index_copy", "index_put", "scatter")
LOSSES = ("mse_loss", "nll_loss", "binary_cross_entropy", "smooth_l1_loss", "huber_loss")
LOG_SOFTMAX = "_log_softmax"
#: Their first result is as precise as their first argument, whatever their weights are.
NORMS = ("native_layer_norm", "native_group_norm", "native_batch_norm")
#: what dies after its last use in a backward pass
AUTOGRADS = (SAVED, BACKWARDS)
FULL, LOW = "float32", ("bfloat16", "float16")


def can_run_in_bfloat16(trace: Trace) -> bool:
    """Whether operators that autocast runs in bfloat16 run in float32 on the host, nothing in the
    trace is in a lower precision, and no operator would fail under autocast."""
    types = {life.id: life.dtype for life in trace.lives}
    lowered = (
        one
        for op in trace.ops
        if op.phase == FORWARD and _is(op, LOWER)
        for one in op.reads
        if types.get(one) == FULL
    )
    if (
        trace.device != "cpu"
        or any(one in LOW for one in types.values())
        or not any(True for _ in lowered)
    ):
        return False
    walk = _Autocast(trace)
    walk.changed()
    return not walk.fails


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
        self._copied = dict[int, int]()  # by the ids of copies, what they are of
        self._reads = [list(op.reads) for op in trace.ops]
        self._scratch = [op.scratch for op in trace.ops]
        self.fails = False  # whether an operator cannot run so
        self._next = max(self._lives, default=0) + 1
        self._weights = dict[int, int]()  # the copies of weights in this forward pass
        self._pass_end = 0
        self._gradients = dict[int, int]()  # the copies of gradients
        #: the copies that backward passes read in place of what they are of, the last one first
        self._saved: dict[int, list[int]] = defaultdict(list)
        self._full: dict[int, list[int]] = defaultdict(list)
        self._beside = self._read_beside()
        self._cross_entropies = self._of_cross_entropies()
        #: positions of what attention runs in float32, and what lives of its results
        self._attention = set(self._of_attention())
        self._of_full = {life.id for life in trace.lives if life.birth in self._attention}

    def changed(self) -> Trace:
        ops = self._trace.ops
        for position, op in enumerate(ops):
            if op.phase == FORWARD:
                if position == 0 or ops[position - 1].phase != FORWARD:
                    self._weights = {}
                    later = range(position, len(ops))
                    self._pass_end = next((i for i in later if ops[i].phase != FORWARD), len(ops))
                self._forward(position, op)
            elif op.phase == BACKWARD:
                self._backward(position, op)
        scaled = self._trace.scaled
        if scaled is not None:
            scaled |= {one for one, of in self._copied.items() if of in scaled}
        return replace(
            self._trace,
            lives=tuple(self._ended()),
            ops=tuple(
                op._replace(reads=tuple(dict.fromkeys(reads)), scratch=scratch)
                for op, reads, scratch in zip(ops, self._reads, self._scratch, strict=True)
            ),
            scaled=scaled,
        )

    # --- operators ---

    def _forward(self, position: int, op: Op) -> None:
        given, made = self._given(op, position), self._made(op, position)
        if position in self._attention:
            if _is(op, (PRODUCT,)) and position + 1 not in self._attention:
                self._low.update(life.id for life in made)  # the last one
        elif _is(op, LOWER):
            for one in given:
                if one.id not in self._low:
                    self._saved[one.id].append(self._lower(position, one))
            self._low.update(life.id for life in made)
            self._scratch[position] //= 2
        elif _is(op, LOSSES) or position in self._cross_entropies:
            for one in given:
                if one.id in self._low and math.prod(one.shape) > 1:
                    copy = self._copy(position, one, one.bytes, SAVED)
                    self._full[one.id].append(copy)
        else:
            self._as_it_comes(op, given, made)

    def _backward(self, position: int, op: Op) -> None:
        given, made = self._given(op, position), self._made(op, position)
        if _is(op, LOWER) and not self._of_full.isdisjoint(op.reads):
            return
        if _is(op, LOWER):
            self._scratch[position] //= 2
            of = [self._lives[one] for one in self._beside[position]]
            for one in given:
                if self._saved[one.id]:
                    is_weight = one.id in self._weights
                    copy = self._saved[one.id][-1] if is_weight else self._saved[one.id].pop()
                    self._replace(position, one.id, copy)
                elif one.id not in self._low and one.phase == BACKWARD:
                    if one.id in self._gradients:
                        self._replace(position, one.id, self._gradients[one.id])
                    else:
                        half = self._copy(position, one, one.bytes // 2, BACKWARDS)
                        self._gradients[one.id] = half
            for life in made:
                like = next((x for x in of if math.prod(x.shape) == math.prod(life.shape)), None)
                if like is None or like.id in self._low:
                    self._low.add(life.id)
                else:  # It is made in bfloat16, and is then converted.
                    self._scratch[position] += life.bytes // 2
        elif _is(op, LOSSES) or position in self._cross_entropies:
            for one in given:
                if self._full[one.id]:
                    self._replace(position, one.id, self._full[one.id][-1])
        else:
            self._as_it_comes(op, given, made)

    def _as_it_comes(self, op: Op, given: Sequence[Life], made: Sequence[Life]) -> None:
        """Results are bfloat16 if all arguments are. A gradient is as precise as what it is of."""
        if _is(op, NORMS):
            given, made = given[:1], made[:1]
            if op.phase == BACKWARD:
                given = [one for one in self._given(op, -2) if one.phase == FORWARD][:1]
        else:
            given = [
                one for one in given if math.prod(one.shape) > 1 and not self._is_bias(one, op)
            ]
            saved = [one for one in given if one.phase == FORWARD]
            given = saved if op.phase == BACKWARD and saved else given
        low = [one.id in self._low for one in given]
        self.fails = self.fails or (op.phase == FORWARD and _is(op, STRICT) and len(set(low)) > 1)
        if low and all(low):
            self._low.update(life.id for life in made)

    def _is_bias(self, one: Life, op: Op) -> bool:
        """Whether this is what a linear layer adds to its product by an operator of its own."""
        product = self._lives.get(op.reads[0]) if op.name.startswith("aten.add.") else None
        return (
            one.category == PARAMETERS
            and len(one.shape) == 1
            and product is not None
            and product.operator.startswith("aten.mm.")
        )

    def _given(self, op: Op, position: int) -> list[Life]:
        """The arguments that are numbers in float32 as the trace is."""
        lives = (self._lives[one] for one in op.reads if one in self._lives)
        return [one for one in lives if one.birth != position and one.dtype == FULL]

    def _made(self, op: Op, position: int) -> list[Life]:
        lives = (self._lives[one] for one in op.reads if one in self._lives)
        return [one for one in lives if one.birth == position and one.dtype == FULL]

    def _read_beside(self) -> list[tuple[int, ...]]:
        """For each operator of LOWER in a backward pass, what it and those with the same gradient
        read of the forward pass."""
        found: dict[int, dict[int, None]] = defaultdict(dict)
        gradients = list[list[int]]()
        for position, op in enumerate(self._trace.ops):
            given = self._given(op, position)
            own = [one.id for one in given if one.phase == BACKWARD]
            gradients.append(own if op.phase == BACKWARD and _is(op, LOWER) else [])
            for number in gradients[-1]:
                found[number].update((one.id, None) for one in given if one.phase != BACKWARD)
        return [tuple(dict.fromkeys(x for one in own for x in found[one])) for own in gradients]

    def _of_attention(self) -> Iterator[int]:
        """The positions of what attention without a kernel of its own makes in a forward pass."""
        ops = self._trace.ops
        for at, op in enumerate(ops):
            if op.phase == FORWARD and _is(op, (SOFTMAX,)):
                first = next((i for i in range(at, -1, -1) if _is(ops[i], (PRODUCT,))), at)
                last = next((i for i in range(at, len(ops)) if _is(ops[i], (PRODUCT,))), at)
                waiting = [first]
                while waiting:  # back to where queries and keys are scaled
                    born = (self._lives[x].birth for x in ops[waiting.pop()].reads)
                    scaled = [x for x in born if 0 <= x < first and _is(ops[x], SHAPES)]
                    waiting += scaled
                    first = min(first, *scaled) if scaled else first
                yield from range(first, last + 1)

    def _of_cross_entropies(self) -> set[int]:
        """The positions of a log_softmax of which a cross entropy is made, and of its gradient."""
        made, found = dict[int, int](), set[int]()
        for position, op in enumerate(self._trace.ops):
            if _is(op, (LOG_SOFTMAX,)):
                if op.phase == BACKWARD:
                    found |= {position} if any(one in made for one in op.reads) else set()
                elif op.reads:
                    made[op.reads[-1]] = position
            elif _is(op, ("nll_loss_forward", "nll_loss2d_forward")):
                found |= {made[one] for one in op.reads if one in made}
        return found

    # --- copies ---

    def _lower(self, position: int, one: Life) -> int:
        """The copy of an argument; of a parameter one for each forward pass."""
        if one.category != PARAMETERS:
            return self._copy(position, one, one.bytes // 2, SAVED)
        if one.id not in self._weights:
            self._weights[one.id] = self._copy(position, one, one.bytes // 2, PARAMETERS)
        copy = self._weights[one.id]
        self._replace(position, one.id, copy)
        self._copies[copy] = self._copies[copy]._replace(death=self._pass_end)
        return copy

    def _copy(self, position: int, of: Life, nbytes: int, category: str) -> int:
        op, number = self._trace.ops[position], self._next
        self._next += 1
        self._copied[number] = of.id
        self._copies[number] = Life(
            number, nbytes, position, position, 0, op.phase, category, operator="aten._to_copy",
            module=op.module, dtype=LOW[0], shape=of.shape,
        )  # fmt: skip
        self._reads[position].insert(0, number)
        return number

    def _replace(self, position: int, number: int, copy: int) -> None:
        reads = self._reads[position]
        self._reads[position] = [copy if one == number else one for one in reads]

    def _ended(self) -> list[Life]:
        """The lives with their new sizes and ends: that of what only autograd has is its last
        use."""
        uses = dict[int, int]()
        for position, reads in enumerate(self._reads):
            uses.update(dict.fromkeys(reads, position))
        found = list[Life]()
        for life in self._trace.lives:
            if life.id in self._low:
                life = life._replace(bytes=life.bytes // 2, dtype=LOW[0])
            elif life.operator.startswith(RECURRENT) and life.dtype == "uint8":
                life = life._replace(bytes=int(OF_RECURRENT * life.bytes))
            last, ops = uses.get(life.id, life.last_use), self._trace.ops
            if last < life.last_use:
                is_own = ops[life.last_use].phase == BACKWARD and life.category in AUTOGRADS
                death = last + 1 if is_own and life.death is not None else life.death
                life = life._replace(last_use=last, death=death)
            found.append(life)
        for copy in self._copies.values():
            last = uses.get(copy.id, copy.birth)
            found.append(copy._replace(last_use=last, death=max(last + 1, copy.death or 0)))
        return found

"""Epochs over a store: chunks in an order that can be resumed, and an end by KL divergence.

    for epoch in epochs ──► for chunk in epoch ──► views of the blocks, or the one buffer of copies
             │                     │
             └ mean KL too high?   └ the chunk before is over: its memory is this one's now
               then it was the last

The buffer is one for all chunks. So the device holds one chunk whatever the loop keeps in its
variables, and the allocator sees one allocation. autograd notices a graph that needs a chunk that
is over: its backward pass raises, because the memory was written to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Self

from memtools import _core
from memtools._base import torch as bridge
from memtools._base.number import as_float, positive, repr_of, whole_number

if TYPE_CHECKING:
    import torch

    from memtools._trajectory.field import Field
    from memtools._trajectory.plan import Piece, Plan
    from memtools._trajectory.store import TrajectoryStore

FORMAT = 1


@dataclass(slots=True, eq=False, repr=False)
class TrajectoryChunk(Mapping[str, "torch.Tensor"]):
    """A part of a rollout: tensors by field name, valid until the next chunk.

    Fields of steps are `[n, s, ...]`, states `[n + 1, s, ...]`, values of samples `[s, ...]`. Clone
    what you need longer.
    """

    #: index of its epoch
    epoch: int
    #: index in the epoch
    index: int
    #: the time steps
    steps: range
    #: their indices
    samples: tuple[int, ...]
    #: units of a sum of losses, which are steps * samples or steps * tokens
    weight: int
    #: of the tensors
    nbytes: int
    _tensors: dict[str, torch.Tensor] | None

    def _over(self) -> None:
        self._tensors = None

    def _valid(self) -> dict[str, torch.Tensor]:
        if self._tensors is None:
            raise RuntimeError(
                f"chunk {self.index} of epoch {self.epoch} is over, and its memory is used again; "
                "clone() what you need longer"
            )
        return self._tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._valid()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._valid())

    def __len__(self) -> int:
        return len(self._valid())

    def __repr__(self) -> str:
        steps = f"steps {self.steps.start} to {self.steps.stop - 1}"
        return (
            f"TrajectoryChunk({self.index} of epoch {self.epoch}: {steps}, "
            f"{len(self.samples)} samples)"
        )


@dataclass(slots=True, eq=False, repr=False)
class TrajectoryEpoch(Iterator[TrajectoryChunk]):
    """One pass over a rollout: an iterator over chunks."""

    #: from 0
    index: int
    _epochs: TrajectoryEpochs

    def __next__(self) -> TrajectoryChunk:
        return self._epochs._next_chunk(self.index)

    def __len__(self) -> int:
        """Chunks that are left."""
        return self._epochs._left(self.index)


@dataclass(slots=True, eq=False, repr=False)
class TrajectoryEpochs(Iterator[TrajectoryEpoch]):
    """An iterator over epochs of a rollout. A `break` in the loop over chunks skips the rest of
    that epoch."""

    _store: TrajectoryStore
    _num_epochs: int
    _plan: Plan
    _kl_threshold: float | None
    _device: str
    _changes: int = field(default=0, init=False)
    _epoch: int = field(default=0, init=False)  # that is open, or comes next
    _done: int = field(default=0, init=False)  # chunks of it that were handed out
    _open: bool = field(default=False, init=False)
    _stopped: bool = field(default=False, init=False)
    _pieces: list[Piece] = field(default_factory=list, init=False)  # of the epoch that is open
    _chunk: TrajectoryChunk | None = field(default=None, init=False)
    _kl: list[float] = field(default_factory=list, init=False)
    _kl_sum: Any = field(default=0.0, init=False)
    _kl_weight: Any = field(default=0.0, init=False)
    _buffers: dict[str, torch.Tensor] = field(default_factory=dict, init=False)
    _part: Any = field(default=None, init=False)  # of the budget, for the buffers

    def __post_init__(self) -> None:
        self._num_epochs = whole_number("num_epochs", self._num_epochs)
        if self._kl_threshold is not None:
            positive("kl_threshold", self._kl_threshold)
        self._changes = self._store._changes
        self._reserve()

    # --- chunks ---

    @property
    def chunks_per_epoch(self) -> int:
        """The number of chunks."""
        return self._plan.chunks_per_epoch

    def __next__(self) -> TrajectoryEpoch:
        self._end_epoch()
        if self._stopped or self._epoch >= self._num_epochs:
            self._release()
            raise StopIteration
        self._open = True
        self._pieces = self._plan.chunks(self._epoch)
        return TrajectoryEpoch(self._epoch, self)

    def _left(self, epoch: int) -> int:
        going_on = self._open and epoch == self._epoch and not self._stopped
        return self.chunks_per_epoch - self._done if going_on else 0

    def _next_chunk(self, epoch: int) -> TrajectoryChunk:
        if self._chunk is not None:
            self._chunk._over()
            self._chunk = None
        if self._left(epoch) == 0:
            raise StopIteration
        if self._store._changes != self._changes:
            raise RuntimeError(
                f"the store was changed in epoch {epoch} of {self._num_epochs}: it was reset, "
                "closed or appended to; finish or leave the loop over epochs first"
            )
        piece = self._pieces[self._done]
        tensors = {each.name: self._part_of(each, piece) for each in self._fields()}
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        self._chunk = TrajectoryChunk(
            epoch, self._done, piece.steps, piece.samples, piece.weight, nbytes, tensors
        )
        self._done += 1
        return self._chunk

    def _fields(self) -> list[Field]:
        return list(self._store._fields.values())

    def _part_of(self, each: Field, piece: Piece) -> torch.Tensor:
        """A field's values of one chunk: a view where it can be, else a copy in the buffer."""
        torch = bridge.connect().torch
        rows = each.memory if each.kind == "samples" else _of_steps(each, piece.steps)
        samples = piece.samples
        is_slice = (
            samples == tuple(range(samples[0], samples[0] + len(samples))) if samples else True
        )
        first = samples[0] if samples else 0
        buffer = self._buffers.get(each.name)
        with torch.no_grad():
            if is_slice:
                rows = rows[:, first : first + len(samples)]
            if buffer is None:
                return rows[0] if each.kind == "samples" else rows
            shape = (len(rows), len(samples), *each.shape)
            place = buffer[: math.prod(shape)].view(shape)
            if is_slice:
                place.copy_(rows)
            else:
                wanted = torch.tensor(samples, device=rows.device)
                if rows.device == place.device:
                    torch.index_select(rows, 1, wanted, out=place)
                else:
                    place.copy_(rows.index_select(1, wanted))
        return place[0] if each.kind == "samples" else place

    # --- the buffer ---

    def _reserve(self) -> None:
        """Make the buffer for the largest chunk, where a chunk cannot be a view."""
        torch, store = bridge.connect().torch, self._store
        elsewhere = (
            torch.empty(0, device=self._device).device != torch.empty(0, device=store.device).device
        )
        if not elsewhere and self._plan.is_of_neighbours:
            return
        most_steps, most_samples = self._plan.largest
        sizes = {
            each.name: _entries(each, most_steps) * most_samples * math.prod(each.shape)
            for each in self._fields()
        }
        if not elsewhere:
            self._part = _core.BudgetPart(store._budget, "TrajectoryEpochs")
            wanted = sum(sizes[each.name] * each.itemsize for each in self._fields())
            self._part.reserve(
                wanted,
                "TrajectoryStore.epochs()",
                "use fewer samples per chunk, chunk by time_steps alone (such chunks are views), "
                "or raise the limit",
            )
        try:
            with torch.inference_mode(False):
                for each in self._fields():
                    self._buffers[each.name] = torch.empty(
                        sizes[each.name], dtype=each.dtype, device=self._device
                    )
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        if self._chunk is not None:
            self._chunk._over()
            self._chunk = None
        self._buffers.clear()
        if self._part is not None:
            self._part.close()

    # --- the end ---

    def report_kl(self, kl: float | torch.Tensor, weight: float | torch.Tensor = 1.0) -> None:
        """Report the mean KL divergence of a chunk. The epoch's mean decides whether another epoch
        begins. Several ranks must report the same numbers.

        Args:
            kl: a number or a tensor of one element, which is not waited for.
            weight: the number of units of the mean, such as `chunk.weight`.

        Raises RuntimeError outside of an epoch.
        """
        if not self._open:
            raise RuntimeError("report_kl() outside of an epoch; call it in the loop over chunks")
        mean, units = _number(kl, "kl"), _number(weight, "weight")
        self._kl_sum = self._kl_sum + mean * units
        self._kl_weight = self._kl_weight + units

    def stop(self) -> None:
        """End the epochs after this chunk."""
        self._stopped = True

    @property
    def kl(self) -> tuple[float, ...]:
        """Mean divergence of each finished epoch; nan without a report."""
        return tuple(self._kl)

    @property
    def ended_early(self) -> bool:
        """Whether the KL divergence or `stop()` ended the epochs."""
        return self._stopped

    def _end_epoch(self) -> None:
        """Close the epoch that is open, if one is."""
        complete = self._done >= self.chunks_per_epoch
        if not self._open and not (complete and self._epoch < self._num_epochs):
            return
        weight = float(self._kl_weight)
        is_missed = weight == 0 and complete and self._open and not self._stopped
        if is_missed and self._kl_threshold is not None:
            self._open = False
            raise RuntimeError(
                f"kl_threshold is {self._kl_threshold:g}, and no KL divergence was reported in "
                f"epoch {self._epoch}; call report_kl() after each chunk, or leave kl_threshold out"
            )
        mean = float(self._kl_sum) / weight if weight else math.nan
        self._kl.append(mean)
        is_last = self._epoch + 1 >= self._num_epochs
        if self._kl_threshold is not None and weight and not is_last:
            self._stopped |= not mean <= self._kl_threshold  # also where it is not a number
        self._kl_sum = self._kl_weight = 0.0
        self._epoch, self._done, self._open = self._epoch + 1, 0, False

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Return the position, also inside an epoch; the chunk handed out last counts as done.
        `torch.load(weights_only=True)` reads it."""
        return {
            "format": FORMAT,
            "plan": self._plan.as_json(),
            "num_epochs": self._num_epochs,
            "epoch": self._epoch,
            "done": self._done,
            "stopped": self._stopped,
            "kl": list(self._kl),
            "kl_sum": float(self._kl_sum),
            "kl_weight": float(self._kl_weight),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state` of `state_dict()`: the same chunks in the same order.

        Raises ValueError if it is of other arguments of `epochs()` or a store of another size;
        BudgetError if the copies do not fit into the limit. An error changes nothing.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"load_state_dict() takes a state_dict(), got {type(state).__name__}")
        mine = self.state_dict()
        if set(state) != set(mine) or state["format"] != FORMAT:
            raise ValueError("load_state_dict() takes a state_dict() of TrajectoryEpochs")
        for key in ("plan", "num_epochs"):
            if state[key] != mine[key]:
                raise ValueError(
                    f"the state is of epochs with {_difference(state[key], mine[key], key)}; pass "
                    "the same arguments to epochs()"
                )
        epoch = whole_number("epoch", state["epoch"], 0)
        done = whole_number("done", state["done"], 0)
        if epoch > self._num_epochs or done > self.chunks_per_epoch:
            raise ValueError(
                f"the state is at chunk {done} of epoch {epoch}, beyond {self.chunks_per_epoch} "
                f"chunks in {self._num_epochs} epochs"
            )
        kl = [as_float(value) for value in state["kl"]]
        sums = as_float(state["kl_sum"]), as_float(state["kl_weight"])
        if not self._buffers:  # they were released when the epochs were over
            self._reserve()
        if self._chunk is not None:
            self._chunk._over()
            self._chunk = None
        self._epoch, self._done, self._open = epoch, done, False
        self._stopped, self._kl = bool(state["stopped"]), kl
        self._kl_sum, self._kl_weight = sums

    def __iter__(self) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises TypeError, in copy.copy(), copy.deepcopy() and pickle."""
        raise TypeError(
            "TrajectoryEpochs cannot be copied or pickled, as they are of one store: save their "
            "state_dict()"
        )

    def __repr__(self) -> str:
        return (
            f"TrajectoryEpochs(epoch {self._epoch} of {self._num_epochs}, chunk {self._done} of "
            f"{self.chunks_per_epoch})"
        )


def _number(value: Any, name: str) -> Any:
    """A number as a float, or a tensor of one element as a scalar in double precision: a sum over
    chunks in the 8 bits of bf16 would stand still. Does not wait for a device.

    Raises TypeError and ValueError.
    """
    if isinstance(value, bridge.connect().torch.Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"report_kl() takes one number as {name}, got a tensor {list(value.shape)}"
            )
        return bridge.values_of(value).reshape(()).double()
    if not hasattr(value, "__float__"):
        raise TypeError(
            f"report_kl() takes a number or a tensor as {name}, got {type(value).__name__}"
        )
    return as_float(value)


def _entries(each: Field, steps: int) -> int:
    """Entries of a field in a chunk of so many steps."""
    return 1 if each.kind == "samples" else steps + (each.kind == "states")


def _of_steps(each: Field, steps: range) -> torch.Tensor:
    return each.memory[steps.start : steps.stop + (each.kind == "states")]


def _difference(theirs: Any, mine: Any, key: str) -> str:
    """The first thing in which two plans differ, in words."""
    if isinstance(theirs, Mapping) and isinstance(mine, Mapping):
        for name in mine:
            if theirs.get(name) != mine[name]:
                return f"{name}={repr_of(theirs.get(name))} instead of {mine[name]!r}"
        return "other arguments"
    return f"{key}={repr_of(theirs)} instead of {mine!r}"

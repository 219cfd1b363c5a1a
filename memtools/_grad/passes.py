"""BatchPasses: the passes of one batch in parts that fit, where other code makes the update.

    a trainer's update    |-- batch --|-- batch --| clip, step, log: the trainer's own
                               │
    BatchPasses.step()    |-- part --|-- part --|   each part adds its gradients to p.grad
                               │ out of memory
                               ▼
                          undone, and again with half the rows (see backoff.py)

A GradAccumulator averages, clips and steps. A trainer does these itself, so that nothing is left to
do here but to cut its batch: the gradients after `step()` are those of the batch that the trainer
would have run in one pass. What the parts return is kept in the window, and goes with a part that
is undone. On several ranks `reduce()` at the end of an update takes the place of the reduction that
the trainer's wrapper makes in a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from memtools._base import torch as bridge
from memtools._grad.backoff import BackOff
from memtools._grad.gradients import Gradients, sparse_error
from memtools._grad.ranks import Ranks
from memtools._grad.report import Retry
from memtools._grad.settings import Settings
from memtools._grad.window import INTERRUPTED

if TYPE_CHECKING:
    import torch

    from memtools._grad.pressure import Monitor

_RETRIES: Final = 100


@dataclass(frozen=True, slots=True)
class _Update:
    """The update of this rank, as `Ranks.reduce()` sees a window. A trainer's loss is a mean over
    the ranks, and so each rank is one unit."""

    count: int
    scale: float = 1.0
    guess: float = 1.0
    weighted: bool = True
    empty: bool = False

    def total(self) -> float:
        """Return the units."""
        return 1.0


@dataclass(slots=True, eq=False)
class _Window:
    """The parts of the current batch that have ended. `open`, `guess` and `weighted` are for the
    back-off: no window of an accumulator is open here."""

    count: int = 0
    results: tuple[Any, ...] = ()
    torn: str = ""
    open: bool = False
    guess: float = 0.0
    weighted: bool | None = None

    def mark(self) -> tuple[Any, ...]:
        """Return the numbers, for rewind()."""
        return self.count, self.results, self.torn

    def rewind(self, mark: tuple[Any, ...]) -> None:
        """Restore the numbers saved by mark()."""
        self.count, self.results, self.torn = mark


@dataclass(slots=True)
class _Totals:
    """The batches so far, for the numbers in retries."""

    windows: int = 0


class BatchPasses:
    """Runs the forward and backward passes of batches in parts that fit into memory.

    Args:
        model: the module that the passes run through. Gradients are those of its parameters.
        backward: called with what the forward pass of a part returned; runs its backward pass, and
            returns what `step()` is to return for this part.
        micro_batch_size: the rows of a part to begin with; None, the default, for the whole batch.
        monitor: a running MemoryMonitor, whose limits the parts stay below; None, the default, for
            fewer rows only after an out-of-memory error.
        ranks: how the processes that train this model work together, attached to it; None, the
            default, for one process.

    Attributes:
        retries: the newest 100 parts that were undone, of all batches, as sentences by `str()`.
        micro_batch_size: the rows of the largest part of the last batch; None before the first.
    """

    # BackOff uses the attributes without an underscore, and begin(), run(), end() and so on.

    def __init__(
        self,
        model: torch.nn.Module,
        backward: Callable[[Any], Any],
        *,
        micro_batch_size: int | None = None,
        monitor: Monitor | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.model, self._backward = model, backward
        self.window, self.totals = _Window(), _Totals()
        self.ranks = Ranks() if ranks is None else ranks
        self.ranks.begin()
        self.gradients = Gradients(p for p in model.parameters() if p.requires_grad)
        self._parts = 0  # of the batches since the last reduce()
        self.retries: list[Retry] = []
        self._back_off = BackOff(self, Settings(micro_batch_size=micro_batch_size, monitor=monitor))
        self.micro_batch_size: int | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What was set for the rest of the process, and why sizes do not depend on the limits; a
        sentence each."""
        return tuple(filter(None, self._back_off.notes))

    @property
    def done(self) -> tuple[Any, ...]:
        """What the parts of the current batch that have ended returned."""
        return self.window.results

    def step(
        self, rows: int, forward: Callable[[slice], Any], *, row_bytes: float = 0.0
    ) -> tuple[Any, ...]:
        """Run the passes of a batch, and add its gradients to `p.grad`.

        If memory runs out, the gradients, random numbers and buffers from before the part are
        restored, and it is run again with fewer rows.

        Args:
            rows: the rows of the batch, at least 1.
            forward: called with the rows of a part; runs its forward pass, and returns what
                `backward` takes. Where ranks are in step, all run as many parts as the rank with
                the most rows, and a part may be of rows that this one has not.
            row_bytes: the bytes of a row: a batch of longer rows is cut into fewer rows. 0, the
                default: all batches have rows of one length.

        Returns what `backward` returned for each part, in order.

        Raises what `forward` and `backward` raise, with the gradients dropped; an out-of-memory
        error only if one row does not fit.
        """
        torch = bridge.connect().torch
        self.ranks.begin()
        if self.ranks.in_step:
            rows = int(max(self.ranks.share(rows)))

        def run(part: Any) -> Any:
            first = int(part[0])
            return forward(slice(first, first + len(part)))

        self._back_off.step(torch.arange(rows), run, row_bytes=row_bytes)
        return self.window.results

    def reduce(self) -> None:
        """Make the gradients of all ranks their mean, at the end of an update. A collective; with
        one process it does nothing.

        Raises RankError if another rank has failed since the last call, TypeError for a sparse
        gradient.
        """
        if not self.ranks.reduces:
            return
        name = self.gradients.sparse()
        reduced = self.ranks.reduce(
            self.gradients,
            _Update(self._parts),
            problem=None if name is None else sparse_error(name),
        )
        self._parts = 0
        if (factor := reduced.divided / reduced.weight) != 1.0:
            self.gradients.multiply(factor)

    # --- for the back-off ---

    def begin(self) -> None:
        """Begin a batch. Gradients of earlier batches of the same update stay."""
        self.window = _Window()

    def run(self, micro: Any, loss_fn: Callable[[Any], Any], last: bool, rows: int = 0) -> None:
        """Run a part, and count it."""
        with self.ranks.forward(last):
            loss = loss_fn(micro)
            self.window.torn = INTERRUPTED
            result = self._backward(loss)
            self.window.torn = ""
        self.window.results += (result,)
        self.window.count += 1

    def end(self) -> tuple[Any, ...]:
        """End a batch."""
        self.totals.windows += 1
        self._parts += self.window.count
        self.keep_retries()
        return self.window.results

    def keep_retries(self) -> None:
        """Keep the newest retries only, so that a long run stays small."""
        del self.retries[:-_RETRIES]

    def require_outside(self, call: str) -> None:
        """Raise RuntimeError inside a micro-batch, which here is never open."""

    def require_whole(self, call: str) -> None:
        """Raise RuntimeError in a window that is torn, which here ends with its exception."""

"""The windows of an accumulator: several micro-batches, and one update at their end.

    begin   open, backward, leave | open, backward, leave | ... | open, backward, leave, end
            micro-batch 0         | micro-batch 1         | ... | micro-batch K-1

    backward       loss_sum * constant   loss_sum * constant
    weight         n0                  + n1                   ...             = N
    end            several ranks sum weights and gradients; one pass measures; one factor,
                   1 / (constant * N), times the clip coefficient, gives the gradient of
                   sum(loss) / N; the optimizer steps; the window is counted

The constant is the loss scale (1 without fp16) times a guess of 1 / N, so that the sums have about
the size of the final gradient. Both are powers of two, which change no bit of the result, and both
stay the same until the window ends. If step() gets the mean of losses in 16 bits, the guess is a
power of two divided by the number of rows: the gradient of the mean is then the power of two.

`Window` holds the numbers of one window, `Totals` those of all windows, and `WindowRunner` is the
state machine that moves from one to the next.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memtools._base import torch as bridge
from memtools._base.number import as_float
from memtools._grad.gradients import Change, Gradients, sparse_error
from memtools._grad.optimizer import Finish, Ownership, make_state, parameters_of
from memtools._grad.precision import WENT_BACKWARD, Precision, refuse_loss
from memtools._grad.ranks import RankError, Ranks, Reduced
from memtools._grad.report import WATERMARK, Retry, WindowReport

if TYPE_CHECKING:
    import torch

    from memtools._grad.settings import Settings

#: After so many skipped updates in a row the window's end raises.
MOST_SKIPS: Final = 50
#: A window is torn by this until a backward pass or a step that has begun is counted.
INTERRUPTED: Final = "an interrupt"
#: The guess has these exponents at least and at most. With a scale of 2**24 it is still a float32.
_EXPONENTS: Final = (-96, 96)
#: In fp16 the guess is a normal number, and with the scale rarely inf.
_EXPONENTS_16: Final = (-14, 0)

#: A window's numbers at one moment, as Window.mark() returns them.
Mark = tuple[Any, ...]


class Sum(NamedTuple):
    """An immutable sum: adding returns a new one, so that a window can go back to an old one.

    Attributes:
        known: the sum of the numbers.
        later: tensors without a graph that are not added yet. They may be on a device, and are
            added when the sum is read.
    """

    known: float = 0.0
    later: tuple[Any, ...] = ()

    def plus(self, value: Any) -> Sum:
        """Return this sum plus a value that `_without_graph()` returned."""
        if isinstance(value, float):
            return Sum(self.known + value, self.later)
        return Sum(self.known, (*self.later, value))

    def read(self) -> float:
        """Return the sum as a float, added in double precision. Waits for devices."""
        if not self.later:
            return self.known
        torch = bridge.connect().torch
        alike: dict[Any, list[Any]] = {}
        for value in self.later:
            alike.setdefault((value.device, value.dtype), []).append(value.reshape(()))
        return sum((sum(torch.stack(values).tolist()) for values in alike.values()), self.known)


@dataclass(slots=True, eq=False)
class Window:
    """The numbers of one window, and a 0-d tensor if weights came on a device."""

    #: the loss scale that this window uses
    scale: float = 1.0
    #: micro-batches that have ended
    count: int = 0
    #: units so far, without those of `on_device`; without weights, the number of micro-batches
    #: whose loss is in the gradients
    weight: float = 0.0
    #: float64 sum of the weights that came as tensors of a device, or None
    on_device: Any = None
    #: whether this window's losses come with weights; None before the first loss
    weighted: bool | None = None
    #: the factor of each loss besides the scale; 0.0 before the first backward pass
    guess: float = 0.0
    #: whether the program is inside a micro-batch
    open: bool = False
    #: whether the window ends with the current micro-batch
    last: bool = False
    #: backward passes of the current micro-batch
    chunks: int = 0
    #: the sum of the losses whose gradients were added
    loss: Sum = Sum()  # noqa: RUF009
    #: the further sums of a loss function, by name
    extras: Mapping[str, Sum] = field(default_factory=dict)
    #: the exception that left gradients of a part of a micro-batch; "" if the window is whole
    torn: str = ""

    def mark(self) -> Mark:
        """Return these numbers, for rewind(). Copies no tensor: none is changed in place."""
        return _numbers_of(self)

    def rewind(self, mark: Mark) -> None:
        """Restore the numbers saved by mark()."""
        for name, value in zip(self.__slots__, mark, strict=True):
            setattr(self, name, value)

    @property
    def empty(self) -> bool:
        """Whether the window has no loss yet."""
        return self.guess == 0.0

    def begin(
        self,
        steps: int,
        weight: Any,
        usual: float,
        exponents: tuple[int, int] = _EXPONENTS,
        divided: float = 1.0,
    ) -> None:
        """Choose the guess at the first backward pass, as if all `steps` micro-batches were like
        this one.

        Args:
            steps: micro-batches in the window.
            weight: of the first loss.
            usual: the mean weight of a micro-batch so far. It replaces a weight on a device, for
                which the call does not wait.
            exponents: the smallest and the largest exponent of the guess.
            divided: a divisor of the guess, which then is not a power of two.
        """
        units = usual
        if weight is None or isinstance(weight, float):
            units = weight or 1.0
        # The logarithms are added because a product might be inf.
        exponent = -round(math.log2(steps) + math.log2(units) - math.log2(divided))
        self.guess = math.ldexp(1.0, min(max(exponent, exponents[0]), exponents[1])) / divided
        self.weighted = weight is not None

    def add(self, weight: Any) -> None:
        """Count a loss of `weight` units whose gradient was added. None stands for a mean: the
        micro-batch then counts as one, however many losses it has."""
        if weight is None:
            if not self.chunks:
                self.weight += 1.0
        elif isinstance(weight, float):
            self.weight += weight
        elif self.on_device is None:
            self.on_device = weight
        else:
            self.on_device = self.on_device + weight
        self.chunks += 1

    def count_extras(self, values: Mapping[str, Any]) -> None:
        """Add the further sums that a loss function returned."""
        added = {name: self.extras.get(name, Sum()).plus(value) for name, value in values.items()}
        self.extras = {**self.extras, **added}

    def total(self) -> float:
        """Return the units of the whole window. Waits for the device if weights came on one."""
        if self.on_device is not None:
            self.weight += float(self.on_device)
            self.on_device = None
        return self.weight


_numbers_of: Callable[[Window], Mark] = attrgetter(*Window.__slots__)


@dataclass(slots=True, eq=False)
class Totals:
    """The counts over all windows for the report."""

    least_scale: float
    dropped: int = 0
    inf_windows: int = 0
    micro_batches: int = 0
    nan_windows: int = 0
    ran_out: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    updates: int = 0
    windows: int = 0
    weight: float = 0.0
    first_bad: str | None = None
    last: WindowReport | None = None
    #: how often step() took fewer rows at the watermark. It is not part of a state, like retries.
    lowered: float = 0
    #: the newest 100, so that the report of a long run stays small
    retries: deque[Retry] = field(default_factory=lambda: deque(maxlen=100))

    def add(self, window: WindowReport, next_scale: float) -> None:
        """Count one more window."""
        self.last = window
        self.windows += 1
        self.micro_batches += window.micro_batches
        self.weight += window.weight if math.isfinite(window.weight) else 0.0
        self.least_scale = min(self.least_scale, next_scale)
        if window.retries:
            self.keep(window.retries)
        if not window.skipped:
            self.updates += 1
            self.skipped_in_a_row = 0
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        self.nan_windows += window.nans > 0
        self.inf_windows += window.nans == 0
        self.first_bad = window.first_bad

    def keep(self, retries: Iterable[Retry]) -> None:
        """Count the retries of a window that ended or was dropped."""
        for retry in retries:
            if retry.phase == WATERMARK:
                self.lowered += 1
            else:
                self.ran_out += 1
            self.retries.append(retry)

    def state(self) -> dict[str, Any]:
        """Return the counts for a state_dict: not the last report and the retries, which belong to
        this process."""
        return {name: getattr(self, name) for name in (*COUNTS, *MEASURES, "first_bad")}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load counts that were checked."""
        for name in (*COUNTS, *MEASURES, "first_bad"):
            setattr(self, name, state[name])
        self.last, self.lowered = None, 0
        self.retries.clear()


COUNTS: Final = tuple(name for name, kind in Totals.__annotations__.items() if kind == "int")
MEASURES: Final = ("least_scale", "weight")


class WindowRunner:
    """Runs the windows of one accumulator, one after the other.

    GradAccumulator, its back-off and its state use the methods and attributes below.

    Attributes:
        model, optimizer: the module to train and its optimizer.
        steps: micro-batches in a window.
        window: the numbers of the current window.
        gradients: the gradients of the optimizer's parameters.
        precision: autocast and the loss scale.
        ranks: the other processes of the job.
        totals: the counts over all windows.
        ownership: binds the optimizer to this runner.
        retries: the retries of this window, for its WindowReport.
        micro_batch_size: rows in a micro-batch of step(), or None; for reports.
    """

    gradients: Gradients

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, settings: Settings
    ) -> None:
        self._torch = bridge.connect().torch
        self.model, self.optimizer, self.steps = model, optimizer, settings.steps
        self._scheduler = settings.scheduler
        self._context: Any = None
        self._finish = Finish(optimizer, settings)
        self.adopt()
        self.precision = Precision(self.gradients.parameters, settings)
        self.ranks = Ranks()
        self.totals = Totals(self.precision.scale.value)
        self.ownership = Ownership(self)
        self.micro_batch_size, self.retries = settings.micro_batch_size, list[Retry]()
        self.set_window(Window(self.precision.scale.value))

    def attach(self) -> None:
        """Take the optimizer and put hooks on the model."""
        self.ownership.take(self.optimizer)  # Nothing is refused after this.
        self.ranks.attach()

    def release(self, why: str) -> None:
        """Release the optimizer and remove all hooks. May be called again."""
        if self.ownership.ended:
            return
        self.abandon()
        self.gradients.forget()
        self.ownership.end(why)
        self.ranks.close()
        self.window = Window(self.precision.scale.value, torn=why)

    # --- a window ---

    def begin(self) -> None:
        """Begin a window with the current parameters of the optimizer. Gradients that other code
        left there are dropped, as zero_grad() does in other loops."""
        self.adopt()
        self.gradients.drop()
        self.window.scale = self.precision.scale.value

    def adopt(self) -> None:
        """Read the optimizer's parameters: the program may have added groups since."""
        parameters, before = parameters_of(self.optimizer), getattr(self, "gradients", None)
        if before is not None and list(map(id, before.parameters)) == list(map(id, parameters)):
            return
        found = {id(p): name for name, p in self.model.named_parameters()}
        names = [found.get(id(p), f"parameter {i}") for i, p in enumerate(parameters)]
        self.gradients = Gradients(parameters, names)

    def set_window(self, window: Window) -> None:
        """Make this the current window."""
        self.window = self.ownership.window = window

    def reset(self) -> None:
        """Drop the window and the current micro-batch."""
        self.abandon()
        self.totals.dropped += not self.window.empty
        self.gradients.drop()
        self.keep_retries()
        self.set_window(Window(self.precision.scale.value))

    def keep_retries(self) -> None:
        """Count the retries of a window that has no report."""
        self.totals.keep(self.retries)
        self.retries = []

    # --- one micro-batch ---

    def run(self, micro: Any, loss_fn: Callable[[Any], Any], last: bool, rows: int = 0) -> None:
        """Run the forward and backward pass of a micro-batch of step(), and count it.

        Raises what they raise. The window is torn then if a backward pass had begun. `rows` is as
        in take().
        """
        self.open(last)
        try:
            self.gradients.remember()  # Preparing to undo the micro-batch has moved them.
            self.take(loss_fn(micro), rows)
        except BaseException as error:
            self.leave(error)
            raise
        self.leave()

    def open(self, last: bool | None = None) -> None:
        """Begin a micro-batch. `last`: whether the window ends with it; None: by the count."""
        window = self.window
        if window.open or window.torn:
            self.require_outside("micro_batch()")
            self.require_whole("micro_batch()")
        if window.guess == 0.0:
            self.begin()
            self.gradients.remember()
        window.last = window.count + 1 >= self.steps if last is None else last
        try:
            if self.ranks.surrounds:
                self._context = self.ranks.forward(window.last)
                self._context.__enter__()
            if self.precision.lowers:
                self.precision.enter()
            window.open, window.chunks = True, 0
        except BaseException:
            self.abandon()
            raise

    def take(self, result: Any, rows: int = 0) -> None:
        """Go backward from the result of a loss function.

        Args:
            result: (loss, weight), (loss, weight, sums), the loss, or None if the function called
                backward() itself.
            rows: the number of rows that a loss without a weight is the mean of, which is its
                weight then; 0 if unknown.
        """
        if result is None:
            return
        loss, weight, sums = result, None, {}
        if isinstance(result, tuple) and len(result) in (2, 3):
            loss, weight, *more = result
            sums = _checked_sums(self._torch, more[0]) if more else {}
        if weight is None and rows:
            self.backward(loss, float(rows), mean_of=rows)
        else:
            self.backward(loss, weight)
        if sums:
            self.window.count_extras(sums)

    def backward(
        self, loss: Any, weight: Any = None, retain: bool = False, mean_of: int = 0
    ) -> None:
        """Check everything, then go backward, then count.

        Args:
            loss: a sum of losses.
            weight: the number of units in the sum.
            retain: keep the graph.
            mean_of: the number of rows that `loss` is the mean of; 0, the default, for a sum.
        """
        window, gradients = self.window, self.gradients
        if not window.open or window.torn:
            self.require_whole("backward()")
            raise RuntimeError(
                "backward() outside of a micro-batch: call it in `with acc.micro_batch():`"
            )
        if not isinstance(loss, self._torch.Tensor):
            raise TypeError(f"backward() takes a loss as a tensor, got {type(loss).__name__}")
        if not loss.requires_grad or loss.dim() > 0 or hasattr(loss, WENT_BACKWARD):
            refuse_loss(loss)
        if weight is not None:
            weight = _checked_weight(self._torch, weight)
        if gradients.remembered and (change := gradients.changed()) is not None:
            raise self._tear("backward()", change)
        first, dtype = window.guess == 0.0, loss.dtype
        if mean_of:
            loss = _sum_of(loss, mean_of)
        if first:
            totals = self.totals
            usual = totals.weight / totals.micro_batches if totals.weight else 1.0
            exponents = _EXPONENTS_16 if dtype is self._torch.float16 else _EXPONENTS
            # _sum_of() has widened a mean in 16 bits. Its gradient has to be a power of two, as in
            # other loops: bf16 cannot represent most multiples of the rows above 256.
            divided = 1.0 if loss.dtype is dtype else float(mean_of)
            window.begin(self.steps, weight, usual, exponents, divided)
        elif window.weighted is (weight is None):
            have, got = ("weights", "none") if window.weighted else ("no weight", "one")
            raise ValueError(
                f"the losses of this window came with {have} and this one with {got}: pass a "
                "weight with all of them or with none"
            )
        gradients.forget()
        window.torn = INTERRUPTED
        try:
            if first and self.ranks.world > 1:
                window.guess = self.ranks.guess(window.guess)
            self.precision.backward(loss, window.scale * window.guess, retain)
        except BaseException as error:
            window.torn = type(error).__name__
            raise
        window.add(weight)
        window.loss = window.loss.plus(_without_graph(self._torch, loss))
        window.torn = ""

    def leave(self, error: BaseException | None = None) -> None:
        """End a micro-batch: count it, or note an exception that ended it after a backward pass."""
        window = self.window
        window.open = window.last = False
        if self.precision.lowers:
            self.precision.leave()
        if self._context is not None:
            context, self._context = self._context, None
            context.__exit__(None, None, None)
        if error is not None:
            if window.chunks and not window.torn:
                window.torn = type(error).__name__
            window.chunks = 0
            return
        if window.torn:
            self.require_whole("micro_batch()")
        if not window.chunks:
            raise RuntimeError(
                "no backward() in this micro-batch: call acc.backward(loss_sum, weight) in it, or "
                "skip a batch before its block begins; nothing was counted"
            )
        window.count, window.chunks = window.count + 1, 0

    def abandon(self) -> None:
        """Leave a micro-batch that an interrupt left open."""
        self.window.open = self.window.last = False
        self.precision.recover()
        if self._context is not None:
            context, self._context = self._context, None
            context.__exit__(KeyboardInterrupt, None, None)
            self.ranks.fail(KeyboardInterrupt())  # This sends nothing, and undoes the pass.

    # --- the end of a window ---

    def end(self, flushing: bool = False) -> WindowReport | None:
        """End a window: reduce, measure, decide, step, count. An error before the optimizer's step
        changes nothing. Returns None if no rank had a loss."""
        began, window, gradients = time.perf_counter(), self.window, self.gradients
        if list(map(id, gradients.parameters)) != list(map(id, parameters_of(self.optimizer))):
            raise RuntimeError(
                "the optimizer got other parameters inside a window, whose gradients are not "
                "averaged: change its groups between windows; reset() drops this window"
            )
        change = gradients.changed() if gradients.remembered else None
        problem = None if change is None else self._tear("the window's end", change)
        if self.ranks.reduces:
            reduced = self._reduce(problem, flushing)
        elif problem is not None:
            raise problem
        else:
            reduced = Reduced(window.total(), (window.count,), window.guess)
        if reduced.guess == 0.0:
            return None
        measure = gradients.measure()
        if not measure.count:
            raise RuntimeError(
                "no parameter of the optimizer has a gradient at the end of this window: check "
                "that the loss depends on the model, and that the model still has the parameters "
                "that the optimizer was made with, which load_state_dict(assign=True) replaces"
            )
        if not (math.isfinite(reduced.weight) and reduced.weight > 0):
            raise ValueError(
                f"the weights of this window sum to {reduced.weight:g}, so there is nothing to "
                "average over: go on with a micro-batch of finite weight above 0, or reset()"
            )
        if self.ranks.sharded:
            measure = self.ranks.measure(measure)
        squares: Any = measure.sum_squares
        finite: Any = measure.finite
        if isinstance(squares, self._torch.Tensor):
            # A window waits for the device here, once.
            squares, finite = self._torch.stack((squares, finite.to(squares.dtype))).tolist()
        coefficient, applied, infs, nans, first_bad = 0.0, "skipped", 0, 0, None
        if finite:
            self.retries += make_state(self.optimizer, self.totals.windows, window.count)
            # From here on the window cannot go on. It stays torn until a new one replaces it, also
            # if an interrupt comes in between.
            window.torn, self.ownership.stepping = INTERRUPTED, True
            try:
                average = reduced.divided / (window.scale * reduced.guess * reduced.weight)
                norm, coefficient, applied = self._finish.step(gradients, squares, average)
                if self._scheduler is not None:
                    self._scheduler.step()
            except BaseException as error:
                window.torn = type(error).__name__
                raise
            finally:
                self.ownership.stepping = False
        else:
            infs, nans, first_bad = measure.bad
            norm = math.nan if nans else math.inf
        gradients.drop()
        scale = self.precision.scale
        if scale.moves:
            scale.update(not finite)
        self.window = self.ownership.window = Window(scale.value)
        report = WindowReport(
            index=self.totals.windows,
            micro_batches=sum(reduced.counts),
            weight=reduced.weight,
            norm=norm,
            coefficient=coefficient,
            scale=window.scale,
            skipped=not finite,
            infs=infs,
            nans=nans,
            first_bad=first_bad,
            applied=applied,
            ms=(time.perf_counter() - began) * 1e3,
            micro_batch_size=self.micro_batch_size,
            retries=tuple(self.retries),
            own_weight=window.total(),
            _loss=window.loss,
            _extras=window.extras,
        )
        self.retries = []
        self.totals.add(report, scale.value)
        if self.totals.skipped_in_a_row >= MOST_SKIPS:
            raise RuntimeError(
                f"{self.totals.skipped_in_a_row} updates in a row were skipped because gradients "
                f"were not finite ({infs:,} inf and {nans:,} nan in the last, first in "
                f"{first_bad}, loss scale {report.scale:g}): lower the learning rate, or check the "
                "data"
            )
        return report

    def _reduce(self, problem: Exception | None, flushing: bool) -> Reduced:
        """Sum over the ranks. A problem of this rank is raised after the other ranks know."""
        if problem is None and (name := self.gradients.sparse()) is not None:
            problem = sparse_error(name)
        if self.window.empty:
            self.begin()
        return self.ranks.reduce(self.gradients, self.window, flushing=flushing, problem=problem)

    # --- refusals ---

    def require_outside(self, call: str) -> None:
        """Raise RuntimeError inside a micro-batch."""
        if self.window.open:
            raise RuntimeError(
                f"{call} inside a micro-batch: end it first; reset() drops one that an interrupt "
                "left open"
            )

    def require_owned(self, call: str) -> None:
        """Raise RuntimeError if the optimizer no longer belongs to this accumulator."""
        if self.ownership.ended:
            raise RuntimeError(
                f"{call}: this GradAccumulator has ended ({self.ownership.ended}): use the one "
                "that has the optimizer now, or make a new one"
            )

    def require_whole(self, call: str) -> None:
        """Raise RuntimeError in a window that has gradients of a part of a micro-batch."""
        self.require_owned(call)
        if self.window.torn:
            raise RuntimeError(
                f"{call}: {self.window.torn} came after a backward pass had begun, so the "
                "gradients of this window are not those of whole micro-batches; reset() drops the "
                "window"
            )

    def _tear(self, call: str, change: Change) -> RuntimeError:
        """Return the error for gradients that other code changed since the last micro-batch."""
        self.window.torn = "a change from outside"
        return RuntimeError(
            f"{call}: the gradients of this window were {change.what}, after {self.window.count} "
            f"of {self.steps} micro-batches and outside acc.backward(), so they are not those of "
            f"its micro-batches: {change.remedy}; reset() drops this window"
        )


class Block:
    """The context manager of a micro-batch in a loop. An accumulator has one for all micro-batches.
    It holds the runner only between micro_batch() and the end of the block."""

    __slots__ = ("runner",)

    runner: WindowRunner

    def __enter__(self) -> None:
        if not hasattr(self, "runner"):
            raise RuntimeError("this micro-batch has ended: call micro_batch() for each")
        self.runner.open()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        runner = self.runner
        del self.runner
        window = runner.window
        if not window.open:  # The block called reset() or close().
            return
        try:
            try:
                runner.leave(error)
            except RuntimeError as refused:
                runner.ranks.abort(refused, window)
                raise
            if error is not None:
                runner.ranks.abort(error, window)
            elif window.count < runner.steps:
                runner.gradients.remember()
            else:
                try:
                    runner.end()
                except BaseException as failed:
                    if runner.window is window:  # It goes on as before this micro-batch ended.
                        window.count -= 1
                        if isinstance(failed, RankError):  # The other ranks cannot go on with it.
                            window.torn = type(failed).__name__
                    raise
        except BaseException:
            runner.precision.recover()  # An interrupt may have come before autocast ended.
            raise


# --- the results of a loss function ---


def _checked_weight(torch: Any, weight: Any) -> Any:
    """Return a weight as a float, or as a 0-d tensor if it is on a device, without waiting for it.

    Raises TypeError if it is not a number or a tensor of one element, ValueError if it is negative,
    nan or inf.
    """
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1 or weight.is_complex() or weight.dtype is torch.bool:
            raise TypeError(
                f"weight must be a number or a tensor of one element, got {weight.dtype} of shape "
                f"{tuple(weight.shape)}"
            )
        weight = weight.detach()
        if weight.device.type != "cpu":
            return weight.reshape(()).to(torch.float64)
        weight = weight.item()
    elif isinstance(weight, bool) or not hasattr(weight, "__float__"):
        kind = type(weight).__name__
        raise TypeError(f"weight must be a number or a tensor of one element, got {kind}")
    weight = as_float(weight)
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"weight counts units and must be 0 or more and finite, got {weight:g}")
    return weight


def _sum_of(mean: Any, rows: int) -> Any:
    """Return the sum of the losses that `mean` is the mean of, in 32 bits or more: bf16 cannot
    represent 257 rows, and in fp16 the sum is often inf."""
    return (mean.float() if mean.dtype.itemsize < 4 else mean) * rows


def _without_graph(torch: Any, value: Any) -> Any:
    """Return a tensor of one element as a float; a tensor that is not a plain one of the CPU as a
    copy without its graph."""
    if type(value) is torch.Tensor and value.is_cpu:
        return float(value.item())
    return value.detach().clone()


def _checked_sums(torch: Any, sums: Any) -> dict[str, Any]:
    """Return the further sums of a loss function, with values for Sum.plus().

    Raises TypeError if it is not a dict from names to numbers or tensors of one element.
    """
    if not isinstance(sums, Mapping):
        raise TypeError(
            "a loss function must return (loss_sum, weight) or (loss_sum, weight, sums), where "
            f"sums must be a dict of numbers; got {type(sums).__name__} as sums"
        )
    found = {}
    for name, value in sums.items():
        if not isinstance(name, str):
            raise TypeError(f"sums of a loss function must have str keys, got the key {name!r}")
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
            found[name] = _without_graph(torch, value)
        elif not isinstance(value, torch.Tensor) and hasattr(value, "__float__"):
            found[name] = as_float(value)
        else:
            kind = type(value).__name__
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise TypeError(
                f"sums[{name!r}] of a loss function must be a number or a tensor of one element, "
                f"got {kind}{shape}"
            )
    return found

"""What happens to micro-batches and windows, underneath GradAccumulator.

    _open   forward, backward()   _close  | _open ... _close |  _end_window
                                          |                  |    ranks.reduce
    window.count 0                      1 |                K |    measure, decide, apply, step

What step() with its back-off and the ranks build on, and so is kept stable:

    model, optimizer, parameters (the optimizer's), gradients, window, ranks, micro_batch_size
    _run(micro, loss_fn, last)      forward and backward of one micro-batch, counted in the window;
                                    raises what they raise, and the window is torn if a backward
                                    pass had begun
    _end_window() -> WindowReport   what the end of the K-th micro-batch does
    window.mark() / .rewind(mark)   the numbers of a window, `torn` among them
    _begin_window()                 drops what is in the gradients; _run does it where needed
    _drop_gradients()
    _require_outside(call), _require_whole(call)    refuse an open micro-batch, a torn window
    _retries                        a list that the next WindowReport takes over
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memtools.grad.backward import Passes, refuse_loss, unfit, units
from memtools.grad.ranks import RankError
from memtools.grad.sums import checked, taken
from memtools.grad.window_end import INTERRUPTED, WindowEnds


class WindowLoop(WindowEnds):
    """Micro-batches, one after the other."""

    __slots__ = ("_context", "_passes")

    _context: Any
    _passes: Passes

    # --- one micro-batch ---

    def _run(self, micro: Any, loss_fn: Callable[[Any], Any], last: bool) -> None:
        """One micro-batch of step()."""
        self._open(last)
        try:
            self._watch.remember(self.gradients)  # what undoes a micro-batch moves them
            self._take(loss_fn(micro))
        except BaseException as error:
            self._abort(error)
            raise
        self._close()

    def _take(self, result: Any) -> None:
        """What a loss function returned: (loss, weight), (loss, weight, sums), the loss, or None
        where it went backward itself."""
        if isinstance(result, tuple) and len(result) in (2, 3):
            loss, weight, *more = result
            sums = checked(self._torch, more[0]) if more else {}
            self._backward(loss, weight)
            if sums:
                self.window.count_extras(sums)
        elif result is not None:
            self._backward(result)

    def _backward(self, loss: Any, weight: Any = None, retain: bool = False) -> None:
        """Check all, then go backward, then count."""
        window = self.window
        if not window.open or window.torn:
            self._require_whole("backward()")
            raise RuntimeError(
                "backward() outside of a micro-batch: call it in `with acc.micro_batch():`"
            )
        if not isinstance(loss, self._torch.Tensor):
            raise TypeError(f"backward() takes a loss as a tensor, got {type(loss).__name__}")
        if unfit(loss):
            refuse_loss(loss)
        if weight is not None:
            weight = units(self._torch, weight)
        if (changed := self._changed("backward()")) is not None:
            raise changed
        first = window.guess == 0.0
        if first:
            window.begin(self._steps, weight, self._totals.usual_weight())
        elif window.weighted is (weight is None):
            self._refuse_mixed()
        self._watch.forget()
        window.torn = INTERRUPTED
        try:
            if first and self.ranks.world > 1:
                window.guess = self.ranks.guess(window.guess)
            self._passes.backward(loss, window.scale * window.guess, retain)
        except BaseException as error:
            window.torn = type(error).__name__
            raise
        window.add(weight)
        window.loss = window.loss.plus(taken(self._torch, loss))
        window.torn = ""

    def _open(self, last: bool | None = None) -> None:
        """A micro-batch begins. `last`: whether the window ends with it; None: by its count."""
        window = self.window
        if window.open or window.torn:
            self._require_outside("micro_batch()")
            self._require_whole("micro_batch()")
        if window.guess == 0.0:
            self._begin_window()
            self._watch.remember(self.gradients)
        window.last = window.count + 1 >= self._steps if last is None else last
        if window.last and self._main is not None and self.ranks.world == 1:
            self._main.measure_next()
        try:
            if self.ranks.surrounds:
                self._context = self.ranks.forward(window.last)
                self._context.__enter__()
            self._passes.enter()
            window.open, window.chunks = True, 0
        except BaseException:
            self._abandon()
            raise

    def _leave(self) -> None:
        """Out of the contexts, whatever happened."""
        self.window.open = self.window.last = False
        self._passes.leave()
        if self._context is not None:
            context, self._context = self._context, None
            context.__exit__(None, None, None)

    def _abandon(self) -> None:
        """Out of a micro-batch that an interrupt left between its begin and its end."""
        self.window.open = self.window.last = False
        self._passes.recover()
        if self._context is not None:
            context, self._context = self._context, None
            context.__exit__(KeyboardInterrupt, None, None)
            self.ranks.fail(KeyboardInterrupt())  # tells nobody, but takes the pass back

    def _close(self) -> None:
        """A micro-batch ends well."""
        self._leave()
        window = self.window
        if window.torn:
            self._require_whole("micro_batch()")
        if not window.chunks:
            raise RuntimeError(
                "no backward() in this micro-batch: call acc.backward(loss_sum, weight) in it, or "
                "leave a batch out before its block begins; nothing was counted"
            )
        if self._main is not None:
            self._main.absorb()
        window.count, window.chunks = window.count + 1, 0

    def _abort(self, error: BaseException) -> None:
        """A micro-batch ends by an exception."""
        self._leave()
        window = self.window
        if window.chunks and not window.torn:
            window.torn = type(error).__name__
        window.chunks = 0

    def _end_block(self) -> None:
        """A micro-batch of a loop ends well, and maybe the window with it."""
        window = self.window
        try:
            self._close()
        except RuntimeError as error:
            self.ranks.abort(error, window)
            raise
        if window.count < self._steps:
            self._watch.remember(self.gradients)
            return
        try:
            self._end_window()
        except BaseException as error:
            if self.window is window:  # it goes on: as before the end of this micro-batch
                window.count -= 1
                if isinstance(error, RankError):  # other ranks cannot go on with it
                    window.torn = type(error).__name__
            raise

    # --- refusals ---

    def _require_outside(self, call: str) -> None:
        if self.window.open:
            raise RuntimeError(
                f"{call} inside of a micro-batch: end that first; reset() drops one that an "
                "interrupt left open"
            )

    def _refuse_mixed(self) -> None:
        have, got = ("weights", "none") if self.window.weighted else ("no weight", "one")
        raise ValueError(
            f"this window's losses came with {have} and this one with {got}: an average needs "
            "weights of all or of none"
        )

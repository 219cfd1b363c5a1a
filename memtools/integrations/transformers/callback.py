"""MemoryCallback: a MemoryMonitor for transformers.Trainer.

on_train_begin   start, phase "train"
on_step_end      step: one update of the optimizer; phase "evaluate" or "save" if that is next
on_substep_end   no step, but guards may act
on_log           the figures join the loss
on_train_end     stop; any exception out of train() stops it too
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, Self

from transformers.trainer_callback import DefaultFlowCallback, TrainerCallback

from memtools import MemoryMonitor
from memtools.integrations._monitored import MonitoredRun

_DEPTH = 12  # frames from a hook up to the Trainer whose hook it is


class MemoryCallback(TrainerCallback):  # type: ignore[misc]
    """Watches the memory of `Trainer.train()`.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[MemoryCallback()])
        trainer.train()

    The monitor starts with the training and stops with it, also by an exception. A step is an
    update of the optimizer, however many batches it accumulates. Evaluation and saving are the
    phases `evaluate` and `save` inside of `train`. Each log that goes to reporters (TensorBoard,
    wandb) has the monitor's `memory/...` figures; after the end the summary goes to the log
    `memtools` at level INFO. Losses and `trainer.state.log_history` are what they would be without.

    Args:
        monitor: None for `MemoryMonitor()`; pass `MemoryMonitor(log="run.mem")` for a record. One
            that runs already is not stopped here.
        expert: all figures there are in each log.
        log_history: the figures join `trainer.state.log_history` too. Checkpoints keep it, and a
            run that is resumed then differs there from one that went straight through.

    `Trainer.add_callback(callback)` puts it behind the reporters, which then do not see its
    figures, and an exception in the very next training is not noticed: `callback.add_to(trainer)`
    does better. `with MemoryCallback(...) as callback:` stops the monitor at the end of the block.
    """

    def __init__(
        self,
        monitor: MemoryMonitor | None = None,
        *,
        expert: bool = False,
        log_history: bool = False,
    ) -> None:
        self._run = MonitoredRun(monitor, expert)
        self._log_history = log_history
        self._trainers: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def monitor(self) -> MemoryMonitor:
        """The one that watches, or has watched."""
        return self._run.monitor

    def add_to(self, trainer: Any) -> Self:
        """Add it to a Trainer that is there: before the reporters, and with an eye on exceptions.

        What `callbacks=[...]` does by itself. May be called again.
        """
        handler = trainer.callback_handler
        others = [callback for callback in handler.callbacks if callback is not self]
        flows = [i for i, other in enumerate(others) if isinstance(other, DefaultFlowCallback)]
        at = flows[0] + 1 if flows else 0  # behind what decides that an evaluation follows
        handler.callbacks = [*others[:at], self, *others[at:]]
        if trainer not in self._trainers:
            self._trainers.add(trainer)
            trainer.train = _watched(trainer.train, self)
        return self

    def stop(self, error: BaseException | None = None) -> None:
        """Stop the monitor if the callback started it. May be called again."""
        self._run.stop(error)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = _trainer_above(self)
        if trainer is not None:
            self.add_to(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.start()
        self._run.enter("train")
        if getattr(args, "eval_on_start", False):
            self._run.enter("evaluate")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A callback behind this one may have called an evaluation off.
        self._run.leave_all(but="train")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.monitor.step()
        self._begin_next(control)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.monitor.step(0)  # a safe point, and no step: the optimizer has not moved

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin_next(control)

    def _begin_next(self, control: Any) -> None:
        if control.should_evaluate:
            self._run.enter("evaluate")
        elif control.should_save:
            self._run.enter("save")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.monitor.running:
            self._run.enter("evaluate")  # one that nobody announced, from its second batch on

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.leave("evaluate")
        self._begin_next(control)

    def on_predict(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.leave("evaluate")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.leave("save")

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        figures = self._run.figures()
        if logs is not None:
            logs.update(figures)
        if not self._log_history:
            return
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)  # a copy of the logs, made before this hook

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stop()
        self._run.say()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.stop(error)


def _watched(train: Any, callback: MemoryCallback) -> Any:
    """`Trainer.train` of one trainer: there is no hook for an exception."""

    @functools.wraps(train)
    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            result = train(*args, **kwargs)
        except BaseException as error:
            callback.stop(error)
            raise
        callback.stop()
        return result

    return watched


def _trainer_above(callback: MemoryCallback) -> Any:
    """The Trainer that calls, by its frame: hooks are not told whose they are. None where it is not
    found."""
    if "transformers.trainer" not in sys.modules:
        return None
    trainer_type = sys.modules["transformers.trainer"].Trainer
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        owner = frame.f_locals.get("self")
        if isinstance(owner, trainer_type) and callback in owner.callback_handler.callbacks:
            return owner
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None

"""MemoryCallback: a MemoryMonitor for transformers.Trainer.

on_train_begin   start, phase "train"
on_..._step      phase "optimizer", from on_pre_optimizer_step to on_optimizer_step
on_step_end      step: an update of the optimizer; phase "evaluate" or "save" if that comes next
on_prediction... step of the phase "evaluate": a batch of an evaluation
on_substep_end   no step, but guards may act
on_log           figures are added to the log
on_train_end     stop; an exception that leaves train() stops it, too

The Trainer does not pass itself to its hooks, does not report that train() failed, and calls
reporters before other callbacks. So the callback looks for its Trainer in the frames above
on_init_end, moves before the reporters and wraps `trainer.train`: `callbacks=[MemoryCallback()]` is
all that a user writes.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, Self

from transformers.trainer_callback import DefaultFlowCallback, TrainerCallback

from memtools import MemoryMonitor
from memtools.integrations._monitored import MonitoringCallback

_DEPTH = 12  # The maximum of frames between a hook and the Trainer that calls it.


class MemoryCallback(MonitoringCallback, TrainerCallback):  # type: ignore[misc]
    """A callback that watches the memory of `Trainer.train()`.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[MemoryCallback()])
        trainer.train()

    The monitor runs during the training. A step is an optimizer update. Optimizer steps, evaluation
    and saving are the phases `optimizer`, `evaluate` and `save` inside `train`. Logs to reporters
    (TensorBoard, wandb) get `memory/...` figures; the summary goes to the logger `memtools` at
    level INFO.

    For an existing Trainer use `callback.add_to(trainer)`: `Trainer.add_callback` is too late for
    the reporters and for exceptions. A `with` block stops the monitor at its end.

    Args:
        monitor: one that runs already is not stopped here. None: a `MemoryMonitor()`.
        expert: log all figures.
        log_history: add the figures to `trainer.state.log_history`, which checkpoints keep.
    """

    def __init__(
        self,
        monitor: MemoryMonitor | None = None,
        *,
        expert: bool = False,
        log_history: bool = False,
    ) -> None:
        super().__init__(monitor, expert)
        self._log_history = log_history
        self._trainers: weakref.WeakSet[Any] = weakref.WeakSet()

    def add_to(self, trainer: Any) -> Self:
        """Add the callback to a Trainer, before its reporters, so that it also stops after an
        exception.

        Args:
            trainer: the Trainer, of which `callbacks=[...]` does this automatically. May be called
                twice.

        Returns the callback.
        """
        handler = trainer.callback_handler
        others = [callback for callback in handler.callbacks if callback is not self]
        flows = [i for i, other in enumerate(others) if isinstance(other, DefaultFlowCallback)]
        at = flows[0] + 1 if flows else 0  # behind the one that decides what follows a step
        handler.callbacks = [*others[:at], self, *others[at:]]
        if trainer not in self._trainers:
            self._trainers.add(trainer)
            trainer.train = _watched(trainer.train, self)
        return self

    def remove_from(self, trainer: Any) -> None:
        """Remove the callback from a `trainer`, and stop the monitor that it started."""
        self.stop()
        trainer.remove_callback(self)
        if trainer in self._trainers:
            self._trainers.remove(trainer)
            del trainer.train  # the watched one, which hides the trainer's own

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = _trainer_above(self)
        if trainer is not None:
            self.add_to(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.start()
        self._run.enter("train")
        if getattr(args, "eval_on_start", False):
            self._run.enter("evaluate", own_steps=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A later callback may have cancelled the evaluation that on_step_end saw coming.
        self._run.leave_all(but="train")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.monitor.step()
        self._begin_next(control)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.enter("optimizer")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.leave("optimizer")

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.monitor.step(0)  # a safe point but not a step: the optimizer has not been called

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin_next(control)

    def _begin_next(self, control: Any) -> None:
        if control.should_evaluate:
            self._run.enter("evaluate", own_steps=True)
        elif control.should_save:
            self._run.enter("save")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.monitor.running:
            # Here if no hook has announced it, from its second batch on.
            self._run.enter("evaluate", own_steps=True)
            try:
                self.monitor.step()
            except BaseException:  # a guard's: on_evaluate will not come
                self._run.leave("evaluate")
                raise

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
        self._run.log_summary()


def _watched(train: Any, callback: MemoryCallback) -> Any:
    """`trainer.train`, after which the callback's monitor is stopped."""

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
    """The Trainer that calls this callback's hook, found by its frame; None if it is not there."""
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

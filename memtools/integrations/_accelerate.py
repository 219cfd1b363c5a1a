"""What `memtools.use()` changes of an accelerate.Accelerator, in a loop that the user writes.

    accelerator.backward(loss)       phase "backward"
    optimizer.step()                 phase "optimizer", cleanup; and a step of the monitor if the
                                     optimizer was really called, else a safe point
    accelerator.end_training()       the monitor stops

The first backward() starts the monitor. The optimizers are those that the accelerator has prepared.
A batch cannot be cut here: its forward pass is over when backward() sees the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from memtools import CleanupPolicy, MemoryMonitor, managed
from memtools.integrations._monitored import MonitoredRun
from memtools.integrations.use import Left

if TYPE_CHECKING:
    from memtools.integrations.use import Change


class Watching:
    """A monitor with phases, and a CleanupPolicy, in the calls that a loop makes.

    Args:
        accelerator: the Accelerator, whose prepare() was called.
        monitor: the monitor.
        policy: when to clean up.
    """

    busy = ""

    def __init__(self, accelerator: Any, monitor: MemoryMonitor, policy: CleanupPolicy) -> None:
        self._run, self._accelerator = MonitoredRun(monitor, False), accelerator
        self._set: list[tuple[Any, str]] = []
        self._replace(accelerator, "backward", self._phase("backward"))
        self._replace(accelerator, "end_training", self._end)
        for optimizer in accelerator._optimizers:
            self._replace(optimizer, "step", managed(policy))
            self._replace(optimizer, "step", self._step)
        self.changed = [
            "Phases 'backward' and 'optimizer', and a step for each update, go to a MemoryMonitor.",
            "A CleanupPolicy collects garbage and trims in optimizer.step().",
        ]
        self.left: list[str] = []

    def remove(self) -> None:
        """Put the methods back, and stop the monitor if it was started here."""
        for owner, name in self._set:
            vars(owner).pop(name, None)
        self._run.stop()

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        setattr(owner, name, wrap(getattr(owner, name)))
        self._set.append((owner, name))

    def _phase(self, name: str) -> Callable[[Any], Any]:
        def wrap(call: Any) -> Any:
            @wraps(call)
            def inside(*args: Any, **kwargs: Any) -> Any:
                if not self._run.monitor.running:
                    self._run.start()
                with self._run.monitor.phase(name):
                    return call(*args, **kwargs)

            return inside

        return wrap

    def _step(self, call: Any) -> Any:
        inside = self._phase("optimizer")(call)

        @wraps(call)
        def step(*args: Any, **kwargs: Any) -> Any:
            result = inside(*args, **kwargs)
            self._run.monitor.step(int(self._accelerator.sync_gradients))
            return result

        return step

    def _end(self, call: Any) -> Any:
        @wraps(call)
        def end(*args: Any, **kwargs: Any) -> Any:
            self._run.stop()
            return call(*args, **kwargs)

        return end


def changes(accelerator: Any, monitor: MemoryMonitor, policy: CleanupPolicy) -> list[Change]:
    """Make the changes of `use()`.

    Raises ValueError if DeepSpeed or Megatron make the update, or nothing was prepared yet.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        raise ValueError(
            f"{kind} makes the update itself: leave use() out, and watch by `memtools run`"
        )
    if not accelerator._optimizers:
        raise ValueError("the accelerator has no optimizer yet: call use() after its prepare()")
    return [
        Watching(accelerator, monitor, policy),
        Left(
            "Batches run whole: their forward pass is over when accelerator.backward() gets the "
            "loss; memtools.integrations.accelerate.accumulator runs them in parts."
        ),
        Left(
            "The loss of each batch is divided by gradient_accumulation_steps, whatever its rows "
            "or tokens: that accumulator weighs them."
        ),
    ]

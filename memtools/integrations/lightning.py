"""memtools in Lightning: `from memtools.integrations.lightning import MemoryCallback, accumulator`.

setup              start                       each of fit, validate, test and predict
on_train_start     phase "train"               "sanity_check", "validate", "test", "predict" are
on_before_opt..._step phase "optimizer"        of automatic optimization, to the batch's end
on_train_batch_end step, log_dict(figures)     phases as well, inside of "train" or alone
on_..._batch_end   a step of "validate", "test" or "predict"; guards may act
teardown           stop                        on_exception stops too

accumulator(module) makes a GradAccumulator for a LightningModule that optimises by hand.

It works with `lightning` and with `pytorch_lightning`, whichever the program has imported.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from memtools import GradAccumulator, MemoryMonitor
from memtools.integrations._monitored import MonitoringCallback

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning.callbacks import Callback
else:
    try:
        from lightning.pytorch.callbacks import Callback
    except ImportError:
        from pytorch_lightning.callbacks import Callback

__all__ = ["MemoryCallback", "accumulator"]


class MemoryCallback(MonitoringCallback, Callback):  # type: ignore[misc]
    """A callback that watches the memory of `Trainer.fit`, `validate`, `test` and `predict`.

        trainer = Trainer(callbacks=[MemoryCallback()])
        trainer.fit(model, data)

    The monitor runs during each of them. A step is an optimizer update, as in
    `trainer.global_step`; batches of `validate`, `test` and `predict` are steps of these phases.
    Every `log_every_n_steps` the loggers get `memory/...` figures; the summary goes to the logger
    `memtools` at level INFO. A `with` block stops the monitor at its end.

    Args:
        monitor: one that runs already is not stopped here. None: a `MemoryMonitor()`.
        expert: log all figures.
    """

    def __init__(self, monitor: MemoryMonitor | None = None, *, expert: bool = False) -> None:
        super().__init__(monitor, expert)
        self._steps = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._run.start()
        self._steps = trainer.global_step  # not 0 when a checkpoint goes on

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.stop()
        self._run.log_summary()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.stop(exception)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._steps = trainer.global_step
        self._run.enter("train")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.leave_all()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if pl_module.automatic_optimization:
            self._run.enter("optimizer")

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._run.leave("optimizer")
        steps = trainer.global_step - self._steps
        self._steps += max(0, steps)
        self.monitor.step(max(0, steps))
        if trainer.loggers and _logs_now(trainer):
            self.log_dict(self._run.figures(), on_step=True, on_epoch=False, rank_zero_only=True)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        # The batches of a sanity check are no steps, but guards may act.
        self.monitor.step(0 if self._run.is_in("sanity_check") else 1)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        self._run.enter("sanity_check")

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.leave("sanity_check")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._run.enter("validate", own_steps=True)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.leave("validate")

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._run.enter("test", own_steps=True)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.leave("test")

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self._run.enter("predict", own_steps=True)

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.leave("predict")


def accumulator(module: Any, steps: int = 1, **options: Any) -> GradAccumulator:
    """Make a GradAccumulator for a LightningModule with manual optimization.

        def on_fit_start(self):
            self.acc = accumulator(self, steps=4, max_norm=1.0)
        def training_step(self, batch, index):
            with self.acc.micro_batch():
                loss_sum, count = ...
                self.acc.backward(loss_sum, weight=count)
            if self.trainer.is_last_batch:
                self.acc.flush()

    With precision="bf16-mixed" the forward pass runs under Lightning's autocast. Loaders of several
    ranks may have different lengths.

    Args:
        module: a module that a Trainer fits, with `self.automatic_optimization = False` and one
            optimizer. Its scheduler is stepped after each update.
        steps: micro-batches of an update.
        options: further arguments of GradAccumulator; `scheduler=` replaces the module's.

    Raises ValueError if the module optimises automatically or has several optimizers, or if the
    Trainer's precision is "16-mixed": use "32-true", and precision="fp16" here.
    """
    if module.automatic_optimization:
        raise ValueError(
            "GradAccumulator makes the updates itself: set self.automatic_optimization = False in "
            "the module, and leave accumulate_grad_batches out"
        )
    precision = str(module.trainer.precision)
    if precision.startswith("16"):
        raise ValueError(
            f'the Trainer scales losses itself with precision="{precision}"; give it "32-true", '
            'and precision="fp16" to the accumulator'
        )
    optimizer = module.optimizers()
    if isinstance(optimizer, list):
        raise ValueError(
            f"the module has {len(optimizer)} optimizers; make one GradAccumulator for each"
        )
    options.setdefault("scheduler", module.lr_schedulers() or None)
    model = module.trainer.strategy.model
    return GradAccumulator(model, optimizer, steps, **options)


def _logs_now(trainer: Any) -> bool:
    """Whether Lightning passes figures of this batch on to the loggers. To read them for every
    batch would cost every step."""
    return bool(trainer._logger_connector.should_update_logs)

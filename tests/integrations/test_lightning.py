"""MemoryCallback under a real Lightning Trainer, of both packages, on the CPU."""

from __future__ import annotations

import csv
import logging
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import memtools

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Lightning's own, under a newer torch
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger

    from memtools.integrations.lightning import MemoryCallback

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(pl.LightningModule):
    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(4, 2)
        self.losses: list[float] = []
        self.fails_at = fails_at

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if index == self.fails_at:
            raise RuntimeError("a bad batch")
        loss: torch.Tensor = torch.nn.functional.dropout(self.layer(batch[0])).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.layer(batch[0]).mean())

    test_step = validation_step

    def predict_step(self, batch: Any, index: int) -> Any:
        return self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class TwoOptimizers(Model):
    """Steps both by hand, as one that trains against an adversary."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([p], 0.1) for p in self.parameters()]


def rows(count: int = 12) -> Any:
    made = torch.Generator().manual_seed(5)
    return DataLoader(TensorDataset(torch.randn(count, 4, generator=made)), batch_size=2)


def trainer(folder: Path, *callbacks: Any, **options: Any) -> Any:
    torch.manual_seed(7)
    defaults = {
        "default_root_dir": str(folder), "accelerator": "cpu", "devices": 1, "max_epochs": 2,
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "log_every_n_steps": 1, "num_sanity_val_steps": 0,
    }  # fmt: skip
    return pl.Trainer(callbacks=list(callbacks), **(defaults | options))


def phases(monitor: memtools.MemoryMonitor) -> dict[str, int]:
    return {phase.name: phase.count for phase in monitor.phases()}


def test_fitting_is_watched_from_setup_to_teardown(tmp_path, caplog):
    callback = MemoryCallback()
    with caplog.at_level(logging.INFO, "memtools"):
        trainer(tmp_path, callback, num_sanity_val_steps=1).fit(Model(), rows(), rows(4))
    assert not callback.monitor.running
    assert callback.monitor.step_count == 12
    assert phases(callback.monitor) == {
        "sanity_check": 1, "validate": 2, "train": 1, "optimizer": 12,
    }  # fmt: skip
    said = [record.getMessage() for record in caplog.records if record.name == "memtools"]
    assert said == [callback.monitor.summary()]


def test_validating_testing_and_predicting_are_runs_of_their_own(tmp_path):
    callback = MemoryCallback()
    made, model = trainer(tmp_path, callback), Model()
    for run, name in ((made.validate, "validate"), (made.test, "test"), (made.predict, "predict")):
        run(model, dataloaders=rows(4), **({} if name == "predict" else {"verbose": False}))
        assert phases(callback.monitor) == {name: 1}
        assert not callback.monitor.running


@pytest.mark.parametrize("call", ["fit", "validate", "test", "predict"])
def test_a_guard_may_act_between_two_batches_of_anything(tmp_path, call):
    """A step of `fit` is longer than its data here, and none ends."""
    monitor = memtools.MemoryMonitor(limit="1 MiB")
    monitor.guard(0.5)
    made = trainer(tmp_path, MemoryCallback(monitor), accumulate_grad_batches=100)
    with pytest.raises(memtools.HostMemoryPressure, match="watermark 50%"):
        getattr(made, call)(Model(), rows(200))
    assert not monitor.running
    assert monitor.step_count == 0


def test_the_losses_are_the_same_bit_for_bit(tmp_path):
    plain, watched = Model(), Model()
    trainer(tmp_path / "a", logger=CSVLogger(str(tmp_path / "a"))).fit(plain, rows(), rows(4))
    monitor = memtools.MemoryMonitor(tmp_path / "run.mem", interval_ms=1)
    callback = MemoryCallback(monitor)
    trainer(tmp_path / "b", callback, logger=CSVLogger(str(tmp_path / "b"))).fit(
        watched, rows(), rows(4)
    )
    assert watched.losses == plain.losses
    assert len(plain.losses) == 12
    assert memtools.read_record(tmp_path / "run.mem").complete


@pytest.mark.parametrize(("accumulated", "steps"), [(1, 12), (4, 4), (6, 2)])
def test_a_step_is_an_update_of_the_optimizer(tmp_path, accumulated, steps):
    """6 batches an epoch: of 4 and the 2 that are left, Lightning makes an update each."""
    callback = MemoryCallback()
    made = trainer(tmp_path, callback, accumulate_grad_batches=accumulated)
    made.fit(Model(), rows())
    assert callback.monitor.step_count == made.global_step == steps


def test_each_optimizer_counts_as_lightning_counts_it(tmp_path):
    callback = MemoryCallback()
    made = trainer(tmp_path, callback, max_epochs=1)
    made.fit(TwoOptimizers(), rows())
    assert callback.monitor.step_count == made.global_step == 12


def test_the_figures_go_to_the_logger_when_it_is_time(tmp_path):
    logger = CSVLogger(str(tmp_path), flush_logs_every_n_steps=1)
    callback, read = MemoryCallback(), []
    figures = callback._run.figures
    callback._run.figures = lambda: read.append(1) or figures()  # type: ignore[method-assign]
    trainer(tmp_path, callback, logger=logger, log_every_n_steps=3).fit(Model(), rows())
    with open(Path(logger.log_dir, "metrics.csv")) as file:
        logged = list(csv.DictReader(file))
    assert [row["step"] for row in logged] == ["2", "5", "8", "11"]
    assert all(float(row["memory/host_rss_bytes"]) > 1e6 for row in logged)
    assert len(read) == 4  # and were not read in vain


def test_without_a_logger_nothing_is_read(tmp_path):
    callback = MemoryCallback()
    callback._run.figures = None  # type: ignore[assignment, method-assign]
    trainer(tmp_path, callback).fit(Model(), rows())
    assert callback.monitor.step_count == 12


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_stops_the_monitor_and_the_record_says_which(tmp_path, error, monkeypatch):
    monitor = memtools.MemoryMonitor(tmp_path / "run.mem")
    model = Model(fails_at=3)
    if error is KeyboardInterrupt:
        monkeypatch.setattr(model, "training_step", lambda *args: interrupt())
        monkeypatch.setattr("signal.signal", lambda *args: None)  # Lightning turns ctrl-C off
    with pytest.raises((error, SystemExit)):
        trainer(tmp_path, MemoryCallback(monitor)).fit(model, rows())
    assert not monitor.running
    record = memtools.read_record(tmp_path / "run.mem")
    assert record.complete
    assert error.__name__ in record.events[-1].text


def interrupt() -> None:
    raise KeyboardInterrupt


def test_it_fits_again_and_goes_on_from_a_checkpoint(tmp_path):
    callback = MemoryCallback()
    with pytest.raises(RuntimeError):
        trainer(tmp_path, callback).fit(Model(fails_at=3), rows())
    made = trainer(tmp_path, callback, max_epochs=1)
    made.fit(Model(), rows())
    assert callback.monitor.step_count == 6
    made.save_checkpoint(tmp_path / "a.ckpt")
    more = trainer(tmp_path, callback, max_epochs=3)
    more.fit(Model(), rows(), ckpt_path=str(tmp_path / "a.ckpt"), weights_only=False)
    assert (more.global_step, callback.monitor.step_count) == (18, 12)


def test_a_monitor_that_runs_already_is_not_stopped(tmp_path):
    with memtools.MemoryMonitor() as monitor:
        trainer(tmp_path, MemoryCallback(monitor), max_epochs=1).fit(Model(), rows())
        assert monitor.running
        assert monitor.step_count == 6


PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
sys.modules.update(dict.fromkeys({absent!r}))
{imports}
import torch
from torch.utils.data import DataLoader, TensorDataset

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def training_step(self, batch, index):
        return self.layer(batch[0]).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

callback = MemoryCallback()
pl.Trainer(
    max_steps=3, accelerator="cpu", callbacks=[callback], logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
).fit(Model(), DataLoader(TensorDataset(torch.randn(8, 4))))
(base,) = [kind for kind in MemoryCallback.__mro__ if kind.__name__ == "Callback"]
package = base.__module__.partition(".")[0]
print(callback.monitor.step_count, package, "lightning.pytorch" in sys.modules)
"""
OURS = "from memtools.integrations.lightning import MemoryCallback\n"
OLD = "import pytorch_lightning as pl\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imports", "absent", "expected"),
    [
        (OLD + OURS, [], "3 pytorch_lightning False"),
        (OURS + OLD, [], "3 lightning True"),  # the other's base does as well
        (OURS + OLD, ["lightning"], "3 pytorch_lightning False"),
    ],
)
def test_both_packages_do(tmp_path, imports, absent, expected):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(imports=imports, absent=absent)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1:] == [expected], done.stderr


class KeepsOutputs(Model):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []

    def validation_step(self, batch: Any, index: int) -> None:
        self.outputs.append(torch.randn(1 << 16))


def test_what_a_validation_keeps_is_named_by_its_own_batches(tmp_path, monkeypatch):
    # A walk takes 0.9 s in the heap of all tests, and would wait for its share of the run's time.
    monkeypatch.setattr("memtools._monitor.walks.GRACE_NS", 60 * 10**9)
    monitor = memtools.MemoryMonitor()
    found: list[memtools.LeakFinding] = []
    monitor.on_leak(found.append)
    fitted = trainer(tmp_path, MemoryCallback(monitor), num_sanity_val_steps=2, max_epochs=1)
    fitted.fit(KeepsOutputs(), rows(), rows(48))
    assert monitor.step_count == 6
    named = next(one for one in found if one.holder)
    assert (named.holder, named.phase) == ("list KeepsOutputs.outputs", "validate")
    assert named.rate_bytes == pytest.approx(4 << 16, rel=0.1)
    assert named.first_step is None or named.first_step <= 16

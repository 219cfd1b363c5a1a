"""memtools.use(trainer) for Lightning's Trainer: the same training in parts, and back again."""

from __future__ import annotations

import csv
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import memtools
from tests.kit.oominject import Inject

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Lightning's own, under a newer torch
    import lightning.pytorch as pl
    import torchmetrics
    from lightning.pytorch.loggers import CSVLogger

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


class Net(pl.LightningModule):
    """Logs its loss and a metric, and counts what hooks it has seen."""

    def __init__(self, wrap: Any = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
        )
        self.accuracy = torchmetrics.MeanMetric()
        self.wrap = wrap
        self.losses: list[torch.Tensor] = []
        self.norms: list[float] = []

    def loss(self, x: Any, y: Any) -> Any:
        out = self.wrap(self.layers(x))
        self.accuracy.update((out.argmax(1) == y).float())
        return torch.nn.functional.cross_entropy(out, y)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.loss(*batch)
        self.losses.append(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("largest", batch[0].max(), reduce_fx="max", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))

    def on_after_backward(self) -> None:
        self.norms.append(float(sum(p.grad.square().sum() for p in self.parameters()).sqrt()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def loader() -> Any:
    made = torch.Generator().manual_seed(5)
    x, y = torch.randn(44, 4, generator=made), torch.randint(0, 3, (44,), generator=made)
    return DataLoader(TensorDataset(x, y), batch_size=8)  # the last batch has 4 rows


def trainer(folder: Path, **options: Any) -> Any:
    return pl.Trainer(**{
        "default_root_dir": folder, "accelerator": "cpu", "max_epochs": 2, "log_every_n_steps": 1,
        "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": False, "logger": CSVLogger(folder, version=0),
    } | options)  # fmt: skip


def fitted(folder: Path, is_used: bool, net: Any = None, part: int = 3, **options: Any) -> Any:
    made, net = trainer(folder / str(is_used), **options), net or Net()
    adapter = memtools.use(made, micro_batch_size=part) if is_used else None
    made.fit(net, loader(), loader())
    return made, net, adapter


def parameters(net: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def logged(made: Any) -> list[dict[str, float]]:
    path = Path(made.logger.log_dir) / "metrics.csv"
    entries = [
        {k: float(v) for k, v in row.items() if v and not k.startswith("memory/")}
        for row in csv.DictReader(path.open())
    ]
    return [entry for entry in entries if entry.keys() > {"epoch", "step"}]


def same(used: Any, plain: Any) -> None:
    torch.testing.assert_close(parameters(used[1]), parameters(plain[1]), rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(logged(used[0]), logged(plain[0]), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6, nan_ok=True)
    torch.testing.assert_close(torch.stack(used[1].losses), torch.stack(plain[1].losses))
    assert used[1].norms == pytest.approx(plain[1].norms, rel=1e-5)
    assert used[0].global_step == plain[0].global_step


OPTIONS = {
    "one batch": {},
    "four batches and clipping": {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_a_training_in_parts_is_the_training_in_whole_batches(options, tmp_path):
    plain = fitted(tmp_path, False, **OPTIONS[options])
    used = fitted(tmp_path, True, **OPTIONS[options])
    told = str(used[2])
    assert "had 2 rows" in told  # the last batch has 4
    assert "the mean over its rows" in told
    same(used, plain)
    phases = {phase.name for phase in used[2].monitor.phases()}
    assert phases >= {"train", "loss", "backward", "optimizer", "validate"}
    assert used[2].monitor.step_count == plain[0].global_step


class Keeps(Net):
    """Keeps outputs of its steps for the end of the epoch."""

    def __init__(self, entry: Any) -> None:
        super().__init__()
        self.entry, self.outputs = entry, []

    def training_step(self, batch: Any, index: int) -> Any:
        loss, out = super().training_step(batch, index), self.layers(batch[0])
        self.outputs.append(self.entry(loss, out.detach()))
        return loss


@pytest.mark.parametrize(
    ("entry", "is_whole"),
    [
        (lambda loss, out: {"loss": loss.detach(), "out": out}, True),
        (lambda loss, out: (out, {"loss": loss.item()}), True),
        (lambda loss, out: out, True),
        (lambda loss, out: {"loss": loss.detach(), "mean": out.mean(0)}, False),  # [3]: no rows
        (lambda loss, out: str(loss.item()), False),
    ],
)
def test_what_a_step_keeps_in_a_list_is_of_the_batch_or_is_told(entry, is_whole, tmp_path):
    plain, used = (fitted(tmp_path, is_used, Keeps(entry), part=5) for is_used in (False, True))
    told = "appends to outputs has an entry for each part" in str(used[2])
    assert told == (not is_whole)
    if is_whole:
        torch.testing.assert_close(used[1].outputs, plain[1].outputs)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_part_that_runs_out_of_memory_runs_again_and_counts_once(where, tmp_path):
    options = OPTIONS["four batches and clipping"]
    plain = fitted(tmp_path, False, **options)
    inject = Inject(**{where: {3}})
    net = Net(lambda x: inject(x) if torch.is_grad_enabled() else x)
    used = fitted(tmp_path, True, net, 6, **options)
    assert "1 part ran again with fewer rows" in str(used[2])
    same(used, plain)


class LargestLoss(Net):
    def loss(self, x: Any, y: Any) -> Any:
        return torch.nn.functional.cross_entropy(self.layers(x), y, reduction="none").max()


class MoreThanLoss(Net):
    def training_step(self, batch: Any, index: int) -> Any:
        return {"loss": super().training_step(batch, index), "batch": batch[0]}


class ByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (LargestLoss, "the loss of two of its rows is neither"),
        (MoreThanLoss, "training_step() returns 'batch' of the batch with its loss"),
        (ByHand, "optimises by hand: make its updates by memtools.integrations.lightning"),
    ],
)
def test_what_cannot_be_cut_is_left_and_trains_as_before(kind, why, tmp_path):
    plain, used = (fitted(tmp_path, is_used, kind()) for is_used in (False, True))
    assert why in str(used[2])
    assert parameters(used[1]).equal(parameters(plain[1]))
    same(used, plain)


def test_remove_puts_everything_back(tmp_path):
    made = trainer(tmp_path)
    epochs = made.fit_loop.epoch_loop
    places = [made, epochs.automatic_optimization, epochs.manual_optimization]
    before = [dict(vars(place)) for place in places]
    callbacks = list(made.callbacks)
    adapter = memtools.use(made)
    assert made.callbacks != callbacks
    assert "_make_closure" in vars(epochs.automatic_optimization)
    with pytest.raises(ValueError, match="already: call its remove"):
        memtools.use(made)
    adapter.remove()
    adapter.remove()
    assert made.callbacks == callbacks
    assert [dict(vars(place)) for place in places] == before
    memtools.use(made).remove()


def test_remove_in_the_middle_of_a_batch_is_refused(tmp_path):
    refused = []

    def removes(x: Any) -> Any:
        with pytest.raises(RuntimeError, match="in the middle of a batch"):
            adapter.remove()
        refused.append(0)
        return x

    made = trainer(tmp_path, max_steps=1)
    adapter = memtools.use(made, micro_batch_size=3)
    made.fit(Net(removes), loader())
    assert refused


def test_a_training_goes_on_from_a_checkpoint_in_the_middle_of_an_epoch(tmp_path):
    at = pl.callbacks.ModelCheckpoint(tmp_path, "at", every_n_train_steps=8, save_top_k=-1)
    fitted(tmp_path, False, callbacks=[at], enable_checkpointing=True)

    def resumed(is_used: bool) -> tuple[Any, Any]:
        made, net = trainer(tmp_path / f"again {is_used}"), Net()
        if is_used:
            memtools.use(made, micro_batch_size=3)
        made.fit(net, loader(), loader(), ckpt_path=tmp_path / "at.ckpt")
        return made, net

    used = resumed(True)
    assert len(used[1].losses) == 4
    same(used, resumed(False))


def test_a_strategy_that_accumulates_by_itself_is_refused(tmp_path, monkeypatch):
    made = trainer(tmp_path)
    monkeypatch.setattr(type(made.strategy), "handles_gradient_accumulation", True)
    before = dict(vars(made))
    with pytest.raises(ValueError, match="runs the backward pass and the update itself"):
        memtools.use(made)
    assert vars(made) == before


def test_another_strategy_on_several_processes_runs_whole_batches(tmp_path, monkeypatch):
    made = trainer(tmp_path)
    monkeypatch.setattr(type(made), "world_size", 2)
    assert "whole: SingleDeviceStrategy has its own backward pass" in str(memtools.use(made))


def test_the_old_package_is_known_too(tmp_path):
    import pytorch_lightning

    made = pytorch_lightning.Trainer(logger=False, enable_checkpointing=False)
    assert "Batches run in parts that fit" in str(memtools.use(made))


LIMITED = """
import resource, sys, warnings
warnings.simplefilter("ignore")
import lightning.pytorch as pl, torch
import memtools

torch.set_num_threads(1)

class Deep(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = [torch.nn.Linear(256, 256), torch.nn.Tanh()]
        self.layers = torch.nn.Sequential(*layers * 16)
    def training_step(self, batch, index):
        if index == 0:  # the first batch is small, and starts all threads
            used = int(open("/proc/self/statm").read().split()[5]) * 4096
            resource.setrlimit(resource.RLIMIT_DATA, (used + (96 << 20), -1))
        return self.layers(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = pl.Trainer(accelerator="cpu", max_epochs=1, enable_model_summary=False, **options)
if sys.argv[1] == "used":
    adapter = memtools.use(trainer)
batches = [torch.randn(rows, 256) for rows in (2, 4096, 4096)]
trainer.fit(Deep(), torch.utils.data.DataLoader(batches, batch_size=None))
print(trainer.global_step)
"""


def test_a_training_that_dies_of_its_limit_finishes(tmp_path):
    def run(kind: str) -> Any:
        command = [sys.executable, "-c", LIMITED, kind]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    plain, used = run("plain"), run("used")
    assert plain.returncode != 0
    assert "allocate memory" in plain.stderr
    assert used.returncode == 0, used.stderr
    assert used.stdout.split()[-1] == "3"

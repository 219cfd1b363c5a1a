"""GradAccumulator beside what trainers do: the same loop; whose gradient is the full batch's?"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from memtools import GradAccumulator

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # theirs, under a newer torch
    import lightning.pytorch as pl
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from lightning.fabric import Fabric

    from memtools.integrations.accelerate import accumulator
    from memtools.integrations.lightning import accumulator as lightning_accumulator

pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS = (12, 2, 5, 9, 3, 7)  # a window of 4 and a partial one of 2
STEPS = 4


@pytest.fixture(autouse=True)
def _no_singletons() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(4)
    return [(torch.randn(n, 3, generator=made), torch.randn(n, 1, generator=made)) for n in LENGTHS]


def start() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def reference(window: list[Any], model: nn.Module | None = None) -> torch.Tensor:
    """Gradient of the mean over all rows of the window, in float64."""
    model = copy.deepcopy(model or start()).double()
    x, y = (torch.cat(parts).double() for parts in zip(*window, strict=True))
    (model(x) - y).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def wrong_by(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


class Moves:
    """What the updates of SGD with a learning rate of 1 were: minus the gradient."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.models = model, [copy.deepcopy(model)]
        self.seen = [self.flat()]

    def flat(self) -> torch.Tensor:
        return torch.cat([p.detach().clone().flatten() for p in self.model.parameters()])

    def look(self) -> None:
        if not torch.equal(self.flat(), self.seen[-1]):
            self.seen.append(self.flat())
            self.models.append(copy.deepcopy(self.model))

    def gradients(self) -> list[torch.Tensor]:
        return [a - b for a, b in zip(self.seen, self.seen[1:], strict=False)]


def ours(acc: GradAccumulator, forward: Callable[[torch.Tensor], torch.Tensor], moves: Moves):
    for x, y in batches():
        with acc.micro_batch():
            acc.backward((forward(x) - y).square().sum(), weight=len(x))
        moves.look()
    acc.flush()
    moves.look()


def assert_full_batch(moves: Moves) -> None:
    windows = [batches()[:STEPS], batches()[STEPS:]]
    gradients = moves.gradients()
    assert len(gradients) == 2
    for found, window, model in zip(gradients, windows, moves.models, strict=False):
        assert wrong_by(found, reference(window, model)) < 1e-6


# --- plain torch, accelerate and Lightning as people write them -----------------------------------


def test_the_mean_of_means_is_far_off_in_a_loop_as_people_write_it():
    model = start()
    for x, y in batches()[:STEPS]:
        ((model(x) - y).square().mean() / STEPS).backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert wrong_by(found, reference(batches()[:STEPS])) > 0.1


def test_accelerate_is_off_by_lengths_and_halves_a_partial_window():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    loader = DataLoader(batches(), batch_size=None)
    model = start()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    moves = Moves(model)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        moves.look()
    first, second = moves.gradients()
    assert wrong_by(first, reference(batches()[:STEPS])) > 0.1
    model = moves.models[1].double()
    halved = sum((model(x.double()) - y.double()).square().mean() / 2 for x, y in batches()[STEPS:])
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(halved, model.parameters())])
    assert wrong_by(second, wanted / 2) < 1e-6  # divided by 4 where there are 2


def prepared(**options: Any) -> Any:
    accelerator = Accelerator(cpu=True, **options)
    model = start()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def test_with_accelerate_the_gradient_is_the_full_batchs():
    accelerator, model, optimizer, scheduler = prepared()
    acc = accumulator(accelerator, model, optimizer, STEPS, scheduler=scheduler)
    moves = Moves(model)
    ours(acc, model, moves)
    assert_full_batch(moves)
    assert scheduler.scheduler.last_epoch == 2
    assert acc.optimizer is optimizer.optimizer


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gradient_accumulation_steps": 4}, "steps=2, and the accelerator has .*_steps=4; give"),
        ({"mixed_precision": "fp16"}, 'mixed_precision="fp16" scales losses'),
    ],
)
def test_what_accelerate_would_do_a_second_time_is_refused(options, words):
    accelerator = Accelerator(cpu=True)
    for name, value in options.items():
        kind = type("Other", (), {"gradient_accumulation_steps": 1, "mixed_precision": "no"})
        setattr(kind, name, value)
        accelerator = kind()
    model = start()
    with pytest.raises(ValueError, match=words):
        accumulator(accelerator, model, torch.optim.SGD(model.parameters(), 1.0), 2)


def test_the_steps_of_the_accelerator_are_those_of_an_update():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = start()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    assert accumulator(accelerator, model, optimizer).report().steps == 3
    assert accumulator(accelerator, model, optimizer, 3).report().steps == 3
    assert accumulator(Accelerator(cpu=True), model, optimizer, 5).report().steps == 5


@pytest.mark.parametrize("fused", [False, True])
def test_with_fabric_the_gradient_is_the_full_batchs(fused):
    """A fused optimizer in a wrapper: what it divides by would be set on the wrapper."""
    fabric = Fabric(accelerator="cpu", devices=1)
    model = start()
    moves = Moves(model)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 1.0, fused=fused))
    ours(GradAccumulator(model, optimizer, STEPS), model, moves)
    assert_full_batch(moves)


class Module(pl.LightningModule):
    """Optimises by hand, with the accumulator or as Lightning's guide has it."""

    def __init__(self, by_hand: bool = True) -> None:
        super().__init__()
        self.net, self.automatic_optimization = start(), not by_hand
        self.moves = Moves(self.net)
        self.acc: Any = None

    def on_fit_start(self) -> None:
        if not self.automatic_optimization:
            self.acc = lightning_accumulator(self, STEPS)

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        if self.acc is None:
            return (self.net(x) - y).square().mean()
        with self.acc.micro_batch():
            self.acc.backward((self.net(x) - y).square().sum(), weight=len(x))
        self.moves.look()
        if self.trainer.is_last_batch:
            self.acc.flush()
        return None

    def on_train_batch_end(self, *args: Any) -> None:
        self.moves.look()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 1.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 100)]


def fit(module: Module, folder: Path, **options: Any) -> Any:
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(folder),
        **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches(), batch_size=None))
    return trainer


def test_with_lightning_the_gradient_is_the_full_batchs(tmp_path):
    module = Module()
    trainer = fit(module, tmp_path)
    assert_full_batch(module.moves)
    assert trainer.global_step == 2
    assert module.lr_schedulers().last_epoch == 2


def test_lightnings_own_accumulation_is_off_by_lengths(tmp_path):
    module = Module(by_hand=False)
    fit(module, tmp_path, accumulate_grad_batches=STEPS)
    assert wrong_by(module.moves.gradients()[0], reference(batches()[:STEPS])) > 0.1


def test_what_lightning_would_do_a_second_time_is_refused(tmp_path):
    module = Module(by_hand=False)
    with pytest.raises(ValueError, match="automatic_optimization = False"):
        lightning_accumulator(module)
    module.automatic_optimization = False
    module._trainer = type("Trainer", (), {"precision": "16-mixed"})()
    with pytest.raises(ValueError, match='precision="16-mixed"'):
        lightning_accumulator(module)

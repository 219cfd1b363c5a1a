"""wrap_step(): a trainer's step, with backward() and optimizer.step() in it, in micro-batches."""

from __future__ import annotations

import math
import threading
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import memtools
from tests.grad.pressurecases import Machine, batch
from tests.kit.oominject import Inject

pytestmark = pytest.mark.usefixtures("frozen")
ROWS = 24


class Trainer:
    """What people write: everything in one step()."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(3)
        self.inject = Inject()
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh())
        self.head = torch.nn.Linear(8, 1)
        self.all = torch.nn.ModuleList([self.model, self.head])
        self.optimizer = torch.optim.SGD(self.all.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.options = options
        self.sizes: list[int] = []

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        return (self.head(self.inject(self.model(x))) - 0.5).square().mean()

    def step(self, x: torch.Tensor) -> Any:
        self.optimizer.zero_grad()
        loss = self.loss(x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.all.parameters(), 0.5)
        self.optimizer.step()
        self.scheduler.step()
        return {"loss": loss.item(), "tensor": loss, "epoch": 3, "note": "fine", "none": None}

    def bits(self) -> list[float]:
        return [v for p in self.all.parameters() for v in p.detach().flatten().tolist()]


def wrapped(trainer: Trainer, **options: Any) -> memtools.GradAccumulator:
    settings = {"max_norm": 0.5, "scheduler": trainer.scheduler, "micro_batch_size": 8, **options}
    return memtools.GradAccumulator(trainer.all, trainer.optimizer, **settings)


def test_three_updates_are_those_of_whole_batches() -> None:
    plain, trainer = Trainer(), Trainer()
    acc = wrapped(trainer)
    step = acc.wrap_step(trainer.step)
    for index in range(3):
        wanted, found = plain.step(batch(ROWS, index)), step(batch(ROWS, index))
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert found["tensor"].item() == pytest.approx(wanted["loss"], rel=1e-5)
        assert (found["epoch"], found["note"], found["none"]) == (3, "fine", None)
        assert trainer.bits() == pytest.approx(plain.bits(), rel=1e-5, abs=1e-7)
    assert trainer.sizes == [8] * 9
    assert trainer.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]
    assert acc.report().updates == 3


def test_everything_that_was_held_back_is_as_before() -> None:
    trainer = Trainer()
    names = (torch.Tensor.backward, torch.autograd.backward, torch.nn.Module.zero_grad,
             torch.nn.utils.clip_grad_norm_, torch.amp.GradScaler.step)  # fmt: skip
    held = vars(trainer.optimizer).get("step"), vars(trainer.scheduler).get("step")
    wrapped(trainer).wrap_step(trainer.step)(batch(ROWS))
    now = (torch.Tensor.backward, torch.autograd.backward, torch.nn.Module.zero_grad,
           torch.nn.utils.clip_grad_norm_, torch.amp.GradScaler.step)  # fmt: skip
    assert all(one is other for one, other in zip(names, now, strict=True))
    assert held == (vars(trainer.optimizer).get("step"), vars(trainer.scheduler).get("step"))
    assert "zero_grad" not in vars(trainer.optimizer)


def test_two_threads_train_at_once_and_leave_torch_as_it_was() -> None:
    """The first begins first and ends first, while the second is in the middle of its step."""
    before = torch.Tensor.backward, torch.nn.utils.clip_grad_norm_, clip_grad_norm_
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    class First(Trainer):
        def step(self, x: torch.Tensor) -> Any:
            first_is_in.set()
            assert second_is_in.wait(30)
            return super().step(x)

    class Second(Trainer):
        def step(self, x: torch.Tensor) -> Any:
            if not second_is_in.is_set():
                second_is_in.set()
                assert first_is_out.wait(30)
            return super().step(x)

    first, second = First(), Second()

    def train() -> None:
        wrapped(first, micro_batch_size=ROWS).wrap_step(first.step)(batch(ROWS))
        first_is_out.set()

    thread = threading.Thread(target=train)
    thread.start()
    assert first_is_in.wait(30)
    wrapped(second).wrap_step(second.step)(batch(ROWS))
    thread.join()
    assert (torch.Tensor.backward, torch.nn.utils.clip_grad_norm_, clip_grad_norm_) == before
    plain = Trainer()
    plain.step(batch(ROWS))
    for trainer in (first, second):
        assert trainer.bits() == pytest.approx(plain.bits(), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_out_of_memory_in_it_halves_and_counts_once(phase: str) -> None:
    plain, trainer = Trainer(), Trainer()
    trainer.inject = Inject(**{phase: {1}})
    step = wrapped(trainer).wrap_step(trainer.step)
    wanted, found = plain.step(batch(ROWS)), step(batch(ROWS))
    assert trainer.sizes == [8, 8, 4, 4, 4, 4]
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert trainer.bits() == pytest.approx(plain.bits(), rel=1e-5, abs=1e-7)


def test_a_window_that_begins_anew_counts_results_once() -> None:
    plain, trainer = Trainer(), Trainer()
    trainer.inject = Inject(backward={1})
    step = wrapped(trainer, undo="redo").wrap_step(trainer.step)
    wanted, found = plain.step(batch(ROWS)), step(batch(ROWS))
    assert trainer.sizes == [8, 8, 8, 4, 4, 4, 4]
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)


def test_with_a_monitor_it_begins_low_and_climbs() -> None:
    plain, trainer = Trainer(), Trainer()
    machine = Machine(10_000, base=100, row=10)
    acc = wrapped(trainer, monitor=machine)
    machine.serve(acc)
    acc.wrap_step(trainer.step)(batch(ROWS))
    plain.step(batch(ROWS))
    assert trainer.sizes == [2, 2, 4, 8, 8]
    assert trainer.bits() == pytest.approx(plain.bits(), rel=1e-5, abs=1e-7)


def test_a_loss_of_tokens_has_their_number_as_its_weight() -> None:
    """Rows of 1 to 6 tokens: the mean over tokens is not the mean over rows."""

    class Tokens(Trainer):
        def step(self, x: torch.Tensor, n: torch.Tensor) -> Any:  # type: ignore[override]
            self.optimizer.zero_grad(set_to_none=False)
            self.sizes.append(len(x))
            error = (self.head(self.model(x)) - 0.5).square().squeeze(1)
            loss = (error * n).sum() / n.sum()
            loss.backward()
            self.optimizer.step()
            return loss

    n = torch.arange(ROWS) % 6 + 1
    plain, trainer = Tokens(), Tokens()
    acc = wrapped(trainer, max_norm=None, scheduler=None)
    step = acc.wrap_step(trainer.step, weight=lambda x, n: n.sum())
    wanted, found = plain.step(batch(ROWS), n), step(batch(ROWS), n)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert trainer.bits() == pytest.approx(plain.bits(), rel=1e-5, abs=1e-7)
    by_name = step(batch(ROWS), n=n)
    assert by_name.item() == pytest.approx(plain.step(batch(ROWS), n=n).item(), rel=1e-5)


def test_a_sum_is_not_divided() -> None:
    class Sums(Trainer):
        def step(self, x: torch.Tensor) -> Any:
            self.all.zero_grad()
            self.sizes.append(len(x))
            loss = (self.head(self.model(x)) - 0.5).square().sum() / 100
            loss.backward()
            self.optimizer.step()
            return (loss.item(), len(x))

    plain, trainer = Sums(), Sums()
    step = wrapped(trainer, max_norm=None, scheduler=None).wrap_step(trainer.step, reduction="sum")
    wanted, found = plain.step(batch(ROWS)), step(batch(ROWS))
    assert found == (pytest.approx(wanted[0], rel=1e-5), ROWS)
    assert trainer.bits() == pytest.approx(plain.bits(), rel=1e-5, abs=1e-7)


def test_two_losses_of_one_step_are_parts_of_it() -> None:
    class Two(Trainer):
        def step(self, x: torch.Tensor) -> Any:
            self.optimizer.zero_grad()
            self.sizes.append(len(x))
            hidden = self.model(x)
            self.head(hidden).square().mean().backward(retain_graph=True)
            (0.1 * hidden.square().mean()).backward()
            self.optimizer.step()

    plain, trainer = Two(), Two()
    step = wrapped(trainer, max_norm=None, scheduler=None).wrap_step(trainer.step)
    assert step(batch(ROWS)) is plain.step(batch(ROWS)) is None
    assert trainer.bits() == pytest.approx(plain.bits(), rel=1e-5, abs=1e-7)


class Scaled(Trainer):
    """With a GradScaler, as for fp16."""

    def step(self, x: torch.Tensor) -> Any:
        scaler = self.options["scaler"]
        self.optimizer.zero_grad()
        loss = self.loss(x)
        scaler.scale(loss).backward()
        scaler.unscale_(self.optimizer)
        scaler.step(self.optimizer)
        scaler.update()
        return loss.item()


def test_the_accumulators_loss_scale_takes_the_place_of_the_scalers() -> None:
    plain, trainer = Trainer(), Scaled(scaler=torch.amp.GradScaler("cpu"))
    acc = wrapped(trainer, max_norm=None, scheduler=None, precision="fp16",
                  init_scale=2.0**8)  # fmt: skip
    step = acc.wrap_step(trainer.step)
    x = batch(ROWS)
    found = step(x)
    with torch.autocast("cpu", torch.float16):
        assert found == pytest.approx(plain.loss(x).item(), rel=1e-2)
    assert acc.report().updates == 1
    assert trainer.options["scaler"].get_scale() == 2.0**16


def test_a_scaler_that_is_off_is_left_alone() -> None:
    plain, trainer = Trainer(), Scaled(scaler=torch.amp.GradScaler("cpu", enabled=False))
    step = wrapped(trainer, max_norm=None, scheduler=None).wrap_step(trainer.step)
    assert step(batch(ROWS)) == pytest.approx(plain.loss(batch(ROWS)).item(), rel=1e-5)


def test_a_function_that_clips_by_a_name_of_its_own_module() -> None:
    plain, trainer = Trainer(), Trainer()

    def step(x: torch.Tensor) -> float:
        trainer.optimizer.zero_grad()
        loss = trainer.loss(x)
        loss.backward()
        norm = clip_grad_norm_(trainer.all.parameters(), max_norm=0.5)
        trainer.optimizer.step()
        trainer.scheduler.step()
        return float(norm)

    acc = wrapped(trainer)
    wrapped_step = acc.wrap_step(step)
    assert wrapped_step(batch(ROWS)) == 0.0
    plain.step(batch(ROWS))
    assert trainer.bits() == pytest.approx(plain.bits(), rel=1e-5, abs=1e-7)
    last = acc.report().last
    assert last is not None
    assert wrapped_step(batch(ROWS)) == pytest.approx(last.norm)


def test_a_function_that_clips_values() -> None:
    class Clips(Trainer):
        def step(self, x: torch.Tensor) -> Any:
            self.optimizer.zero_grad()
            self.loss(x).backward()
            assert torch.nn.utils.clip_grad_value_(self.all.parameters(), 0.01) is None
            self.optimizer.step()

    plain, trainer = Clips(), Clips()
    wrapped(trainer, max_norm=None, max_value=0.01, scheduler=None).wrap_step(trainer.step)(
        batch(ROWS)
    )
    plain.step(batch(ROWS))
    assert trainer.bits() == pytest.approx(plain.bits(), rel=1e-5, abs=1e-7)


def test_another_module_may_drop_its_gradients() -> None:
    trainer, other = Trainer(), torch.nn.Linear(2, 1)
    other.weight.grad = torch.ones(1, 2)

    def step(x: torch.Tensor) -> None:
        other.zero_grad()
        trainer.step(x)

    wrapped(trainer).wrap_step(step)(batch(ROWS))
    assert other.weight.grad is None


def test_no_result_is_kept_after_the_call() -> None:
    trainer, results = Trainer(), []

    class Result:
        pass

    def step(x: torch.Tensor) -> Result:
        trainer.step(x)
        result = Result()
        results.append(weakref.ref(result))
        return result

    wrapped_step = wrapped(trainer).wrap_step(step, combine=lambda found, weights: len(found))
    assert wrapped_step(batch(ROWS)) == 3
    assert [result() for result in results] == [None] * 3


def test_combine_gets_all_results_and_weights() -> None:
    class Outputs(Trainer):
        def step(self, x: torch.Tensor) -> Any:
            super().step(x)
            return x[:, 0]

    trainer = Outputs()
    acc = wrapped(trainer)
    step = acc.wrap_step(trainer.step, combine=lambda found, weights: (torch.cat(found), weights))
    found, weights = step(batch(ROWS))
    assert torch.equal(found, batch(ROWS)[:, 0])
    assert weights == [8.0, 8.0, 8.0]


class Pair(NamedTuple):
    loss: float
    right: list[int]


def test_named_tuples_and_lists_are_averaged_field_by_field() -> None:
    class Named(Trainer):
        def step(self, x: torch.Tensor) -> Any:
            super().step(x)
            return Pair(float(len(x)), [len(self.sizes)])

    trainer = Named()
    acc = wrapped(trainer, micro_batch_size=16)
    found = acc.wrap_step(trainer.step)(batch(ROWS))
    assert found == Pair((16 * 16 + 8 * 8) / 24, [pytest.approx((16 * 1 + 8 * 2) / 24)])


# --- what is refused ---


def refusals() -> dict[str, tuple[str, dict[str, Any], Any]]:
    def clips_more(t: Trainer, x: Any) -> None:
        t.loss(x).backward()
        torch.nn.utils.clip_grad_norm_(t.all.parameters(), 0.25)
        t.optimizer.step()

    def clips_another_norm(t: Trainer, x: Any) -> None:
        t.loss(x).backward()
        torch.nn.utils.clip_grad_norm_(t.all.parameters(), 0.5, norm_type=1.0)
        t.optimizer.step()

    def clips_values(t: Trainer, x: Any) -> None:
        t.loss(x).backward()
        torch.nn.utils.clip_grad_value_(t.all.parameters(), 0.02)
        t.optimizer.step()

    def clips_a_part(t: Trainer, x: Any) -> None:
        t.loss(x).backward()
        for part in (t.model, t.head):
            torch.nn.utils.clip_grad_norm_(part.parameters(), 0.5)
        t.optimizer.step()

    def steps_by_an_old_name(t: Trainer, x: Any) -> None:
        t.loss(x).backward()
        t.options["step"]()

    def plateau(t: Trainer, x: Any) -> None:
        t.loss(x).backward()
        t.optimizer.step()
        t.options["plateau"].step(1.0)

    def returns_other_fields(t: Trainer, x: Any) -> Any:
        t.loss(x).backward()
        t.optimizer.step()
        return {"loss": 1.0} if len(t.sizes) == 1 else {"loss": 1.0, "more": 2.0}

    def scales_by_hand(t: Trainer, x: Any) -> None:
        t.loss(x).backward()
        for p in t.all.parameters():
            p.grad.mul_(0.5)  # type: ignore[union-attr]
        t.optimizer.step()

    def twice(t: Trainer, x: Any) -> None:
        t.loss(x).backward()
        t.optimizer.step()
        t.loss(x).backward()
        t.optimizer.step()

    def steps_twice(t: Trainer, x: Any) -> None:
        t.loss(x).backward()
        t.optimizer.step()
        t.optimizer.step()

    def never(t: Trainer, x: Any) -> None:
        t.loss(x).backward()

    def no_backward(t: Trainer, x: Any) -> None:
        t.loss(x)
        t.optimizer.step()

    def other(t: Trainer, x: Any) -> None:
        t.loss(x).backward()
        more = torch.nn.Parameter(torch.ones(1))
        torch.optim.SGD([more], lr=0.1).step()
        t.optimizer.step()

    def closure(t: Trainer, x: Any) -> None:
        t.loss(x).backward()
        t.optimizer.step(lambda: 0.0)

    def schedules(t: Trainer, x: Any) -> None:
        t.loss(x).backward()
        t.optimizer.step()
        t.scheduler.step()

    def changes(t: Trainer, x: Any) -> None:
        t.loss(x).backward()
        t.optimizer.step()
        t.optimizer.param_groups[0]["lr"] = 0.01

    def by_function(t: Trainer, x: Any) -> None:
        torch.autograd.backward(t.loss(x))
        t.optimizer.step()

    def with_inputs(t: Trainer, x: Any) -> None:
        t.loss(x).backward(inputs=list(t.all.parameters()))
        t.optimizer.step()

    def scaled(t: Trainer, x: Any) -> None:
        torch.amp.GradScaler("cpu").scale(t.loss(x)).backward()
        t.optimizer.step()

    def arguments(t: Trainer, x: Any) -> None:
        t.loss(x).backward()
        t.optimizer.step()
        t.scheduler.step(3)

    return {
        "clips more": ("clips gradients by torch's clip_grad_norm_ to 0.25, and GradAccumulator "
                       "has max_norm=0.5", {}, clips_more),
        "another norm": ("clip_grad_norm_ to 0.5, .* \\(and the 2-norm\\)", {},
                         clips_another_norm),
        "clips values": ("clip_grad_value_ to 0.02, and GradAccumulator has max_value=0.01",
                         {"max_norm": None, "max_value": 0.01}, clips_values),
        "clips a part": ("clips gradients by torch's clip_grad_norm_ without 2 of the optimizer's "
                         "4 parameters", {}, clips_a_part),
        "an old name": ("called a step\\(\\) of the optimizer that was looked up before", {},
                        steps_by_an_old_name),
        "a scheduler with a step of its own": ("stepped a scheduler \\(ReduceLROnPlateau\\)", {},
                                               plateau),
        "other fields": ("returned other fields .* give wrap_step\\(\\) combine", {},
                         returns_other_fields),
        "scales by hand": ("left gradients that were written to", {}, scales_by_hand),
        "two updates": ("called backward\\(\\) after optimizer.step\\(\\)", {}, twice),
        "steps twice": ("called optimizer.step\\(\\) twice", {}, steps_twice),
        "never steps": ("did not call optimizer.step\\(\\)", {}, never),
        "no backward": ("did not call backward", {}, no_backward),
        "another optimizer": ("stepped a second optimizer \\(SGD\\)", {}, other),
        "closure": ("with a closure", {}, closure),
        "a scheduler": ("stepped a scheduler \\(StepLR\\)", {"scheduler": None}, schedules),
        "groups": ("changed lr of the optimizer's groups", {}, changes),
        "autograd.backward": ("call backward\\(\\) of the loss", {}, by_function),
        "inputs": ("called backward\\(\\) with a gradient", {}, with_inputs),
        "a scaler": ("precision='fp16'", {}, scaled),
        "a scheduler's argument": ("scheduler.step\\(\\) with arguments", {}, arguments),
    }  # fmt: skip


@pytest.mark.parametrize("case", refusals())
def test_what_cannot_be_wrapped_is_refused_and_nothing_moves(case: str) -> None:
    words, options, function = refusals()[case]
    trainer = Trainer()
    trainer.options["step"] = trainer.optimizer.step
    trainer.options["plateau"] = torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.optimizer)
    before = trainer.bits()
    acc = wrapped(trainer, **options)

    def step(x: torch.Tensor) -> Any:
        return function(trainer, x)

    with pytest.raises(RuntimeError, match=rf"wrap_step\(\): .*step\(\) .*{words}"):
        acc.wrap_step(step)(batch(ROWS))
    assert trainer.bits() == before
    assert acc.report().updates == 0
    acc.wrap_step(trainer.step)
    assert acc.step(batch(ROWS), lambda x: trainer.loss(x)).micro_batches == 3  # it goes on


def test_a_result_without_a_mean_is_refused() -> None:
    trainer = Trainer()

    def step(x: torch.Tensor) -> Any:
        trainer.step(x)
        return x

    with pytest.raises(TypeError, match=r"returned a Tensor, .* give wrap_step\(\) combine"):
        wrapped(trainer).wrap_step(step)(batch(ROWS))


def test_what_split_cuts_needs_a_weight() -> None:
    trainer = Trainer()
    acc = wrapped(trainer)
    with pytest.raises(ValueError, match="give wrap_step\\(\\) weight"):
        acc.wrap_step(trainer.step, split=lambda x, size: list(x.split(size)))(batch(ROWS))
    step = acc.wrap_step(trainer.step, split=lambda x, size: list(x.split(size)), weight=len)
    assert math.isfinite(step(batch(ROWS))["loss"])


@pytest.mark.parametrize(
    ("function", "options", "error", "words"),
    [
        (3, {}, TypeError, "a function that trains on a batch, got int"),
        (Trainer, {}, TypeError, "a function that trains on a batch, got type"),
        (lambda: None, {}, TypeError, "takes no argument"),
        (lambda x: None, {"reduction": "max"}, ValueError, "reduction is one of mean, sum"),
        (lambda x: None, {"weight": 3}, TypeError, "weight is a function"),
        (lambda x: None, {"combine": 3}, TypeError, "combine is a function"),
    ],
)
def test_arguments_that_make_no_sense(
    function: Any, options: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        wrapped(Trainer()).wrap_step(function, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("weight", "error", "words"),
    [(None, TypeError, "weight is a number"), (-1.0, ValueError, "weight counts units"),
     (torch.ones(2), TypeError, "weight is a number")],
)  # fmt: skip
def test_a_weight_that_makes_no_sense_is_refused_and_nothing_moves(
    weight: Any, error: type[Exception], words: str, reduction: str
) -> None:
    trainer = Trainer()
    before = trainer.bits()
    step = wrapped(trainer).wrap_step(trainer.step, weight=lambda x: weight, reduction=reduction)
    with pytest.raises(error, match=words):
        step(batch(ROWS))
    assert trainer.bits() == before


def test_generators_and_calls_without_a_batch_are_refused() -> None:
    acc = wrapped(Trainer())

    def generator(x: Any) -> Any:
        yield x

    with pytest.raises(TypeError, match="not a generator or a coroutine"):
        acc.wrap_step(generator)
    with pytest.raises(TypeError, match="called without a batch"):
        acc.wrap_step(lambda x: None)()  # type: ignore[call-arg]

"""GradAccumulator: a run that is stopped anywhere goes on bit for bit."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from memtools import GradAccumulator
from tests.grad.accumulatecases import batches, everything, loss_sum, net, same

STEPS = 3


class Run:
    """A model with dropout under fp16 with clipping and a scheduler."""

    def __init__(self, **settings):
        self.model = net(dropout=0.3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.acc = GradAccumulator(
            self.model,
            self.optimizer,
            **{
                "steps": STEPS,
                "precision": "fp16",
                "max_norm": 1.0,
                "scheduler": self.scheduler,
                "init_scale": 2.0**8,
            }
            | settings,
        )
        self.acc._runner.precision.scale.growth_interval = 1

    def go(self, data):
        for x in data:
            with self.acc.micro_batch():
                self.acc.backward(loss_sum(self.model, x).float(), weight=len(x))

    def parts(self):
        return (self.model, self.optimizer, self.scheduler, self.acc)

    def save(self):
        buffer = io.BytesIO()
        torch.save([part.state_dict() for part in self.parts()], buffer)
        return buffer.getvalue()

    def load(self, saved):
        states = torch.load(io.BytesIO(saved), weights_only=True)
        for part, state in zip(self.parts(), states, strict=True):
            part.load_state_dict(state)


@pytest.mark.parametrize("stop", range(2 * STEPS + 1))
def test_a_run_goes_on_bit_for_bit(stop):
    data = batches((3, 5, 2, 4, 1, 6, 3, 2))
    torch.manual_seed(1)
    straight = Run()
    straight.go(data[:stop])
    saved = straight.save()
    straight.go(data[stop:])
    straight.acc.flush()
    torch.manual_seed(99)
    resumed = Run()
    resumed.go(data[:1])  # what it did before is forgotten
    resumed.load(saved)
    resumed.go(data[stop:])
    report = resumed.acc.flush()
    assert same(list(resumed.model.parameters()), list(straight.model.parameters()))
    assert resumed.acc.scale == straight.acc.scale
    one, other = straight.acc.report(), resumed.acc.report()
    assert report is not None
    for name in ("windows", "updates", "micro_batches", "weight", "least_scale", "skipped"):
        assert getattr(one, name) == getattr(other, name), name


def test_saving_changes_nothing_and_is_a_copy():
    run = Run()
    run.go(batches((3, 4)))
    before = copy.deepcopy(everything(run.acc))
    state = run.acc.state_dict()
    kept = copy.deepcopy(state)
    assert same(everything(run.acc), before)
    run.go(batches((2,)))
    assert same(state, kept)


def test_random_state_is_the_programs_where_it_asks_for_that():
    run = Run()
    state = run.acc.state_dict(rng=False)
    assert state["rng"] is None
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run.acc.load_state_dict(state)
    assert torch.equal(torch.rand(3), expected)


def broken(state, change):
    found = copy.deepcopy(state)
    change(found)
    return found


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: s.update(version=9), "version 9, and this memtools reads 1"),
        (lambda s: s.pop("window"), "not a GradAccumulator state: 'window' is missing"),
        (lambda s: s["scale"].update(value=0.0), "above 0 and finite"),
        (lambda s: s["totals"].pop("updates"), "'updates' is missing"),
        (lambda s: s.update(gradients=None), "after 1 of 3 micro-batches without their gradients"),
        (lambda s: s["gradients"].update(other=torch.ones(1)), "gradient of other, which is not"),
        (lambda s: s["gradients"].update({"0.bias": torch.ones(1)}), "gradient of 0.bias is"),
        (lambda s: s["window"].update(weight=float("nan")), "window.'weight'. must be 0 or more"),
        (lambda s: s["window"].update(count=3), "after 3 of 3 micro-batches, where a window"),
        (lambda s: s.update(steps=4), "in the middle of a window of 4 micro-batches.*steps is 3"),
        (
            lambda s: s.update(micro_batch_size="x"),
            "micro_batch_size must be a whole number, got str",
        ),
        (lambda s: s.update(micro_batch_size=0), "micro_batch_size must be at least 1 row, got 0"),
        (lambda s: s["totals"].update(updates=torch.ones(2)), "totals.'updates'. must be a whole"),
        (lambda s: s["scale"].update(value=float("nan")), "scale.'value'. must be 0 or more"),
        (lambda s: s.update(scale=torch.ones(1)), "scale must be a dict, got Tensor"),
        (lambda s: s["rng"].update(cpu=3), "rng must have random states of torch"),
        (
            lambda s: s["gradients"].update({"0.bias": 3}),
            "gradient of 0.bias must be a tensor, got int",
        ),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, match):
    run = Run()
    run.go(batches((2,)))
    state = broken(run.acc.state_dict(), change)
    before = copy.deepcopy(everything(run.acc))
    random = torch.get_rng_state()
    with pytest.raises((TypeError, ValueError), match=match):
        run.acc.load_state_dict(state)
    assert same(everything(run.acc), before)
    assert torch.equal(torch.get_rng_state(), random)


def leaves(state, path=()):
    if not isinstance(state, dict):
        yield path
        return
    yield path
    for name, value in state.items():
        yield from leaves(value, (*path, name))


WRONG = (torch.ones(2), torch.tensor(3.0), "x", float("nan"), -1, [1], {}, 1.5, True, None, 3)


def test_anything_in_place_of_anything_is_one_sentence_and_changes_nothing_or_is_loaded():
    run = Run()
    run.go(batches((2,)))
    run.acc._get_back_off()
    good, before = run.acc.state_dict(), copy.deepcopy(everything(run.acc))
    random, refused = torch.get_rng_state(), 0
    for path in leaves(good):
        for wrong in WRONG if path else ():
            state = copy.deepcopy(good)
            place = state
            for name in path[:-1]:
                place = place[name]
            place[path[-1]] = wrong
            try:
                run.acc.load_state_dict(state)
            except (TypeError, ValueError) as error:
                refused += 1
                assert same(everything(run.acc), before), (path, wrong)
                assert torch.equal(torch.get_rng_state(), random), (path, wrong)
                assert str(error).startswith("this"), (path, wrong, error)
            else:
                run.acc.load_state_dict(good)
    assert refused > 200


def test_a_state_that_is_none():
    with pytest.raises(TypeError, match="takes a dict, got list"):
        Run().acc.load_state_dict([])


def test_between_windows_steps_may_differ():
    run = Run()
    run.go(batches((2, 2, 2)))
    other = Run(steps=5)
    other.acc.load_state_dict(run.acc.state_dict(gradients=False))
    assert other.acc.steps == 5
    assert other.acc.report().updates == 1


def test_a_torn_window_is_loaded_over():
    run = Run()
    state = run.acc.state_dict()
    with pytest.raises(KeyError), run.acc.micro_batch():  # noqa: PT012
        run.acc.backward(loss_sum(run.model, torch.ones(2, 8)).float(), weight=2)
        raise KeyError
    run.acc.load_state_dict(state)
    run.go(batches((2, 2, 2)))
    assert run.acc.report().updates == 1

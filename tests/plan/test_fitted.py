"""Plans of steps that make shapes of values: fitted to small real steps, beside the large one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memtools
from memtools._blocks.lifetimes import Tracer
from memtools._plan.plan import Plan


def trained(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(loss())
        optimizer.step()

    return step


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(64, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return x + out


def experts(batch: int = 128, count: int = 8) -> Any:
    """A mixture of experts by index. With few rows some experts get none."""
    model = nn.Sequential(Experts(count), Experts(count))
    return trained(model, lambda: model(torch.randn(8 * batch, 64)).square().mean())


def masked(batch: int = 128) -> Any:
    """A loss on a third of the tokens, whose logits are most of the peak."""
    model = nn.ModuleList([nn.Embedding(500, 64), nn.Linear(64, 500)])

    def loss() -> torch.Tensor:
        tokens, is_masked = torch.randint(500, (batch, 64)), torch.rand(batch, 64) < 0.33
        return functional.cross_entropy(model[1](model[0](tokens)[is_masked]), tokens[is_masked])

    return trained(model, loss)


def contrastive(batch: int = 128) -> Any:
    """All pairs of a batch, without shapes of values."""
    model = nn.Linear(64, 64)

    def loss() -> torch.Tensor:
        x = model(torch.randn(batch, 64))
        return functional.cross_entropy(x @ x.T, torch.arange(batch))

    return trained(model, loss)


def on_cuda(batch: int = 128) -> Any:
    model = nn.Linear(64, 64, device="cuda")
    return trained(model, lambda: model(torch.randn(batch, 64).cuda()).square().mean())


def real_peak(make: Callable[[], Any], seed: int) -> int:
    with torch.random.fork_rng(devices=[]), Tracer() as tracer:
        torch.manual_seed(seed)
        step = make()
        for _ in range(2):
            tracer.step_ended()
            step()
    trace = tracer.trace()
    return trace.peak(trace.steps[-1])[1]


@pytest.mark.parametrize(
    ("make", "measured", "width"),
    [(experts, [8, 16], 0.06), (masked, [4, 8], 0.3), (masked, [8, 16, 32], 0.2)],
)
def test_the_interval_holds_the_peak_of_the_real_step(
    make: Any, measured: list[int], width: float
) -> None:
    with pytest.raises(ValueError, match=r"`--measure batch=8,16` fits the plan to real steps"):
        memtools.plan(make, device="cpu")
    before = torch.get_rng_state()
    plan = memtools.plan(make, measure={"batch": measured}, device="cpu")
    assert torch.equal(before, torch.get_rng_state())
    fit = plan.fit
    assert fit is not None
    assert (fit.argument, fit.measured) == ("batch", tuple(measured))
    for seed in range(100, 104):
        assert fit.low_bytes <= real_peak(make, seed) <= fit.high_bytes
    assert fit.low_bytes < plan.peak_bytes < fit.high_bytes
    assert fit.high_bytes - fit.low_bytes <= width * plan.peak_bytes
    assert plan.sentence().endswith(
        f"; fitted to measured steps of batch {' and '.join(map(str, measured))}: {fit.between}"
    )
    assert plan.as_json()["fit"] == fit._asdict()


@pytest.mark.parametrize("make", [contrastive, on_cuda])
def test_a_step_without_such_shapes_is_fitted_to_its_exact_plan(make: Any) -> None:
    exact = memtools.plan(make)
    plan = memtools.plan(make, measure={"batch": [4, 8]})
    assert plan.peak_bytes == pytest.approx(exact.peak_bytes, rel=1e-3)
    assert plan.fit is not None
    assert plan.fit.high_bytes == pytest.approx(1.01 * plan.peak_bytes, rel=1e-3)


def test_limits_hold_the_end_of_the_interval() -> None:
    def plan(limit: int) -> Plan:
        return memtools.plan(masked, limits=[limit], measure={"batch": [4, 8]}, device="cpu")

    fit = plan(1).fit
    assert fit is not None
    assert [plan(fit.high_bytes + more).limits[0].fits for more in (-1024, 1024)] == [False, True]
    assert plan(fit.high_bytes - 1024).limits[0].fits_with.startswith("2 micro-batches")


def test_settings_are_fitted_to_the_same_steps() -> None:
    made = list[int]()

    def make(batch: int) -> Any:
        made.append(batch)
        return masked(batch)

    plans = memtools.plan(
        make, vary={"batch": [64, 128]}, measure={"batch": [4, 8]}, limits=["1 GiB"]
    )
    assert made == 4 * [4] + 4 * [8]
    large, small = (one.plan for one in plans.settings)
    assert large.peak_bytes > 1.8 * small.peak_bytes
    assert large.fit is not None
    assert plans.table().splitlines()[0].endswith(", fitted to measured steps of batch 4 and 8")
    assert large.fit.between in plans.table()
    assert plans.best[0].reserved_bytes == large.reserved_bytes


def no_default(batch: int) -> Any:
    return masked(batch)


def a_text(batch: str = "large") -> Any:
    return masked(len(batch))


def failing(batch: int = 64) -> Any:
    torch.zeros(batch)[64]


@pytest.mark.parametrize(
    ("make", "measure", "kind", "says"),
    [
        (masked, ["batch"], TypeError, "measure must be a dict of a list of numbers, got list"),
        (masked, {}, ValueError, "measure must have one argument of the function, got 0"),
        (masked, {"rows": [1, 2]}, ValueError, "has no argument rows: it has batch"),
        (masked, {"batch": 8}, TypeError, "measure must have a list of values for batch"),
        (masked, {"batch": [8, 8]}, ValueError, "2 or more different values for batch"),
        (masked, {"batch": [0, 8]}, ValueError, "each batch that is measured must be at least 1"),
        (no_default, {"batch": [1, 2]}, ValueError, "no default for batch: vary it too"),
        (a_text, {"batch": [1, 2]}, TypeError, "the batch to plan for must be an int, got str"),
        (
            failing,
            {"batch": [1, 2]},
            ValueError,
            r"the function raised IndexError: .*test_fitted",
        ),
        (
            experts,
            {"batch": [1, 2]},
            ValueError,
            "the steps that were measured with batch 2 run .* to .* operators.*: measure larger",
        ),
    ],
)
def test_what_cannot_be_fitted_is_refused_in_a_sentence(
    make: Any, measure: Any, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says) as caught:
        memtools.plan(make, measure=measure)
    assert "\n" not in str(caught.value)

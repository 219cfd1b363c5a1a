"""The lives of storages over some steps: real ones and fake ones, and what changes make of them."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memtools import _core
from memtools._base.libraries import library_paths
from memtools._base.peak import (
    AFTER,
    BACKWARD,
    BETWEEN,
    BUFFERS,
    FORWARD,
    GRADIENTS,
    INPUTS,
    OLDER,
    OPTIMIZER,
    OPTIMIZERS,
    OTHERS,
    PARAMETERS,
    SAVED,
    STATE,
)
from memtools._blocks import lifetimes, tracedsteps
from memtools._blocks.lifetimes import BEFORE, Life, Op, Trace, Tracer
from memtools._blocks.replay import (
    ended_at_last_use,
    gradients_end_with_the_step,
    in_micro_batches,
    replay,
    scales_with_batch,
    without_optimizers_temporaries,
)
from memtools._blocks.tracedsteps import TracedSteps
from tests.blocks.peakcases import forget_compiled

KIB, MIB = 1 << 10, 1 << 20
HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
)


@pytest.fixture(autouse=True)
def nothing_is_left_on() -> Iterator[None]:
    forget_compiled()
    yield
    assert not _get_current_dispatch_mode_stack()
    assert not any(getattr(nn.modules.module, name) for name in HOOKS)


class Net(nn.Module):
    def __init__(self, classes: int = 512) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, 128), nn.BatchNorm1d(128)
        self.head = nn.Linear(128, classes, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.norm(self.first(x)).relu())


def trained(fused: bool = False, to_none: bool = True, micro: int = 1) -> Callable[[], float]:
    torch.manual_seed(3)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), fused=fused, foreach=not fused)

    def step() -> float:
        x, y = torch.randn(64, 64), torch.randint(0, 512, (64,))
        total = 0.0
        for part, wanted in zip(x.chunk(micro), y.chunk(micro), strict=True):
            logits = net(part)
            loss = functional.cross_entropy(logits, wanted) / micro
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        return total

    return step


def traced(step: Callable[[], object], steps: int = 2, *, reports: bool = False) -> Trace:
    """Two steps, and traced ones; `reports`: with what kernels use for themselves."""
    blocks = _core.Blocks() if reports else None
    if blocks is not None:
        blocks.start(library_paths())
    try:
        for _ in range(2):
            step()
        with Tracer(blocks=blocks) as tracer:
            for _ in range(steps):
                step()
                tracer.step_ended()
    finally:
        if blocks is not None:
            blocks.stop()
    return tracer.trace()


def measured(step: Callable[[], object]) -> int:
    """The peak of a step above what lived when it began, by the reports of torch's allocator."""
    for _ in range(3):
        step()
    blocks = _core.Blocks()
    blocks.start(library_paths())
    try:
        blocks.record(True)
        step()
        blocks.record(False)
        contents = blocks.contents()
    finally:
        blocks.stop()
    assert contents is not None
    return contents.peak_bytes - contents.base_bytes


def above(trace: Trace) -> int:
    """The peak of the second step above what lives when it begins."""
    begin = trace.steps[1]
    return (
        trace.peak(begin)[1]
        - trace.ops[begin].others
        - sum(life.bytes for life in trace.lives if life.birth < begin and life.is_alive(begin))
    )


@pytest.mark.parametrize("of_a_weight", [False, True])
def test_gradients_are_summed_as_without_a_dispatch_mode(of_a_weight: bool) -> None:
    """In place; not so those of a weight, which are views."""
    body = nn.Linear(512, 512, bias=False)
    first, second = nn.Linear(512, 8, bias=False), nn.Linear(512, 8, bias=False)

    def step() -> None:
        x = torch.randn(64 if of_a_weight else 4096, 512)
        if of_a_weight:
            body(body(x)).square().mean().backward()
        else:
            h = body(x).tanh()
            (first(h).square().mean() + second(h).square().mean()).backward()
        for one in (body, first, second):
            one.zero_grad()

    trace = traced(step)
    assert any(op.name == "aten.add.Tensor" and op.phase == BACKWARD for op in trace.ops)
    assert above(trace) == pytest.approx(measured(step), rel=1e-3)


# --- what a trace has -----------------------------------------------------------------------------


def test_births_last_uses_and_deaths() -> None:
    with Tracer() as tracer:
        a = torch.ones(256)  # 0
        b = a + 1  # 1
        c = a * b  # 2: the last use of both
        torch.zeros(10)  # 3: dies at once
        del a
        d = c.sum()  # 4
        del b
    assert d.item() == 512
    found = [(life.bytes, life.birth, life.last_use, life.death) for life in tracer.trace().lives]
    assert found[0] == (KIB, 0, 2, 4)
    assert found[1] == (KIB, 1, 2, 5)
    assert found[2] == (KIB, 2, 4, None)
    assert found[3] == (40, 3, 3, 4)
    trace = tracer.trace()
    assert trace.curve() == [KIB, 2 * KIB, 3 * KIB, 3 * KIB + 40, 2 * KIB + 4]
    assert trace.peak() == (3, 3 * KIB + 40)
    assert trace.peak(4) == (4, 2 * KIB + 4)
    assert [life.bytes for life in trace.at(4)] == [KIB, KIB, 4]
    assert trace.lives[1].made[0][1:] == (trace.lives[0].made[0][1] + 1, found_in())
    assert trace.lives[0].used[0][1] == trace.lives[0].made[0][1] + 2


def found_in() -> str:
    return test_births_last_uses_and_deaths.__qualname__


def test_a_view_is_the_whole_and_what_is_written_in_place_is_not_new() -> None:
    with Tracer() as tracer:
        a = torch.ones(100)
        b = a[10:].view(9, 10)
        del a
        b.add_(1)
        b = None  # type: ignore[assignment]
        torch.ones(1)
    (life, _) = tracer.trace().lives
    assert (life.bytes, life.birth, life.last_use, life.death) == (400, 0, 3, 4)


def test_phases_and_categories_of_a_step() -> None:
    trace = traced(trained())
    begin = trace.steps[1]
    phases = [phase for phase, at in trace.phases() if at >= begin]
    assert [phase for phase in phases if phase != BETWEEN] == [FORWARD, BACKWARD, OPTIMIZER]
    sizes: dict[str, int] = {}
    for life in trace.lives:
        if life.is_alive(begin + 1) and life.birth < begin:
            sizes[life.category] = sizes.get(life.category, 0) + life.bytes
    weights = 4 * (64 * 128 + 128 + 2 * 128 + 128 * 512)
    assert sizes[PARAMETERS] == weights
    assert sizes[STATE] == 2 * weights + 5 * 4  # with the number of steps of each parameter
    assert sizes[BUFFERS] == 4 * 2 * 128 + 8
    names = {life.name for life in trace.lives if life.category == PARAMETERS}
    assert names == {"first.weight", "first.bias", "norm.weight", "norm.bias", "head.weight"}
    gradients = [life for life in trace.lives if life.category == GRADIENTS]
    assert sum(life.bytes for life in gradients) == 2 * weights
    assert {life.phase for life in gradients} == {BACKWARD}
    assert {life.name for life in gradients} == names
    inputs = [life for life in trace.lives if life.category == INPUTS]
    assert {life.shape for life in inputs} == {(64, 64), (64,)}
    kinds = {life.category for life in trace.lives}
    assert {SAVED, OPTIMIZERS, OTHERS} <= kinds
    (logits,) = (life for life in trace.lives if life.module == "head" and life.birth < begin)
    assert (logits.category, logits.shape) == (AFTER, (64, 512)), "a variable has it"
    assert [frame[2] for frame in logits.made[:2]] == ["Net.forward", "trained.<locals>.step"]
    assert logits.operator == "aten.mm.default"


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_the_peak_is_that_of_torchs_allocator(fused: bool, to_none: bool) -> None:
    real = measured(trained(fused, to_none))
    assert above(traced(trained(fused, to_none))) == pytest.approx(real, rel=0.005)


def test_results_are_the_same_to_the_bit() -> None:
    def losses(is_traced: bool) -> list[float]:
        step = trained()
        if not is_traced:
            return [step() for _ in range(4)]
        with Tracer():
            return [step() for _ in range(4)]

    assert losses(True) == losses(False)


def test_fake_tensors_have_the_same_lives() -> None:
    def shape(trace: Trace) -> list[Any]:
        begin = trace.steps[1]
        return [
            (life.bytes, life.category, life.shape, life.death is None, life.module)
            for life in trace.lives
            if life.birth >= begin and life.phase in (FORWARD, BACKWARD)
        ]

    def steps() -> Callable[[], None]:
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters())

        def step() -> None:  # without .item(), which has no value under fake tensors
            functional.cross_entropy(
                net(torch.randn(64, 64)), torch.randint(0, 512, (64,))
            ).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    real = traced(steps())
    with FakeTensorMode():
        fake = traced(steps())
    assert shape(fake) == shape(real)
    assert fake.peak(fake.steps[1])[1] == real.peak(real.steps[1])[1]


def test_what_the_caller_marks_counts_from_the_beginning() -> None:
    table, other = torch.ones(256), torch.ones(256)
    with Tracer() as tracer:
        tracer.mark(PARAMETERS, [("table", table)])
        torch.ones(4)
        x = other + 1
    trace = tracer.trace()
    assert [(one.birth, one.category, one.name) for one in trace.lives] == [
        (BEFORE, PARAMETERS, "table"), (0, OTHERS, ""), (BEFORE, OLDER, ""), (1, OTHERS, ""),
    ]  # fmt: skip
    assert trace.curve() == [2 * KIB + 16, 3 * KIB]
    assert len(x) == 256


def test_a_step_that_raises_leaves_nothing_on() -> None:
    stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack
    with pytest.raises(RuntimeError, match="shapes"), Tracer() as tracer:
        Net()(torch.ones(4, 3))
    before = tracer.trace()
    assert before.peak()[1] > 0
    assert stack() == []
    assert len(tracer.trace().ops) == len(before.ops)


def test_only_its_own_device_counts() -> None:
    with Tracer(device="meta") as tracer:
        torch.ones(256)
        x = torch.ones(128, device="meta") + 1
    assert [life.bytes for life in tracer.trace().lives] == [512, 512]
    assert x.device.type == "meta"


def test_what_kernels_use_and_no_operator_touches_is_in_the_curve() -> None:
    blocks = _core.Blocks()
    blocks.start(library_paths())
    untouched = torch.ones(MIB)
    with Tracer(blocks=blocks) as tracer:
        functional.mse_loss(torch.ones(MIB), torch.ones(MIB))
    blocks.stop()
    trace = tracer.trace()
    loss = trace.ops[-1]
    assert "mse_loss" in loss.name
    assert loss.others >= 4 * MIB, "the untouched one"
    assert loss.scratch >= 4 * MIB
    lives = sum(life.bytes for life in trace.lives if life.is_alive(2))
    assert trace.curve()[2] == lives + loss.others + loss.scratch
    assert len(untouched) == MIB


# --- changes --------------------------------------------------------------------------------------


def life(number: int, nbytes: int, birth: int, last: int, death: int | None, **more: Any) -> Life:
    more = {"phase": FORWARD, "category": OTHERS, **more}
    return Life(number, nbytes, birth, last, death, **more)


def made(*lives: Life, phases: str = "fffbbo") -> Trace:
    names = {"f": FORWARD, "b": BACKWARD, "o": OPTIMIZER, "-": BETWEEN}
    reads = [[one.id for one in lives if i in (one.birth, one.last_use)] for i in range(99)]
    ops = (Op("op", names[p], "", (), tuple(reads[i])) for i, p in enumerate(phases))
    return Trace(lives, tuple(ops))


def test_a_life_ends_at_its_last_use() -> None:
    trace = made(life(0, 100, 0, 1, 6), life(1, 50, 2, 3, 4), life(2, 7, 5, 5, None))
    assert trace.curve() == [100, 100, 150, 150, 100, 107]
    assert replay(trace, [ended_at_last_use({0})]).curve() == [100, 100, 50, 50, 0, 7]
    assert trace.peak() == (2, 150), "the trace itself is as it was"
    one = replay(trace, [ended_at_last_use({2})])
    assert one.curve() == trace.curve(), "its last use is the last operator"


def test_changes_compose() -> None:
    trace = made(
        life(0, 100, 0, 1, 6), life(1, 50, 2, 3, 4),
        life(2, 99, 5, 5, 6, phase=OPTIMIZER, category=OPTIMIZERS),
    )  # fmt: skip
    changed = replay(trace, [ended_at_last_use({0}), without_optimizers_temporaries])
    assert changed.curve() == [100, 100, 50, 50, 0, 0]


def test_micro_batches_divide_what_is_made_of_inputs_and_keep_gradients() -> None:
    x = life(0, 64, BEFORE, 1, None, phase=BETWEEN, category=INPUTS, shape=(16,))
    w = life(1, 40, BEFORE, 1, None, phase=BETWEEN, category=PARAMETERS, shape=(10,))
    h = life(2, 80, 1, 3, 4, shape=(16, 20))
    g = life(3, 40, 3, 5, 6, phase=BACKWARD, category=GRADIENTS, shape=(10,))
    trace = made(x, w, h, g)
    assert scales_with_batch(trace) == {2}
    assert trace.curve() == [104, 184, 184, 224, 144, 144]
    halved = replay(trace, [in_micro_batches(2)])
    # The gradient of the first part lives through the forward pass of the second one.
    assert halved.curve() == [144, 184, 184, 224, 144, 144]
    assert replay(trace, [in_micro_batches(1)]).curve() == trace.curve()


def test_gradients_end_with_the_optimizers_step() -> None:
    kept = life(0, 40, BEFORE, 9, None, phase=BETWEEN, category=GRADIENTS)
    ops = made(kept, phases="-fbo-fbo-f").ops
    reads = {0: (0,), 2: (0,), 3: (0,), 4: (0,), 6: (0,), 7: (0,)}
    trace = Trace((kept,), tuple(op._replace(reads=reads.get(i, ())) for i, op in enumerate(ops)))
    assert trace.curve() == [40] * 10
    changed = replay(trace, [gradients_end_with_the_step])
    assert changed.curve() == [0, 0, 40, 40, 0, 0, 40, 40, 0, 0]


@pytest.mark.parametrize(
    ("change", "how"),
    [
        (without_optimizers_temporaries, {"fused": True}),
        (in_micro_batches(4), {"micro": 4}),
    ],
    ids=["fused", "micro"],
)
def test_what_is_predicted_is_what_comes(change: Any, how: Any) -> None:
    predicted = above(replay(traced(trained()), [change]))
    assert predicted == pytest.approx(measured(trained(**how)), rel=0.01)


def test_gradients_that_are_dropped_are_predicted() -> None:
    trace = traced(trained(to_none=False))
    predicted = replay(trace, [gradients_end_with_the_step]).peak(trace.steps[1])[1]
    real = traced(trained())
    assert predicted == pytest.approx(real.peak(real.steps[1])[1], rel=0.005)


def test_what_no_operator_has_made_lives_from_its_first_use() -> None:
    """A step may end within the optimizer's: what another program has filled is not made by it."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    optimizer.register_step_post_hook(lambda *_: tracer.step_ended())
    with Tracer() as tracer:
        for _ in range(2):
            x = torch.frombuffer(bytearray(64 * 64 * 4), dtype=torch.float32)
            net(x.view(64, 64)).square().mean().backward()
            optimizer.step()
    trace = tracer.trace()
    *_, life = (one for one in trace.lives if one.bytes == 64 * 64 * 4 and one.category == INPUTS)
    assert (life.phase, life.operator, life.made) == (BETWEEN, "", ())
    assert trace.ops[life.birth].name == "aten.view.default"


def test_gradients_are_known_that_end_before_the_step_does() -> None:
    """A step of a program that updates weights itself."""
    net = Net()

    def step() -> None:
        net(torch.randn(64, 64)).square().mean().backward()
        with torch.no_grad():
            for one in net.parameters():
                one -= 0.1 * one.grad
                one.grad = None

    trace = traced(step)
    found = {one.name for one in trace.lives if one.category == GRADIENTS}
    assert found == {name for name, _ in net.named_parameters()}


@pytest.mark.parametrize("is_on", [True, False])
def test_a_search_for_variables_makes_no_collection(
    is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it makes would have Python go through all objects of the program."""
    things = [[number] for number in range(5_000)]
    searched, seen = lifetimes.holding, list[str]()

    def holding(*args: Any) -> Any:
        gc.callbacks.append(collects)
        try:
            return searched(*args)
        finally:
            gc.callbacks.remove(collects)

    def collects(phase: str, _: object) -> None:
        seen.append(phase)

    monkeypatch.setattr(lifetimes, "holding", holding)
    (gc.enable if is_on else gc.disable)()
    try:
        with Tracer() as tracer:
            kept = torch.randn(64, 64) + 1
            tracer.step_ended(look=True)
            other = torch.randn(64, 64) + 1
        assert gc.isenabled() == is_on
    finally:
        gc.enable()
    assert len(things) == 5_000
    assert not seen
    assert {one.name for found in tracer.trace().variables.values() for one in found} >= {"kept"}
    del kept, other


# --- in the memory that is left -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("room", "most"), [(None, 5000), (16 << 30, 5000), (48 << 20, 4096), (52 << 20, 4437)]
)
def test_so_many_operators_are_traced_as_fit_into_the_memory_that_is_left(
    room: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracedsteps, "MOST_OPERATORS", 5000)
    blocks = _core.Blocks()
    blocks.start(library_paths())
    steps = TracedSteps(blocks, room)
    assert steps.why_not() == ""
    steps.begin(1.0)
    x = torch.ones(4)
    for _ in range(most + 64):
        x.add_(1)
    found = steps.step_ended()
    blocks.stop()
    assert found is not None
    fit = "" if most == 5000 else " (more would not fit into memory)"
    assert found.why == f"two steps have more than {most:,} operators{fit} or take long"


@pytest.mark.parametrize("room", [0, -5, (48 << 20) - 4096])
def test_where_too_little_memory_is_left_no_step_is_traced(room: int) -> None:
    assert re.fullmatch(
        r"at least 48\.0 MiB of memory must be left at the highest point of a step to trace it, "
        r"and (0 B|48\.0 MiB) are",
        TracedSteps(_core.Blocks(), room).why_not(),
    )

"""What lived at the peak of a recorded step: bytes, phases, operators, shapes, marks, and who else
listens. Against torch's own profiler: test_contents_truth.py."""

from __future__ import annotations

import functools
import gc
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from memtools import _core
from memtools._base.peak import AFTER, SAVED
from memtools._blocks.lifetimes import Tracer

KIB = 1 << 10
LIBRARIES = (f"{Path(torch.__file__).parents[1]}/", f"{Path(os.__file__).parent}/")
FORWARD, BACKWARD, OPTIMIZER = 1, 2, 3
PARAMETER, GRADIENT, STATE, INPUT = 1, 2, 3, 4


class Block(NamedTuple):
    bytes: int
    category: int
    birth: int
    death: int
    backward: int
    operator: str
    module: str
    site: int
    dtype: str
    shape: tuple[int, ...] | None


@pytest.fixture
def blocks() -> Iterator[_core.Blocks]:
    made = _core.Blocks()
    made.start(LIBRARIES)
    yield made
    made.stop()


def contents_of(blocks: _core.Blocks) -> _core.Contents:
    contents = blocks.contents()
    assert contents is not None
    return contents


def at_peak(blocks: _core.Blocks) -> list[Block]:
    return [Block(*block) for block in contents_of(blocks).blocks]


def recorded(blocks: _core.Blocks, step: Callable[[], object]) -> list[Block]:
    """The blocks at the peak of a step, whose result lives until its end."""
    blocks.record(True)
    result = step()
    blocks.record(False)
    del result
    return at_peak(blocks)


def storages(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    return [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors]


def make(n: int) -> torch.Tensor:
    return torch.empty(n, dtype=torch.uint8)


def one_of(blocks: list[Block], size: int) -> Block:
    found = [block for block in blocks if block.bytes == size]
    assert len(found) == 1, blocks
    return found[0]


# --- bytes, marks and lines -----------------------------------------------------------------------


def test_the_peak_and_what_lived_then(blocks: _core.Blocks) -> None:
    old = make(1000)
    blocks.record(True)
    kept = make(300)
    gone = make(5000)
    del gone
    later = make(10)
    blocks.record(False)
    unheard = make(1 << 20)
    found = contents_of(blocks)
    assert (found.peak_bytes, found.base_bytes, found.lost, found.events) == (6300, 1000, 0, 4)
    assert (found.phase, found.operator, found.backward) == (FORWARD, "aten::empty", False)
    assert blocks.frames(found.site)[0][2] == "make"
    assert found.rest == ()
    assert found.intervals == tuple(
        (order, FORWARD, size) for order, size in enumerate((1000, 1300, 6300, 1300, 1310))
    )
    assert found.layers == (
        (0, 0, 0, False, (1000, 1000, 1000, 1000, 1000)),
        (0, FORWARD, 0, True, (0, 300, 5300, 300, 310)),
    )
    gone_, old_, kept_ = at_peak(blocks)
    assert (gone_.bytes, gone_.birth, gone_.death) == (5000, FORWARD, FORWARD)
    assert (old_.bytes, old_.birth, old_.death, old_.site) == (1000, 0, 0, 0)
    assert (kept_.bytes, kept_.birth, kept_.death, kept_.module) == (300, FORWARD, 0, "")
    assert (kept_.dtype, kept_.shape, kept_.backward) == ("uint8", (300,), 0)
    assert blocks.frames(kept_.site)[1][2] == "test_the_peak_and_what_lived_then"
    assert len(old) + len(kept) + len(later) + len(unheard) > 0


def test_a_block_older_than_the_reports_lives_all_the_time() -> None:
    older = make(400)
    blocks = _core.Blocks()
    blocks.start(LIBRARIES)
    blocks.record(True)
    make(100)
    assert blocks.mark(storages([older, older]), STATE) == 1
    found = contents_of(blocks)  # while it records
    assert (found.peak_bytes, found.base_bytes) == (500, 400)
    blocks.stop()
    assert not blocks.is_on


def test_a_recording_begins_anew_and_stop_forgets(blocks: _core.Blocks) -> None:
    assert blocks.contents() is None
    recorded(blocks, lambda: make(100))
    assert contents_of(blocks).peak_bytes == 100
    recorded(blocks, lambda: make(70))
    assert contents_of(blocks).peak_bytes == 70
    blocks.record(True)
    make(10)
    blocks.record(True)  # without an end of the one that runs
    assert contents_of(blocks).events == 0
    blocks.record(False)
    blocks.record(False)
    assert contents_of(blocks).events == 0
    blocks.stop()
    blocks.start(LIBRARIES)
    assert blocks.contents() is None


@pytest.mark.slow
def test_a_recording_that_begins_while_contents_are_told_changes_no_name(
    blocks: _core.Blocks,
) -> None:
    """A tuple may start a collection, which runs code of the program's: here in every place."""
    names = {"aten::ones", "aten::cos"}
    left = 0

    def begin_anew(phase: str, info: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            blocks.record(True)
            torch.ones(10).sin()

    threshold = gc.get_threshold()
    gc.callbacks.append(begin_anew)
    try:
        for collections in range(1, 40):
            left = 0
            recorded(blocks, lambda: torch.ones(1000).cos())
            gc.set_threshold(1)
            left = collections
            contents = blocks.contents()
            gc.set_threshold(*threshold)
            assert contents is not None
            assert {block[5] for block in contents.blocks if block[0] == 4000} <= names
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(begin_anew)


def test_one_object_records_at_a_time(blocks: _core.Blocks) -> None:
    other = _core.Blocks()
    other.start(LIBRARIES)
    blocks.record(True)
    with pytest.raises(RuntimeError, match=r"another object records; it must end its recording"):
        other.record(True)
    make(10)
    assert other.contents() is None
    blocks.record(False)
    other.record(True)
    assert blocks.contents() is None, "forgotten"
    other.record(False)
    blocks.record(True)
    del other
    make(30)
    blocks.record(False)
    assert contents_of(blocks).peak_bytes == 30


def test_recordings_begin_and_end_while_other_threads_compute(blocks: _core.Blocks) -> None:
    done = threading.Event()

    def work() -> None:
        weight = torch.ones(16, 16, requires_grad=True)
        while not done.is_set():
            (weight @ weight).relu().sum().backward()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        blocks.record(True)
        torch.zeros(100)
        blocks.record(False)
        found = contents_of(blocks)
        assert found.peak_bytes >= 400
        assert found.lost == 0
    done.set()
    for thread in threads:
        thread.join()


# --- phases, operators and shapes -----------------------------------------------------------------


def test_what_is_saved_for_backward(blocks: _core.Blocks) -> None:
    """What a backward pass frees was saved for it; what goes before is not."""
    a = torch.ones(64, 64, requires_grad=True)
    b = torch.ones(64, 100)
    blocks.record(True)
    scratch = torch.ones(500, 500)
    product = a @ b
    scratch += 1
    del scratch
    loss = product.exp().sum()
    loss.backward()
    blocks.record(False)
    found = at_peak(blocks)
    assert one_of(found, 1_000_000).backward == 0
    assert one_of(found, 1_000_000).death == FORWARD
    blocks.record(True)
    loss = (a @ b).exp().sum()
    loss.backward()
    blocks.record(False)
    saved = [block for block in at_peak(blocks) if block.backward == 1 and block.bytes > 4]
    assert [(s.operator, s.shape, s.death) for s in saved] == [("aten::exp", (64, 100), BACKWARD)]


class Kept:
    """A program that keeps something of each step, whose sizes say what they are."""

    def __init__(self) -> None:
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(4))
        self.cache = torch.zeros(0, 16)
        self.inputs = torch.ones(77, 64)
        self.list: list[torch.Tensor] = []

    def loss(self) -> torch.Tensor:
        """Each of four layers saves its result, of 100 rows."""
        x = torch.ones(100, 64)
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().sum()

    def plain(self) -> None:
        self.loss().backward()

    def checkpointed(self) -> None:
        x = torch.ones(100, 64)
        for layer in self.layers:
            run = functools.partial(lambda layer, x: layer(x).exp().tanh(), layer)
            x = checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)
        x = x * x
        x.sum().backward()

    def concatenated(self) -> None:
        """A buffer of 77 rows that the step makes anew and keeps; backward does not need it."""
        self.cache = torch.cat([self.cache[:0], torch.ones(77, 16)])
        self.loss().backward()

    def outputs(self) -> None:
        """Outputs of 77 rows, of which the last is kept with its graph."""
        x = self.layers[0](self.inputs).tanh()
        self.list = [x]
        (self.loss() + x.sum()).backward()

    def losses(self) -> None:
        loss = self.loss()
        loss.backward()
        self.list = [loss]

    def retained(self) -> None:
        loss = self.loss()
        loss.backward(retain_graph=True)
        self.list = [loss]

    def freed_by_the_second(self) -> None:
        loss = self.loss()
        loss.backward(retain_graph=True)
        loss.backward()


OF_100, OF_77 = 100 * 64 * 4, 77 * 64 * 4


@pytest.mark.parametrize(
    ("program", "saved", "after"),
    [
        (Kept.plain, {OF_100}, {4}),
        (Kept.checkpointed, {OF_100}, {OF_100, 4}),
        (Kept.concatenated, {OF_100}, {77 * 16 * 4, 4}),
        (Kept.outputs, {OF_100}, {OF_77, 4}),
        (Kept.losses, {OF_100}, {4}),
        (Kept.retained, set(), {OF_100, 4}),
        (Kept.freed_by_the_second, {OF_100}, {4}),
    ],
)
def test_what_the_program_keeps_is_not_called_saved_for_backward(
    blocks: _core.Blocks, program: Callable[[Kept], None], saved: set[int], after: set[int]
) -> None:
    """In a recorded step, and in a traced one, which knows what the model was called with."""
    kept = Kept()
    program(kept)
    blocks.record(True)
    program(kept)
    blocks.record(False)
    found = [(block.backward, block.bytes) for block in at_peak(blocks)]
    assert ({size for what, size in found if what == 1}, {s for w, s in found if w == 2}) == (
        saved,
        after,
    )
    with Tracer() as tracer:
        program(kept)
    lives = tracer.trace().lives
    assert {life.bytes for life in lives if life.category == SAVED} == saved
    assert {life.bytes for life in lives if life.category == AFTER} == after


def test_steps_of_any_optimizer_and_intervals_of_the_program(blocks: _core.Blocks) -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, tensors: list[torch.Tensor]) -> None:
            super().__init__(tensors, {})

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            with torch.profiler.record_function("Mine"):
                self.kept = torch.zeros(33)

    own = Own([torch.ones(1, requires_grad=True)])
    blocks.record(True)
    with torch.profiler.record_function("Optimizer"):
        first = torch.zeros(77)
    own.step()
    after = torch.zeros(99)
    blocks.record(False)
    found = at_peak(blocks)
    assert one_of(found, 33 * 4).birth == OPTIMIZER
    assert one_of(found, 77 * 4).birth == one_of(found, 99 * 4).birth == FORWARD
    assert len(first) + len(after) > 0


def test_a_recording_that_begins_and_ends_within_a_step(blocks: _core.Blocks) -> None:
    """As a hook after the optimizer's step does: what it is in then is of the recording before."""
    layer = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(layer.parameters())
    found: list[list[Block]] = []
    kept: list[torch.Tensor] = []

    def after(*_: object) -> None:
        blocks.record(False)
        if blocks.contents() is not None:
            found.append(at_peak(blocks))
        kept.clear()
        blocks.record(True)
        kept.append(torch.zeros(222))

    optimizer.register_step_post_hook(after)
    for _ in range(3):
        layer(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        kept.append(torch.zeros(111))
    blocks.record(False)
    assert len(found) == 2
    for recording in found:
        for size in (444, 888):
            born = one_of(recording, size)
            assert (born.birth, born.operator) == (FORWARD, "aten::zeros")


def test_operators_that_only_get_memory_are_not_named(blocks: _core.Blocks) -> None:
    def step() -> list[torch.Tensor]:
        x = torch.zeros(11)
        tensors = [torch.ones(n) for n in (101, 102)]
        return [x, x.clone(), x.repeat(3), *torch._foreach_sqrt(tensors), torch.empty(17)]

    found = recorded(blocks, step)
    assert one_of(found, 68).operator == "aten::empty"
    assert [b.operator for b in found if b.bytes == 44] == ["aten::zeros", "aten::clone"]
    assert one_of(found, 132).operator == "aten::repeat"
    assert {b.operator for b in found if b.bytes == 404} == {"aten::ones", "aten::_foreach_sqrt"}


def test_shapes_and_dtypes(blocks: _core.Blocks) -> None:
    def step() -> list[torch.Tensor]:
        return [
            torch.nn.functional.linear(torch.ones(4, 6, 8), torch.ones(9, 8)),
            torch.ones(3, 5, 7, dtype=torch.float64)[1:, ::2],
            torch.arange(2).expand(9, 2),
            torch.ones(6, 10, dtype=torch.bfloat16).t(),
            *torch.max(torch.ones(13, 3), 1),
            torch.tensor(1, dtype=torch.int8),
            torch.eye(20).to_sparse(),
        ]

    found = {(b.bytes, b.dtype, b.shape) for b in recorded(blocks, step)}
    assert {
        (840, "float64", (3, 5, 7)),
        (16, "int64", (2,)),
        (120, "bfloat16", (6, 10)),
        (52, "float32", (13,)),
        (104, "int64", (13,)),
        (864, "float32", (4, 6, 9)),
    } <= found


def test_tensors_without_memory_of_their_own_do_no_harm(blocks: _core.Blocks) -> None:
    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Wrapped:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape)  # type: ignore[attr-defined,no-any-return]

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return Wrapped(torch.ones(3))

    def step() -> list[object]:
        batched = torch.vmap(lambda t: t * 2 + t.sum())(torch.ones(5, 7))
        return [
            Wrapped(torch.ones(3)) + 1,
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged) * 2,
            torch.ones(3, device="meta") + 1,
            torch.func.grad(lambda t: (t * t).sum())(torch.ones(4)),
            batched,
            torch.ones(2, dtype=torch.complex64).conj().imag,
        ]

    sums = [block for block in recorded(blocks, step) if block.operator == "aten::add"]
    assert [block.shape for block in sums if block.bytes == 5 * 7 * 4] == [(5, 7)]


def test_autograd_functions_and_hooks(blocks: _core.Blocks) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            kept.append(torch.zeros(555))
            return grad * 2

    kept: list[torch.Tensor] = []
    x = torch.ones(10, requires_grad=True)
    y = Double.apply(x)
    y.register_hook(lambda grad: kept.append(torch.zeros(777)))
    found = recorded(blocks, lambda: y.sum().backward())
    assert one_of(found, 555 * 4)[2:6] == (BACKWARD, 0, False, "DoubleBackward")
    assert one_of(found, 777 * 4).birth == BACKWARD


@pytest.fixture
def heard() -> Iterator[None]:
    """Calls of modules are heard, as a monitor does."""
    assert _core._watch_calls(torch.nn.Module.__call__, lambda module: None, threading.get_ident())
    yield
    _core._watch_calls(None, None, 0)


class Feed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 10:
            raise ValueError("too many")
        return self.up(x).relu().sum(1, keepdim=True).expand(-1, 8)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.feeds = torch.nn.Sequential(Feed(), Feed(), torch.nn.Linear(8, 200))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.feeds(x + 1).exp()


@pytest.mark.usefixtures("heard")
def test_the_modules_a_block_was_born_in(blocks: _core.Blocks) -> None:
    net = Net()
    x = torch.ones(7, 8)
    found = recorded(blocks, lambda: net(x))
    assert {b.module for b in found if b.bytes == 2800} == {"Net.Feed"}
    # Classes of torch's are told where there are no others around them.
    assert {b.module for b in found if b.shape == (7, 200)} == {"Net"}
    plain = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.ReLU())
    found = recorded(blocks, lambda: (torch.zeros(41), plain(x)))
    assert {b.module for b in found if b.bytes == 252} == {"Sequential.Linear", "Sequential.ReLU"}
    assert one_of(found, 164).module == ""

    def fails() -> torch.Tensor:
        with pytest.raises(ValueError, match="too many"):
            net(torch.ones(11, 8))
        return torch.zeros(5000)

    assert one_of(recorded(blocks, fails), 20_000).module == ""

    class Begins(torch.nn.Module):
        def forward(self, n: int) -> torch.Tensor:
            blocks.record(True)
            return torch.zeros(n)

    kept = Begins()(47)
    again = net(x)
    blocks.record(False)
    found = at_peak(blocks)
    assert one_of(found, 188).module == "", "the call began before the recording"
    assert {b.module for b in found if b.bytes == 2800} == {"Net.Feed"}
    assert len(kept) + len(again) > 0


def test_addresses_of_what_still_lives(blocks: _core.Blocks) -> None:
    blocks.record(True)
    kept, gone = make(100), make(200)
    address = kept.data_ptr()
    del gone
    blocks.record(False)
    assert contents_of(blocks).addresses == (0, address)
    assert len(kept) == 100


# --- beside others --------------------------------------------------------------------------------


def profiled(step: Callable[[], object]) -> list[tuple[str, int]]:
    with torch.profiler.profile(profile_memory=True) as profiler:
        step()
    return [(event.name, event.self_cpu_memory_usage) for event in profiler.events() or ()]


@pytest.mark.slow
def test_a_profiler_of_the_program_hears_the_same_events(blocks: _core.Blocks) -> None:
    layer = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(layer.parameters())

    def step() -> None:
        layer(torch.ones(4, 16)).relu().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    profiled(step)
    alone = profiled(step)
    blocks.record(True)
    inside = profiled(step)  # it begins and ends within the recording
    step()
    blocks.record(False)
    assert inside == alone
    assert contents_of(blocks).phase == OPTIMIZER

    def recorded_step() -> None:
        blocks.record(True)
        step()
        blocks.record(False)

    assert profiled(recorded_step) == alone
    assert contents_of(blocks).backward
    with torch.profiler.profile(profile_memory=True):
        blocks.record(True)
        step()
    step()  # the recording ends after the profiler
    blocks.record(False)
    assert contents_of(blocks).phase == OPTIMIZER
    assert profiled(step) == alone


@pytest.mark.slow
def test_a_compiled_model_is_not_compiled_again(blocks: _core.Blocks) -> None:
    from torch._dynamo.utils import counters

    def losses(is_recorded: bool) -> list[float]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Dropout(0.1))
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.AdamW(model.parameters())
        found = []
        for number in range(4):
            if is_recorded and number in (0, 2):
                blocks.record(True)
            loss = compiled(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            blocks.record(False)
            found.append(loss.item())
        return found

    alone = losses(False)
    counters.clear()
    assert losses(True) == alone
    assert counters["stats"]["unique_graphs"] == 1
    assert contents_of(blocks).backward

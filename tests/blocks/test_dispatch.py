"""The lines of torch's blocks where memtools._torch is not there, by a dispatch mode."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from memtools._blocks.dispatch import DispatchedBlocks
from memtools._monitor.tracewindow import DISPATCH, TraceWindow
from tests.kit.children import in_child
from tests.kit.ownprocess import in_own_process

KIB = 1 << 10


@pytest.fixture
def blocks() -> Iterator[DispatchedBlocks]:
    made = DispatchedBlocks()
    yield made
    made.trace(False)
    assert not _get_current_dispatch_mode_stack()


def make(n: int) -> torch.Tensor:
    return torch.empty(n, dtype=torch.uint8)  # line 32: where it is made


MADE_AT = (__file__, 32, "make")


def living(blocks: DispatchedBlocks, first: int = 1) -> list[tuple[int, int, int]]:
    """(line of the innermost frame, bytes, blocks) of what lives since a generation."""
    found = blocks.sites(first, blocks.turn() - 1)
    return [(blocks.frames(site)[0][1], size, count) for site, size, count in found]


def test_what_lives_is_known_by_its_line(blocks: DispatchedBlocks) -> None:
    blocks.trace(True)
    assert blocks.turn() == 1
    kept = [make(1000) for _ in range(3)]
    make(5000)
    first, second = blocks.sites(1, 1), blocks.sites(2, 2)
    assert [(size, count) for _, size, count in first] == [(3000, 3)]
    assert blocks.frames(first[0][0])[0] == MADE_AT
    assert second == []
    assert blocks.frames(99) == ()
    assert blocks.site_of(kept[0].data_ptr()) == first[0][0]
    assert blocks.site_of(1) is None
    del kept[0]
    assert living(blocks) == [(32, 2000, 2)]


def test_views_and_what_is_written_in_place_are_not_new(blocks: DispatchedBlocks) -> None:
    old = make(100)
    blocks.trace(True)
    blocks.turn()
    view, _, parts = old[10:], old.add_(1), torch.split(old, 10)
    assert living(blocks) == []
    copy = old.clone()
    assert [size for _, size, _ in living(blocks)] == [100]
    assert len(view) + len(parts) + len(copy) == 200


def test_gradients_and_what_a_graph_keeps_have_lines(blocks: DispatchedBlocks) -> None:
    layer = torch.nn.Linear(8, 8)
    blocks.trace(True)
    blocks.turn()
    loss = layer(torch.ones(4, 8)).exp().sum()
    loss.backward()
    sizes = {size for _, size, _ in living(blocks)}
    assert 8 * 8 * 4 + 8 * 4 in sizes, "the two gradients, by the line of backward()"
    layer.zero_grad(set_to_none=True)
    assert {size for _, size, _ in living(blocks)} == {4}, "the loss alone"


def test_results_are_the_same_with_it(blocks: DispatchedBlocks) -> None:
    def run() -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.ReLU())
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    plain = run()
    blocks.trace(True)
    assert torch.equal(run(), plain)


class Own(TorchDispatchMode):
    """A mode of the program's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_below_a_mode_of_the_program_it_hears_nothing_more_and_leaves_later() -> None:
    blocks = DispatchedBlocks()
    blocks.trace(True)
    with Own():
        blocks.trace(False)
        kept = make(10)
        assert len(_get_current_dispatch_mode_stack()) == 2, "the program's is on top"
        assert blocks.sites(0, 9) == []
    blocks.trace(False)
    assert not _get_current_dispatch_mode_stack()
    blocks.trace(True)
    kept = make(20)
    assert [size for _, size, _ in living(blocks, 0)] == [20]
    blocks.trace(False)
    assert not _get_current_dispatch_mode_stack()
    assert len(kept) == 20


def test_ended_on_another_thread_it_hears_nothing_more_and_leaves_later() -> None:
    blocks = DispatchedBlocks()
    blocks.trace(True)
    thread = threading.Thread(target=blocks.trace, args=(False,))
    thread.start()
    thread.join()
    kept = make(10)
    assert blocks.sites(0, 9) == []
    assert len(_get_current_dispatch_mode_stack()) == 1
    blocks.trace(False)
    assert not _get_current_dispatch_mode_stack()
    assert len(kept) == 10


def test_in_a_forked_child_it_can_be_ended(blocks: DispatchedBlocks) -> None:
    blocks.trace(True)

    def child() -> None:
        blocks.trace(False)
        assert not _get_current_dispatch_mode_stack()
        assert len(make(10)) == 10

    assert in_child(child) == 0


def test_tensors_without_a_storage_are_passed_by(blocks: DispatchedBlocks) -> None:
    blocks.trace(True)
    sparse = torch.eye(3).to_sparse()
    meta = torch.empty(10, device="meta") + 1
    empty = torch.empty(0)
    assert torch.func.grad(lambda x: (x * x).sum())(torch.ones(3)).tolist() == [2, 2, 2]
    assert (sparse.is_sparse, meta.device.type, len(empty)) == (True, "meta", 0)


@pytest.mark.slow
def test_it_imports_next_to_nothing() -> None:
    code = (
        "import sys, torch\nfrom memtools._blocks.dispatch import DispatchedBlocks\n"
        "before = len(sys.modules)\nblocks = DispatchedBlocks()\nblocks.trace(True)\n"
        "torch.ones(3) + 1\nblocks.trace(False)\n"
        "assert len(sys.modules) - before < 10, len(sys.modules) - before\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stderr, done.returncode) == ("", 0)


def test_a_window_hears_it_in_the_place_of_tracemalloc(blocks: DispatchedBlocks) -> None:
    window = TraceWindow(2, blocks, "there is no shim")
    assert window.begin(0)
    assert (window.sources, window.why) == ((DISPATCH,), "there is no shim")
    assert window.slows, "what it keeps is nobody's growth"
    kept, step = [], 0
    while window.is_open:
        kept.append(make(100 * KIB))
        make(900 * KIB)
        step += 1
        window.turn(step)
    (site,) = window.sites()[0]
    assert (site.place.line, site.place.function) == (32, "make")
    assert site.rate == pytest.approx(100 * KIB, rel=0.01)
    assert not _get_current_dispatch_mode_stack()


def test_where_it_makes_steps_too_slow_it_is_turned_off(blocks: DispatchedBlocks) -> None:
    window = TraceWindow(2, blocks, "there is no shim")
    assert window.begin(0)
    assert window.turn(1, slower=11.0)
    assert window.why.endswith(
        "a dispatch mode of torch makes a step take more than 10 times as long"
    )
    assert not _get_current_dispatch_mode_stack()


@pytest.mark.slow
def test_a_monitor_without_the_shim_names_the_line() -> None:
    printed = in_own_process("""
        import logging
        logging.getLogger("memtools").addHandler(logging.NullHandler())
        import torch
        from memtools import MemoryMonitor, _build_info
        _build_info.TORCH_VERSION = None
        kept, said = [], []
        with MemoryMonitor(device="cpu") as monitor:
            monitor.on_leak(said.append)
            for _ in range(80):
                kept.append(torch.empty(64 * 1024, dtype=torch.uint8))
                monitor.step()
            print(said[-1].made_at)
            print(torch.utils._python_dispatch._get_current_dispatch_mode_stack())
        """)
    assert printed == "<string>:11\n[]\n"


class Mapped(torch.Tensor):
    """Made as tensordict makes its tensors in mapped memory."""

    def __new__(cls, source: torch.Tensor) -> Mapped:
        return super().__new__(cls, source)


def test_a_subclass_that_takes_over_a_tensor_is_made_as_without_tracing(
    blocks: DispatchedBlocks,
) -> None:
    weight = torch.ones(3, requires_grad=True)
    blocks.trace(True)
    mapped = Mapped(weight * 2)
    mapped.sum().backward()
    assert type(mapped) is Mapped
    assert type(torch.ops.aten.alias(weight.detach())) is torch.Tensor
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2, 2]

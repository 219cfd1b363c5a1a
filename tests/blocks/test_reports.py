"""What torch's host allocator reports: bytes, lines, threads, forks, and who else listens."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memtools import _core
from tests.kit.children import in_child
from tests.kit.ownprocess import in_own_process

KIB = 1 << 10
LIBRARIES = (f"{Path(torch.__file__).parents[1]}/", f"{Path(os.__file__).parent}/")


@pytest.fixture
def blocks() -> Iterator[_core.Blocks]:
    made = _core.Blocks()
    made.start(LIBRARIES)
    yield made
    made.stop()


def line_of(blocks: _core.Blocks, tensor: torch.Tensor) -> tuple[tuple[str, int, str], ...]:
    site = blocks.site_of(tensor.untyped_storage().data_ptr())
    assert site is not None
    return blocks.frames(site)


def make(n: int) -> torch.Tensor:
    return torch.empty(n, dtype=torch.uint8)  # line 37: where it is made


MADE_AT = (__file__, 37, "make")


# --- bytes ----------------------------------------------------------------------------------------


def test_bytes_in_use_are_exact(blocks: _core.Blocks) -> None:
    assert blocks.in_use == 0
    kept = [make(1000), make(24)]
    view = kept[0][10:]
    assert blocks.in_use == 1024
    kept.clear()
    assert blocks.in_use == 1000
    del view
    assert (blocks.in_use, blocks.peak, blocks.missed) == (0, 1024, 0)


def test_a_tensor_that_grows_in_place_counts_as_it_is_now(blocks: _core.Blocks) -> None:
    tensor = make(100)
    tensor.resize_(5000)
    assert (blocks.in_use, blocks.peak) == (5000, 5100)


def test_what_was_made_before_is_not_counted_and_may_go() -> None:
    before = make(1000)
    blocks = _core.Blocks()
    blocks.start(LIBRARIES)
    made = make(10)
    del before
    assert blocks.in_use == 10
    blocks.stop()
    assert (blocks.in_use, blocks.is_on) == (0, False)
    del made
    assert make(3).numel() == 3
    blocks.start(LIBRARIES)
    assert blocks.in_use == 0, "blocks of before stop() are of before start()"
    blocks.stop()


def test_the_last_one_that_stops_ends_it() -> None:
    first, second = _core.Blocks(), _core.Blocks()
    first.start(LIBRARIES)
    kept = [make(100)]
    second.start(LIBRARIES)
    assert (first.in_use, second.in_use) == (100, 100)
    first.stop()
    kept.append(make(20))
    assert (first.in_use, second.in_use) == (0, 120)
    del second
    third = _core.Blocks()
    third.start(LIBRARIES)
    assert third.in_use == 0
    third.stop()


def test_all_threads_report(blocks: _core.Blocks) -> None:
    kept: list[torch.Tensor] = []
    threads = [
        threading.Thread(target=lambda: [kept.append(make(KIB)) for _ in range(50)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert blocks.in_use == 200 * KIB
    kept.clear()
    assert blocks.in_use == 0


def test_training_is_the_same_bit_by_bit_and_ends_where_it_began(blocks: _core.Blocks) -> None:
    def losses() -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1)
        )
        optimizer = torch.optim.AdamW(model.parameters())
        found = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 20)).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    blocks.trace(True)
    heard = losses()
    gc.collect()
    assert blocks.in_use == 0
    blocks.stop()
    assert losses() == heard


# --- lines ----------------------------------------------------------------------------------------


def test_a_block_has_the_lines_that_asked_for_it(blocks: _core.Blocks) -> None:
    untraced = make(8)
    blocks.trace(True)
    traced = make(8)
    frames = line_of(blocks, traced)
    assert frames[0] == MADE_AT
    assert (frames[1][0], frames[1][2]) == (
        __file__,
        "test_a_block_has_the_lines_that_asked_for_it",
    )
    assert blocks.site_of(untraced.data_ptr()) == 0
    assert blocks.frames(0) == ()
    assert blocks.site_of(12345) is None
    blocks.trace(False)
    assert line_of(blocks, make(8)) == ()


def test_lines_of_libraries_are_left_out_and_told_where_there_are_no_others(
    blocks: _core.Blocks,
) -> None:
    blocks.trace(True)
    layer = torch.nn.Linear(7, 7)
    frames = line_of(blocks, layer.weight)
    assert frames[0][0] == __file__
    blocks.stop()
    alone = _core.Blocks()
    alone.start((*LIBRARIES, f"{Path(__file__).parents[2]}/"))
    alone.trace(True)
    frames = line_of(alone, torch.nn.Linear(7, 7).weight)
    assert len(frames) == 1
    assert frames[0][0].endswith("torch/nn/modules/linear.py")
    assert frames[0][2] == "Linear.__init__"
    alone.stop()


def test_what_survives_is_told_by_generation_the_largest_first(blocks: _core.Blocks) -> None:
    blocks.trace(True)
    old = make(10 * KIB)
    first = blocks.turn()
    kept = [make(100) for _ in range(5)]
    large = torch.zeros(KIB)
    passing = make(KIB)
    last = blocks.turn()
    late = make(5 * KIB)
    del passing
    found = [(blocks.frames(site)[0][2], *sums) for site, *sums in blocks.sites(first, last - 1)]
    here = "test_what_survives_is_told_by_generation_the_largest_first"
    assert found == [(here, 4 * KIB, 1), ("make", 500, 5)]
    assert len(kept) + len(large) + len(old) + len(late) > 0


def test_a_file_and_a_function_of_any_name(blocks: _core.Blocks, tmp_path: Path) -> None:
    """Also where a name is no ASCII, and a code object that comes to lie where another one was."""
    blocks.trace(True)
    kept = []
    for n in range(50):
        file = str(tmp_path / f"größe_{n}_\U0001f600.py")
        source = "\n" * n + "import torch\ndef año(): return torch.empty(64)\nmade = año()\n"
        names: dict[str, torch.Tensor] = {}
        exec(compile(source, file, "exec"), names)
        kept.append((file, n, names["made"]))
        del names
    for file, n, tensor in kept:
        assert line_of(blocks, tensor)[:2] == ((file, n + 2, "año"), (file, n + 3, "<module>"))


def test_backward_has_the_line_that_asked_for_it(blocks: _core.Blocks) -> None:
    weight = torch.ones(100, requires_grad=True)
    loss = (weight * 3).square().sum()
    blocks.trace(True)
    loss.backward()
    assert weight.grad is not None
    assert line_of(blocks, weight.grad)[0][2] == "test_backward_has_the_line_that_asked_for_it"


def test_deep_recursion_and_generators(blocks: _core.Blocks) -> None:
    def deep(n: int) -> torch.Tensor:
        return make(16) if n == 0 else deep(n - 1)

    def stream() -> Iterator[torch.Tensor]:
        while True:
            yield make(16)

    blocks.trace(True)
    assert line_of(blocks, deep(300))[0] == MADE_AT
    assert line_of(blocks, next(stream()))[0] == MADE_AT


# --- who else listens -----------------------------------------------------------------------------


def test_a_forked_child_is_not_followed_and_may_follow_its_own(blocks: _core.Blocks) -> None:
    torch.set_num_threads(1)
    kept = make(100)

    def child() -> None:
        assert not blocks.is_on
        other = make(50)
        assert blocks.in_use == 0
        with pytest.raises(RuntimeError, match="not started"):
            blocks.turn()
        own = _core.Blocks()
        own.start(LIBRARIES)
        more = make(7)
        assert own.in_use == 7
        blocks.stop()
        assert own.in_use == 7
        del other, more
        own.stop()

    for _ in range(3):
        assert in_child(child) == 0
    assert blocks.in_use == len(kept)


AT_EXIT = """
import torch
from memtools import _core
blocks = _core.Blocks()
blocks.start(("/usr/",))
blocks.trace(True)
blocks.record(True)
kept = [torch.zeros(100) for _ in range(10)]
torch.kept = torch.zeros(50)  # dies with the interpreter
class Late:
    def __del__(self, zeros=torch.zeros): zeros(5)  # a global may be None by then
late = Late()
"""


ANOTHER_ALLOCATOR = """
import ctypes
from pathlib import Path

import torch
from memtools import _core

c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
get, put, other = (
    c10["_ZN3c1012GetAllocatorERKNS_10DeviceTypeE"],
    c10["_ZN3c1012SetAllocatorENS_10DeviceTypeEPNS_9AllocatorEh"],
    c10["_ZN3c1028GetDefaultMobileCPUAllocatorEv"],
)
get.restype = other.restype = ctypes.c_void_p
CPU = ctypes.byref(ctypes.c_byte(0))
before = get(CPU)
blocks = _core.Blocks()
blocks.start(())
kept = torch.ones(1000)
assert get(CPU) != before
blocks.stop()
assert get(CPU) == before
put(ctypes.c_byte(0), ctypes.c_void_p(other()), ctypes.c_uint8(0))
assert get(CPU) == other()
del kept
"""


@pytest.mark.slow
def test_a_library_can_set_an_allocator_of_its_own_afterwards() -> None:
    assert in_own_process(ANOTHER_ALLOCATOR) == ""


@pytest.mark.slow
def test_the_interpreter_ends_cleanly_while_it_is_on() -> None:
    assert in_own_process(AT_EXIT) == ""


IN_A_CYCLE = """
import torch
from memtools import _core
class Keep: pass
keep = Keep()
keep.itself, keep.blocks = keep, _core.Blocks()
keep.blocks.start(())
keep.blocks.record(True)
"""


@pytest.mark.slow
def test_the_interpreter_ends_cleanly_where_its_module_goes_first() -> None:
    assert in_own_process(IN_A_CYCLE) == ""

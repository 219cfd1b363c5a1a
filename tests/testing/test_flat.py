"""assert_flat in this process: real steps, who is named, and what it leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import inspect
import itertools
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch

from memtools._blocks.reports import HostBlocks
from memtools._census.growth import GrowthCensus
from memtools.errors import DeviceError
from memtools.testing import assert_flat
from memtools.testing._growth import GrowthTest, Series

pytestmark = pytest.mark.usefixtures("frozen")


class Trainer:
    """Steps that keep something, and some that do not."""

    def __init__(self) -> None:
        self.losses: list[object] = []
        self.calls = 0

    def leaks(self, size: int = 2048) -> None:
        self.losses.append(bytes(size - 33))

    def leaks_each_fiftieth(self) -> None:
        self.calls += 1
        if self.calls % 50 == 0:
            self.losses.append(bytearray(100 << 10))

    def makes_cycles(self) -> None:
        cycle: list[object] = [bytes(10_000)]
        cycle.append(cycle)

    def works(self) -> list[bytes]:
        return [bytes(100) for _ in range(100)]

    def takes_once(self) -> None:
        self.calls += 1
        if self.calls == 37:
            self.losses.append(bytearray(5 << 20))


def failure(step: Callable[[], object], **arguments: Any) -> str:
    """What assert_flat says."""
    with pytest.raises(AssertionError) as caught:
        assert_flat(step, **arguments)
    return str(caught.value)


def without_kept_at(said: str) -> str:
    """The text without the lines that keep it: which methods have run depends on other tests."""
    line = r"\S*test_flat\.py:\d+ in \w+"
    said = said.replace("made and kept at", "made at")
    return re.sub(f"[,;] kept at {line}( and {line})?", "", said)


def test_a_leak_is_found_with_its_holder_and_advice() -> None:
    said = failure(Trainer().leaks)
    assert re.search(r"object a step\); kept at \S*test_flat\.py:\d+ in leaks", said)
    assert without_kept_at(said).splitlines() == [
        "memory grows by 2.0 KiB a step (allowed: 1 KiB): list Trainer.losses +2.0 KiB/step "
        "(1 new bytes object a step)",
        "  fix: clear it after use, or use deque(maxlen=...)",
        "  seen over 175 steps, after 25 of warm-up",
    ]


class Model:
    """Keeps what one line makes, beside a line whose tensors do not stay."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self.weights = torch.zeros(64, 64)

    def step(self) -> None:
        self.weights = self.weights + 1
        self.kept.append(torch.ones(1024))  # this one


def test_the_line_that_makes_the_tensors_is_named() -> None:
    lines, first = inspect.getsourcelines(Model)
    number = first + next(i for i, line in enumerate(lines) if "# this one" in line)
    said = failure(Model().step, steps=40).splitlines()[0]
    made = rf"made and kept at \S*test_flat\.py:{number} in step$"
    what = r"\(1 new \[1024\] float32 tensor a step\)"
    assert re.search(rf"list Model\.kept \+4\.\d KiB/step {what}; {made}", said), said


def test_no_lines_are_noted_afterwards() -> None:
    failure(Model().step, steps=40)
    reports = HostBlocks()
    assert reports.join()
    first = reports.blocks.turn()
    kept = torch.ones(4096)
    sites = [site for site, *_ in reports.blocks.sites(first, reports.blocks.turn())]
    reports.leave()
    assert sites == [0]  # which is what was not traced
    assert kept.numel()


def test_what_nothing_but_the_call_holds_is_named() -> None:
    with pytest.raises(AssertionError, match=r"list Trainer\.losses \+2\.0 KiB/step"):
        assert_flat(Trainer().leaks)


@pytest.mark.slow
def test_half_of_that_is_found_where_less_is_allowed() -> None:
    trainer = Trainer()
    said = failure(lambda: trainer.leaks(1024), growth="512 B")
    assert re.match(r"memory grows by 1\.\d KiB a step \(allowed: 512 B\): list Trainer.los", said)
    trainer = Trainer()
    assert_flat(lambda: trainer.leaks(900))


def test_an_allowance_in_bytes_is_told_with_its_unit() -> None:
    assert "(allowed: 1.0 KiB)" in failure(Trainer().leaks, growth=1024, steps=40)
    assert "(allowed: 1 KiB)" in failure(Trainer().leaks, growth=" 1 KiB / step", steps=40)


def test_a_leak_of_each_fiftieth_step_is_found() -> None:
    said = failure(Trainer().leaks_each_fiftieth)
    assert "list Trainer.losses +" in said
    assert "1 new bytearray object every" in said


@pytest.mark.parametrize("name", ["works", "makes_cycles", "takes_once"])
def test_flat_steps_are_flat(name: str) -> None:
    assert_flat(getattr(Trainer(), name))


def test_garbage_is_told_beside_a_leak() -> None:
    trainer = Trainer()

    def step() -> None:
        trainer.makes_cycles()
        trainer.leaks()

    said = failure(step)
    assert said.startswith("memory grows by 2.0 KiB a step (allowed: 1 KiB): list Trainer.losses +")
    assert re.search(
        r"note: cycles that waited .* took \d+\.\d KiB a step, which is not counted", said
    )


def cached(bound: int | None) -> Callable[[], object]:
    number = itertools.count()
    results = functools.lru_cache(bound)(lambda n: bytes(4000))
    return lambda: results(next(number))


@pytest.mark.slow
def test_a_cache_with_a_bound_is_no_leak_and_one_without_is() -> None:
    assert_flat(cached(100))
    assert_flat(cached(195))  # full only just before the end: the census knows
    assert "pass maxsize=..." in failure(cached(None))


@pytest.mark.slow
def test_a_bound_that_is_far_off_is_told() -> None:
    said = failure(cached(100_000))
    assert "lru_cache" in said
    assert "otherwise give it a lower bound" in said


@pytest.fixture
def allocates() -> Iterator[Callable[[], None]]:
    """A step that takes 5,000 bytes of the C heap, which are given back after the test."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    kept = (ctypes.c_void_p * 200)()
    number = itertools.count()

    def step() -> None:
        kept[next(number)] = libc.malloc(5000)

    yield step
    for block in kept:
        libc.free(block)


def test_what_c_code_keeps_is_told_as_that(allocates: Callable[[], None]) -> None:
    assert "the C heap, whose holder is not known +4.9 KiB/step" in failure(allocates)


def test_where_the_newest_look_left_things_out_nobody_is_accused(
    allocates: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was left out may hold it. The looks before were whole."""
    look = GrowthCensus.look

    def cut_at_last(census: GrowthCensus, step: int) -> None:
        look(census, step)
        census.cut = step == 100

    monkeypatch.setattr(GrowthCensus, "look", cut_at_last)
    whole = GrowthTest(1024, "1 KiB")
    for _ in range(100):
        allocates()
        whole.step()
    said = whole.end()
    assert whole._census.cut
    assert "its holder is not known" in said
    assert "the C heap" not in said


@pytest.mark.slow
def test_graphs_and_tensors_are_named() -> None:
    scale, kept = torch.ones((), requires_grad=True), []

    class Loss:
        total = torch.zeros(())

        def step(self) -> None:
            self.total = self.total + (scale * torch.randn(1024)).sum()

    assert re.search(r"autograd graph in Loss.total", failure(Loss().step))
    said = failure(lambda: kept.append(torch.randn(4096)))
    assert "1 new [4096] float32 tensor a step" in said


class Noisy(Trainer):
    """Beside what it keeps, the newest batch, which has a size of its own each time."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes, self.batch = random.Random(0), cast(object, None)
        self.ring = [torch.zeros(512) for _ in range(100)]

    def of_bytes(self) -> None:
        self.batch = bytearray(self.sizes.randrange(4 << 20))

    def of_tensors(self) -> None:
        self.batch = torch.zeros(self.sizes.randrange(1 << 20))

    def keeps_a_tensor(self) -> None:
        self.of_bytes()
        self.losses.append(torch.zeros(512))

    def keeps_bytes(self) -> None:
        self.of_tensors()
        self.leaks(2024)

    def has_cycles(self) -> None:
        self.of_bytes()
        cycle: list[object] = [torch.zeros(512)]
        cycle.append(cycle)

    def replaces_tensors(self) -> None:
        """Those of before are not counted."""
        self.of_bytes()
        self.ring[self.calls] = torch.zeros(512)
        self.calls += 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("keeps_a_tensor", "memory of tensors grows by 2.0 KiB a step (allowed: 1 KiB): list "
         "Noisy.losses +2.0 KiB/step (1 new [512] float32 tensor a step); made at LINE in "
         "keeps_a_tensor"),
        ("keeps_bytes", "memory outside tensors grows by 2.0 KiB a step (allowed: 1 KiB): list "
         "Noisy.losses +2.0 KiB/step (1 new bytes object a step)"),
    ],
)  # fmt: skip
def test_a_leak_below_the_noise_of_the_other_half_is_found(name: str, said: str) -> None:
    trainer = Noisy()
    line = failure(getattr(trainer, name), steps=100).splitlines()[0]
    line = without_kept_at(line)
    assert re.sub(r"made at \S*test_flat\.py:\d+ in", "made at LINE in", line) == said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["of_bytes", "of_tensors", "has_cycles", "replaces_tensors"])
def test_noise_is_flat_in_both_halves(name: str) -> None:
    assert_flat(getattr(Noisy(), name), steps=100)


def test_tensors_are_no_longer_counted_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[HostBlocks] = []

    def made() -> HostBlocks:
        counted.append(HostBlocks())
        return counted[-1]

    def step() -> None:
        assert counted[-1].blocks.is_on
        if len(counted) == 2:
            raise RuntimeError("of the step")

    monkeypatch.setattr("memtools.testing._growth.HostBlocks", made)
    assert_flat(step, steps=20)
    with pytest.raises(RuntimeError, match="of the step"):
        assert_flat(step, steps=20)
    assert [one.blocks.is_on for one in counted] == [False, False]


def test_a_leak_that_nobody_could_look_at_has_no_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtools.testing._growth._LOOKS_NS", 0)
    said = failure(Trainer().leaks)
    assert "(allowed: 1 KiB): its holder is not known\n  fix: find the holder by hand:" in said


def test_shared_memory_is_a_part_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"use": 0, "shm": 4096}

    def step() -> None:
        parts["shm"] += 4096

    whole = GrowthTest(1024, "1 KiB", steps=41)
    whole._series["shm"] = Series(lambda: parts["shm"])
    for _ in range(40):
        step()
        whole.step()
    said = whole.end()
    assert said.startswith("shared memory grows by 4.0 KiB a step (allowed: 1 KiB): shared memory")
    assert "unlink()" in said


@pytest.mark.parametrize("warmup", [0, 10, 24])
def test_the_warm_up_is_not_judged(warmup: int) -> None:
    calls = itertools.count()
    kept: list[object] = []

    def step() -> None:
        if next(calls) < warmup:
            kept.append(bytes(50_000))

    assert_flat(step, steps=40, warmup=warmup)
    assert next(calls) == 40


def test_what_a_step_raises_passes_through_and_nothing_stays() -> None:
    def step() -> None:
        raise RuntimeError("of the step")

    gc.collect()
    before, threads = gc.get_freeze_count(), threading.active_count()
    with pytest.raises(RuntimeError, match="^of the step$"):
        assert_flat(step)
    assert (gc.get_freeze_count(), threading.active_count(), gc.isenabled()) == (
        before, threads, True,
    )  # fmt: skip
    gc.collect()
    assert [one for one in gc.get_objects() if type(one) in (GrowthTest, Series)] == []


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"step": 3}, TypeError, "step must be a function, got int"),
        ({"growth": "1 XB"}, ValueError,
         "growth must be a number of bytes or like \"1 KiB/step\", got '1 XB'"),
        ({"growth": "1 KiB/s"}, ValueError,
         "growth must be a number of bytes or like \"1 KiB/step\", got '1 KiB/s'"),
        ({"growth": "XB/step"}, ValueError,
         "growth must be a number of bytes or like \"1 KiB/step\", got 'XB'"),
        ({"growth": 0}, ValueError, "growth must be at least 1 byte, got 0"),
        ({"growth": 1.5}, TypeError, 'growth must be an int or like "1 KiB/step", got float'),
        ({"steps": 19}, ValueError, "steps must be at least 20, got 19"),
        ({"steps": "20"}, TypeError, "steps must be an int, got str"),
        ({"steps": True}, TypeError, "steps must be an int, got bool"),
        ({"warmup": 5.0}, TypeError, "warmup must be an int, got float"),
        ({"steps": 40, "warmup": 25}, ValueError,
         "warmup must be from 0 to 24, so that 16 of 40 steps are left, got 25"),
        ({"warmup": -1}, ValueError,
         "warmup must be from 0 to 184, so that 16 of 200 steps are left, got -1"),
        ({"device": "tpu"}, ValueError,
         "device must be \"auto\", \"cpu\", \"cuda\" or \"cuda:N\", got 'tpu'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_the_first_call(
    arguments: dict[str, Any], kind: type[Exception], said: str
) -> None:
    calls: list[int] = []
    with pytest.raises(kind) as caught:
        assert_flat(**{"step": lambda: calls.append(1), **arguments})
    assert str(caught.value) == said
    assert calls == []


def test_functions_whose_call_runs_nothing_are_refused() -> None:
    async def coroutine() -> None: ...

    def generator() -> Any:
        yield

    with pytest.raises(TypeError, match="step is a coroutine function, whose call runs nothing"):
        assert_flat(coroutine)
    with pytest.raises(TypeError, match="step is a generator function, whose call runs nothing"):
        assert_flat(generator)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(DeviceError, match="torch sees 0 CUDA devices"):
        assert_flat(lambda: None, device="cuda")


@pytest.mark.parametrize(("steps", "warmup"), [(20, None), (40, None), (400, 384), (3000, 2984)])
def test_a_leak_is_found_however_dear_readings_are(
    steps: int, warmup: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = itertools.count(0, 200_000_000)  # 0.2 s each
    monkeypatch.setattr(time, "thread_time_ns", lambda: next(now))
    whole = GrowthTest(1024, "1 KiB", steps=steps, warmup=warmup)
    whole._series["shm"] = Series(lambda: 2048 * whole.steps, whole.warmup_of(steps))
    for _ in range(steps):
        whole.step()
    assert "shared memory grows by 2.0 KiB a step (allowed: 1 KiB)" in whole.end()


@pytest.mark.parametrize(
    ("name", "collections", "looks"), [("works", 1, 0), ("leaks", 4, 3), ("makes_cycles", 4, 3)]
)
def test_its_own_cost_is_a_few_collections_and_looks(
    name: str, collections: int, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a reading for each step that is judged."""
    took: dict[str, int] = {"collections": 0, "looks": 0, "readings": 0}

    def counted(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            took[what] += 1
            return call(*arguments)

        return run

    monkeypatch.setattr(gc, "collect", counted("collections", gc.collect))
    monkeypatch.setattr(GrowthCensus, "look", counted("looks", GrowthCensus.look))
    monkeypatch.setattr(GrowthTest, "_use", counted("readings", GrowthTest._use))
    with contextlib.suppress(AssertionError):
        assert_flat(getattr(Trainer(), name))
    assert 1 <= took["collections"] <= collections
    assert took["looks"] <= looks
    assert took["readings"] <= 175 + 20


def test_growth_on_a_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [1 << 30]
    monkeypatch.setattr("memtools._base.devices.allocated", lambda indexes: held[0])
    whole = GrowthTest(1024, "1 KiB", [0], steps=40)
    for _ in range(40):
        held[0] += 1 << 20
        whole.step()
    said = whole.end()
    assert said.startswith("memory on the device grows by 1.0 MiB a step (allowed: 1 KiB): its ")
    assert "torch.cuda.memory._record_memory_history()" in said
    assert "the C heap" not in said  # who holds it is not known


@pytest.fixture
def mapped() -> Iterator[Callable[[], None]]:
    """A step that maps 64 KiB and writes to it, as a library with an allocator of its own does."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    blocks: list[int] = []

    def step() -> None:
        blocks.append(libc.mmap(None, 64 << 10, 3, 0x22, -1, 0))
        ctypes.memset(blocks[-1], 1, 64 << 10)

    yield step
    for block in blocks:
        libc.munmap(block, 64 << 10)


@pytest.mark.slow
def test_memory_that_a_library_maps_by_itself_is_a_failure(mapped: Callable[[], None]) -> None:
    text = failure(mapped)
    found = re.match(r"resident memory grows by ([\d.]+) KiB a step \(allowed: 1 KiB\): ", text)
    assert found is not None
    assert float(found[1]) == pytest.approx(64, rel=0.1)
    assert "memory outside malloc +" in text
    assert text.endswith("seen over 175 steps, after 25 of warm-up")


class Rows:
    """A buffer that is filled row by row."""

    def __init__(self) -> None:
        self.rows = torch.empty(4000, 16 << 10)
        self.count = itertools.count()

    def step(self) -> None:
        self.rows[next(self.count)] = 1.0


@pytest.mark.slow
def test_a_buffer_that_fills_is_a_warning_with_its_name() -> None:
    rows = Rows()
    with pytest.warns(UserWarning, match="not judged, because it ends when all is ") as caught:
        assert_flat(rows.step)
    (warning,) = caught
    assert "Rows.rows +" in str(warning.message)
    assert "(250.0 MiB when full, " in str(warning.message)
    assert warning.filename == __file__

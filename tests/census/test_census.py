"""The census: what lives, counted without touching it."""

from __future__ import annotations

import _testcapi
import gc
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memtools
from memtools import _core
from memtools._base import torch as bridge
from tests.census.older import older_torch


@pytest.fixture(params=["shim", "public attributes"])
def _each_way(
    request: pytest.FixtureRequest, without_shim: Any, monkeypatch: Any
) -> Iterator[None]:
    if request.param == "shim":
        yield
        return
    with without_shim():
        monkeypatch.setattr("memtools._base.torch.connect", older_torch)
        yield


class Plain(torch.Tensor):
    """A subclass whose hooks must not run."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if ARMED:
            raise RuntimeError("touched")
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(torch.Tensor):
    """One whose shape and device are answered by Python."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, dispatch_sizes_strides_policy="sizes",
            dispatch_device=True, device=inner.device,
        )  # fmt: skip

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if ARMED:
            raise RuntimeError("touched")
        return NotImplemented


ARMED: list[bool] = []


class Touchy:
    """What a proxy may do when it is looked at."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise RuntimeError("touched")

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("touched")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("touched")

    def __hash__(self) -> int:
        return 7

    def __len__(self) -> int:
        raise RuntimeError("touched")

    __bool__ = __len__


class TouchyDict(dict):  # type: ignore[type-arg]
    __getitem__ = __iter__ = __len__ = __eq__ = __contains__ = items = None  # type: ignore[assignment]
    __hash__ = None


class Meta(type):
    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError("touched")

    def __instancecheck__(cls, other: object) -> bool:
        raise RuntimeError("touched")


class Odd(metaclass=Meta):
    pass


def odd_tensors() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some kinds are announced as new or old
        return make_odd_tensors()


def make_odd_tensors() -> list[Any]:
    part = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    return [
        torch.ones(4, 97).as_subclass(Plain),
        Wrapper(torch.ones(5, 97)),
        torch.eye(6).to_sparse(),
        torch.eye(6).to_sparse_csr(),
        torch.quantize_per_tensor(torch.ones(3, 97), 0.1, 0, torch.qint8),
        torch.ones(2, 97, dtype=torch.complex64).conj(),
        torch.tensor(1.0),
        torch.empty(0, 97),
        torch.empty(1, 97, device="meta"),
        torch.ones(7, 97).expand(5, 7, 97),
        part,
        jagged,
    ]


@pytest.mark.slow
def test_both_ways_of_reading_tensors_say_the_same(without_shim, monkeypatch):
    kept = [*odd_tensors(), torch.nn.Linear(98, 3), torch.empty(9, 99)[:, 3:7].t()]
    gc.collect()
    shim = memtools.census()
    with without_shim():
        monkeypatch.setattr("memtools._base.torch.connect", older_torch)
        public = memtools.census()
    assert set(shim.groups) == set(public.groups)
    assert (shim.bytes, len(kept)) == (public.bytes, 14)
    assert shim.bytes > 0


@pytest.mark.slow
@pytest.mark.usefixtures("_each_way")
def test_nothing_of_the_programs_code_runs():
    gc.collect()  # torch's exceptions may keep an earlier run of this function
    values = [1.5, 2.5]
    kept = [[Touchy(), values] for _ in range(300)]
    proxies = [weakref.proxy(kept[0][1].__class__), TouchyDict(a=values), Odd(), Odd]
    tensors = odd_tensors()
    before = memtools.census()
    more = [TouchyDict({Touchy(): [object()]}) for _ in range(50)]
    ARMED.append(True)
    try:
        later = memtools.census()
        growth = later.diff(before)
        assert [h.path for h in memtools.holder_of([values])]
        assert growth.holders()
        assert str(later), str(growth)
    finally:
        ARMED.clear()
    assert later.types["tests.census.test_census.Touchy"] == 350
    assert later.types["tests.census.test_census.TouchyDict"] == 51
    assert len(proxies) + len(tensors) + len(more) > 50


@pytest.mark.slow
def test_a_half_built_and_a_cyclic_object_are_counted_like_others():
    def half() -> Iterator[int]:
        yield len(memtools.census().groups)

    assert len(tuple(half())) == 1  # a tuple that is being built
    cycle: list[Any] = []
    cycle.append(cycle)
    assert memtools.census().types["list"] > 0
    assert [h.path for h in memtools.holder_of([cycle])] != []


@pytest.mark.slow
def test_a_census_keeps_nothing_alive_and_changes_no_reference_count():
    tensor, store = torch.empty(3, 95), [torch.empty(3, 95) for _ in range(9)]
    before, alive = memtools.census(), weakref.ref(store[0])
    counts = [sys.getrefcount(t) for t in (tensor, *store)]
    for _ in range(3):
        growth = memtools.census().diff(before)
        growth.holders()
        memtools.holder_of(store)
    assert [sys.getrefcount(t) for t in (tensor, *store)] == counts
    kind = type("Passing", (), {})
    passing = [kind() for _ in range(9)]
    look, gone = memtools.census(), weakref.ref(kind)
    del kind, passing
    store.clear()
    gc.collect()
    assert gone() is None
    assert alive() is None
    assert repr(look).startswith("Census(")


@pytest.mark.slow
def test_the_new_ones_are_sampled_and_never_an_old_one():
    old = [torch.empty(2, 96) for _ in range(2000)]
    before = memtools.census()
    fresh = [torch.empty(2, 96) for _ in range(2000)]
    growth = memtools.census().diff(before)
    assert [(g.kind.shape, g.count) for g in growth.groups] == [((2, 96), 2000)]
    found = growth.sample(limit=10_000)
    assert len(found) > 1600  # not one in 16, nor some that lie where the first census made its own
    assert {id(t) for t in found} <= {id(t) for t in fresh}
    assert len(growth.sample()) == 64
    assert len(old) == 2000


@pytest.mark.slow
def test_objects_of_a_growing_type_are_sampled_too():
    class Row:
        pass

    before = memtools.census()
    rows = [Row() for _ in range(20_000)]
    growth = memtools.census().diff(before)
    (more,) = [t for t in growth.types if t.type.endswith("Row")]
    assert more.count == 20_000
    found = growth.sample(more, limit=20_000)
    assert {id(row) for row in found} <= {id(row) for row in rows}
    assert len(found) >= 0.99 * len(rows)  # so that a single new one is found, too


def test_nothing_grew():
    look = memtools.census()
    growth = look.diff(look)
    assert not growth
    assert growth.sample() == []
    assert memtools.holder_of([]) == []
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        growth.holders(steps=0)


@pytest.mark.slow
def test_frozen_objects_are_counted_and_can_be_holders():
    code = """
import gc, torch, memtools
class Block:
    def __init__(self): self.history = [torch.empty(3, 5)]
block = Block()
first = memtools.census()
gc.collect(); gc.freeze()
before = memtools.census()
assert [g.count for g in before.groups] == [1], before
assert before.objects > 0.75 * first.objects  # descriptors of built-in types are not reached
block.history += [torch.empty(3, 5) for _ in range(300)]
print(memtools.census().diff(before).holders()[0].path)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("list Block.history\n", "")


def test_without_torch_objects_and_their_holders_are_found():
    code = """
import sys; sys.modules["torch"] = None
import memtools
class Row: pass
class Log: pass
log = Log(); log.rows = []
before = memtools.census()
log.rows += [Row() for _ in range(300)]
growth = memtools.census().diff(before)
(more,) = [t for t in growth.types if t.type == "Row"]
print(growth.groups, more.count, growth.holders(more)[0].path)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("() 300 list Log.rows\n", "")


def test_looking_imports_no_torch():
    code = "import sys, memtools; memtools.census(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.slow
def test_other_threads_may_make_and_drop_tensors_meanwhile():
    stop = threading.Event()
    faults: list[BaseException] = []

    def churn() -> None:
        kept: list[torch.Tensor] = []
        try:
            while not stop.is_set():
                kept.append(torch.empty(2, 94))
                if len(kept) > 50:
                    kept.clear()
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=churn) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        before = memtools.census()
        for _ in range(5):
            memtools.census().diff(before).holders()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert faults == []


CALLS = {
    "_census": lambda: _core._census(torch.Tensor, True),
    "_census, listed": lambda: _core._census(torch.Tensor, False),
    "_fresh": lambda: _core._fresh(list, bytes(4096), 100),
    "_referrers": lambda: _core._referrers([CALLS, ARMED, gc]),
    "_instances": lambda: _core._instances((type(gc), torch.Tensor)),
}


def by_the_list(*classes):
    """The objects of just these classes. Makes no function, which were an object too."""
    found = []
    for one in gc.get_objects():
        if type(one) in classes:
            found.append(one)
    return found


def is_same(found, listed):
    return [id(one) for one in found] == [id(one) for one in listed]


def test_objects_of_some_types_come_as_the_collector_lists_them():
    class Own:
        pass

    kept = [Own() for _ in range(3)]
    collecting = []

    def called(phase, info):  # inside of a collection the lists are in pieces
        collecting.append((phase, _core._instances((Own,)), by_the_list(Own)))

    gc.callbacks.append(called)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(called)
    assert [phase for phase, *_ in collecting] == ["start", "stop"]
    kept += [Own() for _ in range(3)]
    gc.disable()
    try:
        for classes in ((Own,), (type(gc), Own), (type(len),), (type, type(by_the_list))):
            assert is_same(_core._instances(classes), by_the_list(*classes))
    finally:
        gc.enable()
    for _, found, listed in collecting:
        assert is_same(found, listed)
        assert is_same(found, kept[:3])


def test_objects_that_were_frozen_are_found_once_and_last():
    class Own:
        pass

    class Unreached(dict):
        pass

    gc.collect()
    old, lost = Own(), Unreached()
    lost["itself"] = lost
    number = id(lost)
    gc.freeze()
    del lost
    try:
        new = Own()
        assert is_same(_core._instances((Own,)), [new, old])
        assert [id(one) for one in _core._instances((Unreached,))] == [number]
    finally:
        gc.unfreeze()
    assert is_same(_core._instances((Own,)), by_the_list(Own))
    gc.collect()
    assert _core._instances((Unreached,)) == []


def test_objects_of_some_types_are_found_whatever_lies_in_sys_modules(monkeypatch):
    class Own:
        pass

    own = Own()
    for name, strange in {"a.1": own, "a.2": None, "a.3": 7, "a.4": own, "a.5": ()}.items():
        monkeypatch.setitem(sys.modules, name, strange)
    assert is_same(_core._instances((Own,)), [own])
    monkeypatch.setattr(sys, "modules", {})
    assert is_same(_core._instances((Own,)), [own])


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_whatever_allocation_fails_it_is_a_memory_error_and_nothing_is_left(name):
    """The number of allocations depends on the heap, so the last ones are sampled."""
    bridge.connect()
    call = CALLS[name]
    call()
    counts = [sys.getrefcount(o) for o in (CALLS, ARMED, gc, torch.Tensor)]
    failed = at = 0
    while at < 20_000:
        _testcapi.set_nomemory(at)
        try:
            call()
        except MemoryError:
            failed += 1
        else:
            _testcapi.remove_mem_hooks()
            break
        finally:
            _testcapi.remove_mem_hooks()
        assert gc.isenabled()
        assert [sys.getrefcount(o) for o in (CALLS, ARMED, gc, torch.Tensor)] == counts
        at += 1 if at < 60 else 1 + at // 6
    assert failed > 10


@pytest.mark.parametrize("answer", [None, 7, (1, 2), {}])
@pytest.mark.parametrize(
    "look",
    [
        memtools.census,
        lambda: _core._referrers([gc]),
        lambda: _core._fresh(dict, bytes(1024), 3),
        lambda: memtools.holder_of(gc),
    ],
    ids=["census", "_referrers", "_fresh", "holder_of"],
)
def test_a_replaced_get_objects_that_returns_no_list_is_named(look, answer, monkeypatch):
    monkeypatch.setattr(gc, "get_objects", lambda *_: answer)
    with pytest.raises(TypeError, match=r"gc.get_objects\(\) returned .*, not a list"):
        look()


def test_the_table_is_short_and_says_what_it_saw():
    kept = [torch.empty(n, 92) for n in range(1, 30)]
    text = str(memtools.census())
    assert len(text.splitlines()) == 15
    assert "other groups" in text
    assert "29  92  float32" not in text
    assert len(kept) == 29

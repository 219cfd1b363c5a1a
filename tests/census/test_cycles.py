"""collect(): a collection that can say which tensors hung on the cycles that it freed."""

from __future__ import annotations

import _testcapi
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memtools._census import cycles
from memtools._census.cycles import Collected, collect
from tests.kit.interrupts import interrupted
from tests.kit.ownprocess import in_own_process


@pytest.fixture(autouse=True)
def _only_garbage_of_ours() -> Iterator[None]:
    """No automatic collection comes between, what pytest drops is no garbage of ours (and full
    collections are short), and the collector is left as it was."""
    enabled, flags, garbage = gc.isenabled(), gc.get_debug(), list(gc.garbage)
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.unfreeze()
    assert not cycles._inspectors
    assert (gc.get_debug(), gc.garbage) == (flags, garbage)
    (gc.enable if enabled else gc.disable)()


class Hook:
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer


class Trainer:
    """The usual cycle: what it made refers to it."""

    def __init__(self, *tensors: torch.Tensor, **more: Any) -> None:
        self.hook = Hook(self)
        self.metrics = list(tensors)
        vars(self).update(more)


class Mine(torch.Tensor):
    pass


def garbage(*tensors: torch.Tensor, **more: Any) -> None:
    Trainer(*tensors, **more)


def alive(kind: type = Trainer) -> int:
    """How many there are. A weak reference would not tell: it dies before what is looked at."""
    return sum(type(obj) is kind for obj in gc.get_objects())


@pytest.mark.slow
def test_an_ordinary_collection_looks_at_nothing():
    garbage(torch.empty(3))
    found = collect()
    assert (found.tensors, found.tensor_bytes, found.examples) == (None, None, ())
    assert found.objects >= 4
    assert found.ms > 0
    assert alive() == 0


@pytest.mark.slow
def test_objects_are_what_a_bare_collection_says():
    counts = []
    for call in (gc.collect, lambda: collect(inspect=True).objects, lambda: collect().objects):
        for _ in range(50):
            garbage(torch.empty(3))
        counts.append(call())
        assert alive() == 0
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.slow
def test_tensors_of_every_class_are_counted_and_a_shared_storage_once():
    base = torch.empty(64, 10)
    int8 = torch.empty(6, dtype=torch.int8)
    garbage(*base[:8], torch.nn.Parameter(torch.empty(5)), int8.as_subclass(Mine))
    found = collect(inspect=True)
    assert found.tensors == 10
    assert found.tensor_bytes == 64 * 10 * 4 + 5 * 4 + 6


@pytest.mark.slow
def test_garbage_without_tensors_shows_none():
    garbage()
    assert collect(inspect=True).tensors == 0


class Touchy:
    """A proxy that raises, or loads things, as it is touched."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise RuntimeError("touched")

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("touched")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("touched")

    __hash__ = None  # type: ignore[assignment]


class Meta(type):
    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError("touched")

    def __eq__(cls, other: object) -> bool:
        raise RuntimeError("touched")

    __hash__ = None  # type: ignore[assignment]


class Odd(metaclass=Meta):
    pass


@pytest.mark.slow
def test_nothing_of_the_programs_code_runs():
    touchy = Touchy()
    object.__setattr__(touchy, "me", [touchy, torch.empty(2), Odd()])
    tensors = torch.empty(3).as_subclass(Mine)
    tensors.odd = [touchy, tensors]
    del touchy, tensors
    found = collect(inspect=True)
    assert found.tensors == 2
    assert any("Touchy" in example for example in found.examples)


@pytest.mark.slow
def test_the_examples_are_the_largest_kinds_and_what_lay_beside_them():
    for _ in range(2):
        garbage(
            torch.empty(256, 256),
            logs={"loss": torch.empty(3)},
            w=torch.nn.Parameter(torch.ones(2)),
        )
        garbage(torch.empty(1, dtype=torch.int8))
    assert collect(inspect=True).examples == (
        "[256, 256] float32 tensor, with Hook, Trainer",
        "[3] float32 tensor, with Hook, Trainer",
        "[2] float32 Parameter, with Hook, Trainer",
    )


def by_exception() -> None:
    batch = torch.ones(3, 5)
    try:
        raise ValueError(batch.shape)
    except ValueError as error:
        kept = error  # noqa: F841


def by_closure() -> None:
    loss = torch.ones(9)
    loss.log = lambda: loss


def by_list() -> None:
    rows: list[Any] = [torch.ones(4)]
    rows.append(rows)


def by_key() -> None:
    rows: dict[str, Any] = {"k" * 41: torch.ones(6)}
    rows["me"] = rows


def by_attribute() -> None:
    out = torch.ones(8)
    out.hook = Hook(out)


def by_class() -> None:
    class Config:
        table = torch.ones(2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (by_exception, "[3, 5] float32 tensor, with frame of by_exception()"),
        (by_closure, "[9] float32 tensor, with function <lambda>()"),
        (by_list, "[4] float32 tensor, with list"),
        (by_key, "[6] float32 tensor, with dict"),
        (by_attribute, "[8] float32 tensor, with Hook"),
        (by_class, "[2] float32 tensor, with class Config"),
    ],
)
def test_an_example_of_each_usual_cycle(make, text):
    make()
    assert collect(inspect=True).examples == (text,)


@pytest.mark.slow
def test_a_finalizer_runs_once_and_weak_references_die():
    class Final:
        def __del__(self) -> None:
            ran.append(ref())

    ran, called = list[Any](), list[Any]()
    obj: Any = Final()
    obj.me, obj.tensor = obj, torch.empty(2)
    ref, tensor = weakref.ref(obj, called.append), weakref.ref(obj.tensor)
    del obj
    assert collect(inspect=True).tensors == 1
    assert len(ran) == 1
    assert called == [ref]
    assert (ref(), tensor(), alive(Final)) == (None, None, 0)
    assert collect(inspect=True).objects == 0
    assert len(ran) == 1


@pytest.mark.slow
def test_what_a_finalizer_brings_back_lives_and_is_not_counted():
    class Lazarus:
        def __del__(self) -> None:
            back.append(self)

    back = list[Any]()
    obj: Any = Lazarus()
    obj.me, obj.tensor = obj, torch.full((2,), 7.0)
    del obj
    assert collect(inspect=True).tensors == 0
    assert back[0].tensor.tolist() == [7, 7]


@pytest.mark.slow
def test_what_cannot_be_freed_stays_in_gc_garbage_as_ever():
    kind: Any = _testcapi.with_tp_del(type("Old", (), {"__tp_del__": lambda self: None}))
    old = kind()
    old.me, old.tensor = old, torch.empty(2)
    try:
        del old
        assert collect(inspect=True).tensors == 1
        assert [type(obj) for obj in gc.garbage] == [kind]
    finally:
        vars(gc.garbage.pop()).clear()


@pytest.mark.slow
def test_the_programs_own_debug_flags_and_garbage_are_left():
    mine = torch.empty(5)
    gc.garbage.append(mine)
    try:
        gc.set_debug(gc.DEBUG_SAVEALL)
        garbage(torch.empty(2))
        assert collect(inspect=True).tensors == 1
        assert gc.get_debug() == gc.DEBUG_SAVEALL
        assert gc.garbage[0] is mine
        assert len(gc.garbage) > 3  # it asked for that
        gc.set_debug(0)
        del gc.garbage[1:]
        assert collect(inspect=True).tensors == 1  # it is garbage yet
        assert gc.garbage == [mine]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.slow
def test_a_young_collection_counts_the_young():
    old = Trainer(torch.empty(2))
    gc.collect()
    del old
    garbage(torch.empty(3), torch.empty(3))
    found = collect(0, inspect=True)
    assert found.tensors == 2
    assert alive() == 0  # the old one is freed by the full one that comes after


@pytest.mark.slow
def test_an_inspection_within_an_inspection_is_an_ordinary_collection():
    class Final:
        def __del__(self) -> None:
            inner.append(collect(inspect=True))

    inner = list[Collected]()
    obj: Any = Final()
    obj.me, obj.tensor = obj, torch.empty(2)
    del obj
    assert collect(inspect=True).tensors == 1
    assert [found.tensors for found in inner] == [None]


@pytest.mark.slow
def test_other_threads_make_and_collect_garbage_meanwhile():
    stop, made, seen = threading.Event(), list[int](), list[Collected]()
    interval = sys.getswitchinterval()

    def work() -> None:
        # Not without end: where a collection is slower than these two threads, each that follows
        # finds more than it frees.
        while not stop.is_set() and len(made) < 20_000:
            garbage(torch.empty(4))
            made.append(1)
            gc.collect(0)

    gc.enable()
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    sys.setswitchinterval(1e-6)  # they come between wherever they can
    while len(made) < 1_000:
        seen.append(collect(inspect=True))
    sys.setswitchinterval(interval)
    stop.set()
    for thread in threads:
        thread.join()
    collect(inspect=True)
    assert all(found.tensors is not None for found in seen)
    assert alive() == 0


@pytest.mark.slow
def test_an_interrupt_anywhere_leaves_flags_and_garbage_as_they_were():
    struck, places = True, 0
    while struck:
        garbage(torch.empty(4))
        struck = interrupted(cycles, places, lambda: collect(inspect=True))
        assert (gc.get_debug(), gc.garbage, cycles._inspectors) == (0, [], {}), places
        gc.collect()
        assert alive() == 0, places
        places += 1
    assert places > 60


@pytest.mark.slow
def test_a_fault_in_the_look_leaves_nothing_behind(monkeypatch):
    def fail(*args: Any) -> None:
        raise MemoryError

    garbage(torch.empty(4))
    monkeypatch.setattr("memtools._census.census._merged", fail)
    with pytest.raises(MemoryError) as error:
        collect(inspect=True)
    gc.collect()
    assert alive() == 0  # though the traceback keeps the frames
    assert error.tb is not None


@pytest.mark.slow
def test_the_first_inspection_of_a_process_finds_what_there_is():
    """What it imports for its look would make Python collect the garbage before it is counted."""
    code = """
        import gc, sys
        from memtools._census.cycles import collect

        class Cycle:
            def __init__(self):
                self.me = self

        gc.collect()
        for _ in range(gc.get_threshold()[0] - 100):
            Cycle()
        assert "memtools._census.holders" not in sys.modules
        print(collect(inspect=True).objects >= 600)
    """
    assert in_own_process(code) == "True\n"


@pytest.mark.slow
def test_without_torch_there_are_no_tensors():
    program = (
        "import gc, sys; from memtools._census.cycles import collect\n"
        "l = []; l.append(l); del l\n"
        "found = collect(inspect=True)\n"
        "assert found.objects >= 1 and (found.tensors, found.tensor_bytes) == (0, 0), found\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

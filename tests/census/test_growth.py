"""GrowthCensus: who only ever gained between looks at the heap, by name and by rate."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import io
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from memtools._base.sentences import of_new_objects
from memtools._census.growth import GrowthCensus
from memtools._census.holders import Holder
from tests.census.older import older_torch
from tests.kit.ownprocess import in_own_process

STEPS = (16, 24, 32, 48)


class Trainer:
    """What the loops of these tests keep things in."""

    def __init__(self) -> None:
        self.losses: Any = []


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    global TRAINER
    TRAINER = Trainer()
    yield TRAINER
    del TRAINER


def looked(step: Callable[[int], object], steps: tuple[int, ...] = STEPS) -> GrowthCensus:
    """A census after looks at these steps of a loop."""
    census = GrowthCensus(least_rate=1024)
    for i in range(1, steps[-1] + 1):
        step(i)
        if i in steps:
            census.look(i)
    return census


def named(step: Callable[[int], object], steps: tuple[int, ...] = STEPS) -> dict[str, Holder]:
    return {holder.path: holder for holder in looked(step, steps).holders()}


def test_a_list_that_gains_is_named_at_the_third_look(trainer):
    census = GrowthCensus(least_rate=1024)
    for i in range(1, 33):
        trainer.losses.append(torch.ones(1024))
        if i in (16, 24):
            census.look(i)
            assert census.holders() == ()
    census.look(32)
    (holder,) = census.holders()
    assert (holder.path, holder.kind, holder.length) == ("list Trainer.losses", "list", 32)
    assert (holder.what, holder.new_objects) == ("[1024] float32 tensors", 16)
    assert (holder.since_step, holder.rises, holder.only_gained) == (16, 2, True)
    assert holder.rate_bytes == pytest.approx(4096 + 450, rel=0.05)
    assert (census.looks, census.cut) == (3, False)


@pytest.mark.parametrize(
    ("kept", "whole"),
    [
        (lambda: torch.ones(8, 1024)[:, -1], 32768),
        (lambda: torch.ones(8, 1024)[:6], 0),  # most of it
        (lambda: torch.ones(1024), 0),
        (lambda: tuple(torch.ones(2, 1024)), 0),  # all parts of it, so that it is not kept in vain
    ],
)
def test_views_that_keep_larger_tensors_are_told_with_what_they_keep(trainer, kept, whole):
    (holder,) = named(lambda i: trainer.losses.append(kept())).values()
    assert holder.view_bytes == whole


CASES: dict[str, tuple[Callable[[Trainer, int], object], str, float]] = {
    "deque": (
        lambda t, i: t.__dict__.setdefault("queue", collections.deque()).append(bytes(2000)),
        "deque Trainer.queue",
        2048,
    ),
    "dict of lists": (
        lambda t, i: t.__dict__.setdefault("m", {}).setdefault(i % 3, []).append(bytes(3000)),
        "dict Trainer.m (3 that grow in it)",
        3064,
    ),
    "set": (
        lambda t, i: t.__dict__.setdefault("s", set()).add(str(i) * 999),
        "set Trainer.s",
        2000,
    ),
    "array made anew": (
        lambda t, i: setattr(t, "all", np.zeros(500 * i)),
        "Trainer.all",
        4000,
    ),
    "text made anew": (lambda t, i: setattr(t, "log", "x" * 3000 * i), "Trainer.log", 3000),
    "bytearray": (
        lambda t, i: t.__dict__.setdefault("b", bytearray()).extend(bytes(5000)),
        "Trainer.b",
        5000,
    ),
    "list made anew": (
        lambda t, i: setattr(t, "losses", [*t.losses, np.zeros(300)]),
        "list Trainer.losses",
        2540,
    ),
    "arrays of objects": (
        lambda t, i: t.losses.append(np.array([bytes(2000)], dtype=object)),
        "list Trainer.losses",
        2200,
    ),
    "views of views": (
        lambda t, i: t.losses.append(np.zeros(500)[::2][::2]),
        "list Trainer.losses",
        4300,
    ),
    "callbacks of a library": (
        lambda t, i: t.__dict__.setdefault("stack", contextlib.ExitStack()).callback(
            len, bytes(9000)
        ),
        "deque ExitStack._exit_callbacks",
        9500,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_gains_is_named_with_its_rate(trainer, case):
    step, path, rate = CASES[case]
    holders = named(lambda i: step(trainer, i))
    assert list(holders) == [path]
    assert holders[path].rate_bytes == pytest.approx(rate, rel=0.15)


def test_without_the_shim_tensors_weigh_what_the_newest_ones_do(trainer, without_shim, monkeypatch):
    shared, trainer.views = torch.ones(100_000), []

    def step(i: int) -> None:
        trainer.losses.append({"loss": torch.ones(2048), "gates": [torch.ones(16, 8)] * 2})
        trainer.views += [shared[i:] for _ in range(4)]
        trainer.last = torch.ones(1000 * i)  # which nobody can weigh

    with without_shim():
        monkeypatch.setattr("memtools._base.torch.connect", older_torch)
        found = named(step)
    assert set(found) == {"list Trainer.losses", "list Trainer.views"}
    losses, views = found["list Trainer.losses"], found["list Trainer.views"]
    assert losses.rate_bytes == pytest.approx(8192 + 512 + 2 * 444 + 400, rel=0.05)
    assert (losses.what, losses.new_objects) == ("[2048] float32 tensors", 32)
    assert views.rate_bytes == pytest.approx(4 * 444, rel=0.1), "what they share came once"


def test_what_is_cleared_or_has_filled_is_not_named(trainer):
    trainer.ring, trainer.cleared = [None] * 8, []

    def step(i: int) -> None:
        trainer.ring[i % 8] = torch.ones(5000)
        trainer.cleared.append(torch.ones(5000))
        if i % 20 == 0:
            trainer.cleared.clear()
        if i < 20:
            trainer.losses.append(torch.ones(5000))

    assert named(step) == {}


def test_a_bounded_container_says_how_much_it_holds(trainer):
    trainer.losses = collections.deque(maxlen=1000)

    @functools.lru_cache(maxsize=900)
    def load(i: int) -> bytes:
        return bytes(9000)

    def step(i: int) -> None:
        trainer.losses.append(bytes(5000))
        load(i)

    trainer.load = load
    found = named(step)
    assert found["deque(maxlen=1000) Trainer.losses"].capacity == 1000
    (cache,) = (h for h in found.values() if h.kind == "lru_cache")
    assert cache.path.startswith("lru_cache of ")
    assert (cache.capacity, cache.length) == (900, 48)
    assert cache.rate_bytes == pytest.approx(9100, rel=0.05)


def test_a_bounded_cache_that_slows_down_still_fills(trainer):
    @functools.lru_cache(maxsize=3000)
    def decode(i: int) -> np.ndarray:
        return np.zeros(2000)

    kept = collections.deque[Any]()

    def step(i: int) -> None:
        for _ in range(24 if i <= 32 else 2):
            decode(trainer.losses.append(0) or len(trainer.losses))
            kept.append(bytes(2000))

    (holder,) = named(step, (16, 24, 32, 48, 64)).values()
    assert (holder.kind, holder.length, holder.capacity) == ("lru_cache", 832, 3000)
    assert (holder.since_step, holder.steps) == (32, 32)
    assert holder.rate_bytes == pytest.approx(2 * 16_200, rel=0.05)


def test_an_unbounded_cache_of_a_method(trainer):
    class Frames:
        @functools.cache  # noqa: B019
        def load(self, i: int) -> torch.Tensor:
            return torch.ones(2000)

    frames = trainer.frames = Frames()
    (holder,) = named(frames.load).values()
    assert (holder.kind, holder.capacity) == ("lru_cache", None)
    assert holder.path == "lru_cache of Frames.load()"
    assert holder.rate_bytes == pytest.approx(8500, rel=0.1)
    assert holder.what == "[2000] float32 tensors"


class Policy:
    """A mask, and parameters so deep below it that no sample gets there."""

    def __init__(self) -> None:
        self.mask = np.zeros(4)
        self.layers: Any = [[[[[[torch.ones(8192)]]]]]]


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        (Policy, "Policy objects"),  # and not [4] float64 arrays, which are 32 of its 33,000 bytes
        (lambda: (np.zeros(4), [[[[[torch.ones(8192)]]]]]), "[4] float64 arrays"),
        (lambda: [torch.ones(8192)], "[8192] float32 tensors"),
    ],
)
def test_objects_are_named_instead_of_the_little_that_a_sample_sees_of_them(trainer, entry, what):
    found = named(lambda i: trainer.losses.append(entry()))
    assert found["list Trainer.losses"].what.rpartition("test_growth.")[2] == what


def test_a_local_of_a_running_function():
    history: list[object] = []
    (path,) = named(lambda i: history.append(bytes(4000)))
    assert path in (
        "list local 'history' of test_a_local_of_a_running_function()",
        "list 'history' in closure of <lambda>()",
    )


def test_a_graph_that_is_carried_on_is_named_and_that_of_a_step_is_not(trainer):
    weight = torch.ones(8, requires_grad=True)

    def step(i: int) -> None:
        trainer.loss = (weight * i).sum()
        for _ in range(i):  # which is longer each time
            trainer.loss = trainer.loss * 2
        hidden = getattr(trainer, "hidden", weight)
        for _ in range(4):
            hidden = hidden * 2
        trainer.hidden = hidden

    (holder,) = named(step).values()
    assert holder.kind == "autograd graph"
    assert holder.path.endswith("in Trainer.hidden")
    assert holder.rate_bytes == pytest.approx(4 * 576, rel=0.1)


def test_who_carries_a_graph_on_is_named_in_the_middle_of_a_step(trainer):
    """`out` is still that of the step before, and older than the new `hidden`. Both lead to all
    steps before; what comes next is made of `hidden` alone."""
    weight, new = torch.ones(8, requires_grad=True), list[Any]()

    def step(i: int) -> None:
        if new:
            trainer.out = new.pop()
        hidden = getattr(trainer, "hidden", weight)
        trainer.hidden = hidden * hidden + 1
        new.append((trainer.hidden * 2).sum())

    (holder,) = named(step).values()
    assert holder.path.endswith("in Trainer.hidden")


def test_a_list_of_losses_that_were_not_detached_keeps_their_graphs(trainer):
    weight, outputs = torch.ones(8, requires_grad=True), list[Any]()
    trainer.outputs, trainer.numbers = outputs, []

    def step(i: int) -> None:
        outputs.append({"loss": (weight * i).exp().sum()})
        trainer.numbers.append(torch.ones(1000))

    found = named(step)
    (path,) = {path for path, holder in found.items() if holder.kind == "autograd graph"}
    assert path == "autograd graphs in Trainer.outputs"
    assert found[path].what == "scalar float32 tensors"
    assert found["list Trainer.numbers"].kind == "list"


def test_a_list_that_is_filled_in_place_of_none_ends_with_its_last_entry(trainer):
    trainer.samples, trainer.mixed = [None] * 100, []

    def step(i: int) -> None:
        trainer.samples[i * 7 % 100] = torch.ones(1000)
        trainer.mixed += [None, bytes(2000)]

    found = named(step)
    holder = found["list Trainer.samples"]
    assert (holder.length, holder.capacity) == (48, 100)
    assert (holder.new_objects, holder.what) == (32, "[1000] float32 tensors")
    assert found["list Trainer.mixed"].capacity is None
    trainer.samples = [bytes(16)] * 100
    found = named(lambda i: trainer.samples.__setitem__(i, bytes(4000)))
    assert list(found) == ["list Trainer.samples, whose entries grow"]


@pytest.mark.parametrize("entry", ["[]", "{'stats': {'events': []}}", "[{'events': []}]"])
def test_many_that_grow_deep_in_one_dict_are_that_dicts(trainer, entry):
    trainer.users = {key: eval(entry) for key in range(16)}  # `[]`, or what has a list in it

    def lists(found: Any) -> Iterator[list[Any]]:
        inner = list(found.values() if type(found) is dict else found)
        yield from [found] if type(found) is list and not inner else ()
        for one in inner:
            yield from lists(one) if type(one) in (list, dict) else ()

    events = list(lists(trainer.users))
    assert len(events) == 16
    found = named(lambda i: [one.append(bytes(500)) for one in events])
    (holder,) = found.values()
    assert holder.path == "dict Trainer.users (16 that grow in it)"
    assert (holder.what, holder.new_objects / holder.steps) == ("objects", 16)


def test_one_that_grows_deep_in_a_dict_and_those_of_a_short_one_stay_by_themselves(trainer):
    trainer.users = {key: {"events": []} for key in range(16)}
    (path,) = named(lambda i: trainer.users[7]["events"].append(bytes(2000)))
    assert path == "list Trainer.users[7]['events']"
    trainer.users = {key: {"a": [], "b": []} for key in range(4)}
    found = named(lambda i: [one.append(bytes(999)) for one in trainer.users[2].values()])
    assert list(found) == ["dict Trainer.users[2] (2 that grow in it)"]


def test_a_list_of_modules_is_named_by_who_has_it(trainer):
    class Progressive(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.columns = torch.nn.ModuleList()

    trainer.model = Progressive()
    (path,) = named(lambda i: trainer.model.columns.append(torch.nn.Linear(16, 16)))
    assert path == "dict Progressive.columns"
    trainer.model = torch.nn.Sequential()
    trainer.model.outputs = []
    (path,) = named(lambda i: trainer.model.outputs.append(torch.ones(999)))
    assert path == "list Sequential.outputs"


def test_exceptions_that_are_kept_are_told_from_other_entries(trainer):
    trainer.failures = []

    def step(i: int) -> None:
        batch = torch.ones(1000)
        try:
            raise ValueError(batch.shape)
        except ValueError as error:
            trainer.failures.append((i, error))

    (holder,) = named(step).values()
    assert (holder.path, holder.kind) == ("list Trainer.failures", "exceptions")
    assert holder.what == "[1000] float32 tensors"


def test_hooks_of_a_parameter_are_named_as_hooks(trainer):
    trainer.model = torch.nn.Linear(8, 8)

    def step(i: int) -> None:
        batch = torch.ones(1000)
        trainer.model.weight.register_hook(lambda grad: batch)

    (holder,) = named(step).values()
    assert holder.path == "OrderedDict Linear.weight._backward_hooks"
    assert (holder.kind, holder.what) == ("hooks", "[1000] float32 tensors")


def test_a_stream_in_memory_is_weighed_by_its_buffer(trainer):
    trainer.stream = io.BytesIO()
    (holder,) = named(lambda i: trainer.stream.write(bytes(4000)), (16, 24, 32, 48, 64)).values()
    assert (holder.path, holder.kind) == ("BytesIO Trainer.stream", "stream")
    assert holder.rate_bytes == pytest.approx(4000, rel=0.2)


def memory_file(size: int) -> mmap.mmap:
    fd = os.memfd_create("test")
    os.truncate(fd, size)
    made = mmap.mmap(fd, size)
    os.close(fd)
    return made


MAPS: dict[str, tuple[Callable[[], object], float]] = {
    "anonymous": (lambda: mmap.mmap(-1, 65536), 65536),
    "a file in memory": (lambda: memory_file(65536), 65536),
    "an array of one": (lambda: np.frombuffer(mmap.mmap(-1, 65536), np.uint8)[::2], 65536),
}


@pytest.mark.parametrize("case", MAPS)
def test_maps_of_memory_are_weighed(trainer, case):
    make, rate = MAPS[case]
    holders = named(lambda i: trainer.losses.append(make()))
    assert list(holders) == ["list Trainer.losses"]
    assert holders["list Trainer.losses"].rate_bytes == pytest.approx(rate, rel=0.05)


def test_maps_of_files_on_a_disk_and_closed_ones_weigh_nothing(trainer, tmp_path):
    def step(i: int) -> None:
        with tempfile.TemporaryFile(dir=tmp_path) as file:
            file.truncate(65536)
            trainer.losses.append(mmap.mmap(file.fileno(), 65536))
        closed = mmap.mmap(-1, 65536)
        closed.close()
        trainer.losses.append(closed)

    assert named(step) == {}


def test_lumps_into_a_list_that_was_empty_are_named_at_the_second(trainer):
    def step(i: int) -> None:
        if i % 25 == 0:
            trainer.losses += [bytes(4000) for _ in range(16)]

    (holder,) = named(step, (16, 24, 32, 48, 64)).values()
    assert (holder.path, holder.since_step, holder.rises) == ("list Trainer.losses", 24, 2)


def test_attributes_that_come_late_are_no_collection_and_a_growing_namespace_is(trainer):
    def late(i: int) -> None:
        if i in (20, 30, 40):
            setattr(trainer, f"part{i}", bytes(100_000))

    assert named(late) == {}
    steps = (4, 8, 12, 16, 20)
    (holder,) = named(lambda i: setattr(trainer, f"x{i}", bytes(3000)), steps).values()
    assert holder.path == "dict attributes of Trainer"


@pytest.mark.slow
def test_a_look_that_would_be_too_long_is_cut_and_says_so_and_forgets_nothing(trainer):
    census = GrowthCensus(least_rate=1024)
    for i in range(1, 33):
        trainer.losses.append(bytes(4000))
        if i in (8, 16, 24):
            census.look(i)
    assert (census.cut, len(census.holders())) == (False, 1)
    trainer.many = [[[i] for i in range(1000)] for _ in range(1100)]
    census.look(32)
    assert census.cut
    del trainer.many
    census.look(33)
    (holder,) = census.holders()
    assert (holder.path, holder.since_step, census.cut) == ("list Trainer.losses", 8, False)


#: Large structures that do not grow.
LARGE: dict[str, Callable[[], object]] = {
    "one list": lambda: [[i] for i in range(125_000)],
    "lists of lists": lambda: [[[i] for i in range(250)] for _ in range(500)],
    "dicts of few": lambda: [{j: [j] for j in range(8)} for _ in range(15_000)],
}


@pytest.mark.slow
@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize("entries", [0, 3000])
def test_a_quick_look_beside_a_large_structure_finds_what_a_whole_one_does(trainer, large, entries):
    """What grows may itself be long."""
    trainer.data, trainer.losses = LARGE[large](), {"kept": [bytes(1) for _ in range(entries)]}
    looks = {quick: GrowthCensus(least_rate=1024) for quick in (False, True)}
    for i in range(1, 49):
        trainer.losses["kept"] += [{"x": [bytes(2000)]} for _ in range(2)]
        for quick, census in looks.items() if i in STEPS else ():
            census.look(i, quick=quick and i > STEPS[0])
    (whole,), (quick,) = (census.holders() for census in looks.values())
    assert (looks[False].cut, looks[True].cut) == (False, True)
    assert (quick.path, quick.length) == (whole.path, whole.length)
    assert quick.rate_bytes == pytest.approx(whole.rate_bytes, rel=0.02)


@pytest.mark.slow
def test_a_quick_look_enters_a_part_of_a_large_heap():
    """In a process of its own: what other tests leave in one may be more than a walk enters."""
    code = """
        from memtools._core import GrowthTable
        from tests.census.growthcases import look

        for large in (0, 125_000, 250_000):
            kept = [[i] for i in range(large)]
            for quick in (False, True):
                table = GrowthTable()
                look(table, 1)
                print(look(table, 2, quick=quick)[1])
    """
    nodes = [int(line) for line in in_own_process(code).split()]
    whole, quick = nodes[::2], nodes[1::2]
    assert whole[2] >= whole[1] + 125_000
    assert quick[2] <= whole[0] + 1000


@pytest.mark.slow
def test_large_containers_are_entered_by_what_is_new_in_them(trainer):
    trainer.losses = [[i] for i in range(2_100_000)]  # more than a walk enters in full
    step = lambda i: trainer.losses.extend([[i, bytes(200)] for _ in range(20)])  # noqa: E731
    (holder,) = named(step, (4, 8, 12)).values()
    assert holder.path == "list Trainer.losses"
    assert holder.rate_bytes == pytest.approx(20 * (240 + 90), rel=0.3)


def test_looks_keep_nothing_alive(trainer):
    census = looked(lambda i: trainer.losses.append(Trainer()))
    before = gc.get_referrers(trainer.losses[-1])
    assert [obj for obj in before if obj is not trainer.losses and type(obj) is list] == []
    assert census.seconds > 0


def test_what_threads_hold_that_wait_for_ever_is_named_by_their_variables():
    over = threading.Event()

    def upload(embedding: torch.Tensor) -> None:
        over.wait()

    def step(i: int) -> None:
        threading.Thread(target=upload, args=(torch.ones(4096),)).start()

    try:
        holder = looked(step).holders()[0]  # the next one is threading's own list of threads
    finally:
        over.set()
    assert (holder.kind, holder.length, holder.only_gained) == ("calls", 48, True)
    assert "local 'embedding' of " in holder.path
    assert holder.path.endswith("upload()")
    assert holder.rate_bytes == pytest.approx(4096 * 4 + 444, rel=0.1)
    assert of_new_objects(holder) == "1 new running call a step"


def test_threads_of_a_pool_that_fills_are_not_named():
    over = threading.Event()

    def wait(batch: torch.Tensor) -> None:
        over.wait()

    def step(i: int) -> None:
        if i <= 20:
            threading.Thread(target=wait, args=(torch.ones(4096),)).start()

    try:
        assert looked(step, (16, 24, 32, 48, 64)).holders() == ()
    finally:
        over.set()

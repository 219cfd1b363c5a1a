"""Where 300 tensors were put, the holder says; one case for each kind of place."""

from __future__ import annotations

import collections
import functools
import gc
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import memtools
from memtools._census.census import TypeGrowth

N = 300
CACHE: list[Any] = []
TABLE: dict[int, Any] = {}


def new() -> torch.Tensor:
    return torch.empty(3, 5)


class MoEBlock(torch.nn.Module):
    seen: list[Any] = []

    def __init__(self) -> None:
        super().__init__()
        self.gate_history: list[Any] = []


class Slotted:
    __slots__ = ("__weakref__", "other", "things")

    def __init__(self) -> None:
        self.things: list[Any] = []


class Transition:
    def __init__(self, obs: Any) -> None:
        self.obs, self.reward = obs, 1.0


class Bag:
    """An object with attributes, whatever they are."""


Place = Callable[[], Any]  # puts the tensors somewhere and returns what keeps the place alive


def fill(store: Any) -> Any:
    for _ in range(N):
        store.append(new())
    return store


def a_list_of_a_module() -> object:
    block = MoEBlock()
    fill(block.gate_history)
    return block


def twelve_layers() -> object:
    layers = torch.nn.ModuleList(MoEBlock() for _ in range(3))
    for i in range(N):
        layers[i % 3].gate_history.append(new())
    return layers


def a_dict_under_a_key() -> object:
    bag = Bag()
    bag.metrics = {"loss": fill([]), "other": [1]}
    return bag


def a_dict_of_values() -> object:
    bag = Bag()
    bag.cache = {i: new() for i in range(N)}
    return bag


def a_deque_with_a_cap() -> object:
    bag = Bag()
    bag.items = fill(collections.deque(maxlen=1800))
    return bag


def a_closure() -> object:
    history: list[Any] = []

    def train() -> None:
        history.append(new())

    for _ in range(N):
        train()
    return train


def a_default_argument() -> object:
    def step(seen: list[Any] = []) -> None:  # noqa: B006
        seen.append(new())

    for _ in range(N):
        step()
    return step


def a_keyword_default() -> object:
    def step(*, seen: list[Any] = []) -> None:  # noqa: B006
        seen.append(new())

    for _ in range(N):
        step()
    return step


def a_function_attribute() -> object:
    def step() -> None: ...

    step.calls = fill([])  # type: ignore[attr-defined]
    return step


def a_module_attribute() -> object:
    return fill(CACHE)


def a_module_dict() -> object:
    TABLE.update((i, new()) for i in range(N))
    return TABLE


def a_class_attribute() -> object:
    fill(MoEBlock.seen)
    return None


def slots() -> object:
    return fill_slot(Slotted())


def fill_slot(slotted: Slotted) -> object:
    fill(slotted.things)
    return slotted


def a_generator() -> object:
    def samples() -> Iterator[int]:
        kept = fill([])
        yield len(kept)
        yield len(kept)

    running = samples()
    next(running)
    return running


def a_coroutine() -> object:
    @types.coroutine
    def pause() -> Iterator[None]:
        yield

    async def rollout() -> None:
        kept = fill([])
        await pause()
        kept.clear()

    task = rollout()
    task.send(None)
    return task


def tuples_in_a_list() -> object:
    bag = Bag()
    bag.buffer = [(i, new()) for i in range(N)]
    return bag


def instances_in_a_list() -> object:
    bag = Bag()
    bag.replay = [Transition(new()) for _ in range(N)]
    return bag


def dicts_in_a_list() -> object:
    bag = Bag()
    bag.records = [{"state": new(), "at": i} for i in range(N)]
    return bag


def a_set() -> object:
    bag = Bag()
    bag.pending = {new() for _ in range(N)}
    return bag


def a_weak_key_dictionary() -> object:
    bag = Bag()
    bag.keys, bag.per_object = [Bag() for _ in range(N)], weakref.WeakKeyDictionary()
    for key in bag.keys:
        bag.per_object[key] = new()
    return bag


def a_default_dict() -> object:
    bag = Bag()
    bag.by_step = collections.defaultdict(list)
    fill(bag.by_step["train"])
    return bag


def a_user_list() -> object:
    bag = Bag()
    bag.log = collections.UserList(new() for _ in range(N))
    return bag


def a_queue() -> object:
    bag = Bag()
    bag.inbox = queue.Queue()
    for _ in range(N):
        bag.inbox.put(new())
    return bag


def an_lru_cache() -> object:
    @functools.lru_cache(maxsize=1000)
    def embed(i: int) -> torch.Tensor:
        return new()

    for i in range(N):
        embed(i)
    return embed


def attributes_of_an_instance() -> object:
    bag = Bag()
    for i in range(N):
        setattr(bag, f"t{i}", new())
    return bag


def buffers_of_a_module() -> object:
    block = MoEBlock()
    for i in range(N):
        block.register_buffer(f"b{i}", new())
    return block


def a_traceback() -> object:
    def failing() -> None:
        batch = fill([])
        raise ValueError(len(batch))

    try:
        failing()
    except ValueError as error:
        return error


def a_thread_local() -> object:
    local = threading.local()
    local.kept = fill([])
    return local


def optimizer_state() -> object:
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(N)]
    sgd = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    for weight in weights:
        sgd.state[weight]["momentum_buffer"] = new()
    return sgd


PLACES: dict[Place, str] = {
    a_list_of_a_module: "list MoEBlock.gate_history",
    twelve_layers: "list MoEBlock.gate_history",
    a_dict_under_a_key: "list Bag.metrics['loss']",
    a_dict_of_values: "dict Bag.cache",
    a_deque_with_a_cap: "deque(maxlen=1800) Bag.items",
    a_closure: "list 'history' in closure of train()",
    a_default_argument: "list default argument 'seen' of step()",
    a_keyword_default: "list default argument 'seen' of step()",
    a_function_attribute: "list step.calls",
    a_module_attribute: f"list {__name__}.CACHE",
    a_module_dict: f"dict {__name__}.TABLE",
    a_class_attribute: "list MoEBlock.seen",
    slots: "list Slotted.things",
    a_generator: "list local 'kept' of generator samples()",
    a_coroutine: "list local 'kept' of coroutine rollout()",
    tuples_in_a_list: "list Bag.buffer, as [1] of each entry",
    instances_in_a_list: "list Bag.replay, as .obs of each entry",
    dicts_in_a_list: "list Bag.records, as ['state'] of each entry",
    a_set: "set Bag.pending",
    a_weak_key_dictionary: "dict Bag.per_object",
    a_default_dict: "list Bag.by_step['train']",
    a_user_list: "list Bag.log",
    a_queue: "deque Bag.inbox",
    an_lru_cache: "lru_cache of embed()",
    attributes_of_an_instance: "dict attributes of Bag",
    buffers_of_a_module: "dict MoEBlock._buffers",
    a_traceback: "list local 'batch' of failing(), kept by a traceback",
    a_thread_local: "list thread-local attribute kept",
    optimizer_state: "defaultdict SGD.state, as ['momentum_buffer'] of each entry",
}


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    gc.collect()  # a traceback of the test before is a cycle
    yield
    CACHE.clear(), TABLE.clear(), MoEBlock.seen.clear()


@pytest.mark.slow
@pytest.mark.parametrize("put", PLACES, ids=lambda put: put.__name__)
def test_the_holder_is_named(put: Place) -> None:
    before = memtools.census()
    kept = put()
    growth = memtools.census().diff(before)
    (group,) = [g for g in growth.groups if g.kind.shape == (3, 5)]
    assert (group.count, group.bytes) == (N, N * 60)
    holder = growth.holders(group, steps=N)[0]
    assert holder.path == PLACES[put]
    assert holder.new_objects >= 0.9 * N
    assert kept is None or kept is not holder


@pytest.mark.slow
def test_a_variable_of_a_running_function_is_named() -> None:
    def train() -> None:
        before = memtools.census()
        history = fill([])
        (holder,) = memtools.census().diff(before).holders(steps=N)
        assert holder.path == "list local 'history' of train()"
        assert holder.length == len(history)

    train()


@pytest.mark.slow
def test_single_objects_in_variables_of_a_module_are_not_told_beside_the_list(monkeypatch):
    loop = types.ModuleType("loop")
    monkeypatch.setitem(sys.modules, "loop", loop)
    before = memtools.census()
    loop.history = fill([])
    loop.__dict__.update({f"x{i}": new() for i in range(6)})
    found = memtools.census().diff(before).holders(steps=N)
    assert [holder.path for holder in found] == ["list loop.history"]
    del loop.history, found
    (holder,) = memtools.census().diff(before).holders(steps=N)
    assert (holder.path, holder.new_objects) == ("dict attributes of module loop", 6)


@pytest.mark.slow
def test_a_list_that_lives_in_a_dict_of_the_caller_is_the_holder() -> None:
    result = {"latents_sequence": [torch.ones(3) for _ in range(10)], "steps": 10}
    (found,) = memtools.holder_of(result["latents_sequence"])
    assert (found.kind, found.length, found.new_objects) == ("list", 10, 10)
    assert found.path == (
        "list local 'result'['latents_sequence'] of "
        "test_a_list_that_lives_in_a_dict_of_the_caller_is_the_holder()"
    )
    mine = list(result.pop("latents_sequence"))  # type: ignore[call-overload]
    (found,) = memtools.holder_of(mine)
    assert found.path == "nobody but the caller, who can free them"


@pytest.mark.slow
def test_one_object_is_asked_about_as_it_is() -> None:
    tensor = torch.ones(100, 100)
    keep = [tensor]
    for asked in (tensor, [tensor], (tensor,)):
        (found,) = memtools.holder_of(asked)
        assert (found.path, found.new_objects, found.new_bytes) == (
            "list local 'keep' of test_one_object_is_asked_about_as_it_is()", 1, 40_000,
        )  # fmt: skip
    held = "1 [100, 100] float32 tensor, 39.1 KiB"
    assert repr(found) == f"<Holder: {found.path}: {held}>"
    assert str(found) == f"+39.1 KiB: 1 new [100, 100] float32 tensor, held by {found.path}"
    assert len(keep) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Linear(2, 2),
        lambda: torch.nn.Sequential(torch.nn.Linear(2, 2)),
        lambda: torch.tensor(1.0),
        lambda: {"a": 1},
        lambda: {1, 2},
        lambda: collections.deque([torch.ones(2), torch.ones(2)]),
        lambda: bytearray(100),
        lambda: iter([1, 2]),
        lambda: "".join(map(str, range(50))),
        lambda: memtools.GateHistory(max_entries=2),
    ],
)
def test_what_is_not_a_list_is_one_object(make: Callable[[], Any]) -> None:
    kept = [make()]
    (found,) = memtools.holder_of(kept[0])
    assert found.path == "list local 'kept' of test_what_is_not_a_list_is_one_object()"
    assert found.new_objects == 1
    (alone,) = memtools.holder_of(make())
    assert alone.path == "nobody but the caller, who can free it"


@pytest.mark.slow
def test_a_list_of_a_class_with_methods_of_its_own_is_taken_as_it_is() -> None:
    class Odd(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise AssertionError

        def __len__(self) -> int:
            raise AssertionError

    kept = [bytearray(9) for _ in range(3)]
    (found,) = memtools.holder_of(Odd(kept))
    assert (found.length, found.new_objects) == (3, 3)


@pytest.mark.parametrize(("steps", "error"), [(0, ValueError), (-1, ValueError), ("2", TypeError)])
def test_steps_that_cannot_be_are_refused(steps: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="steps must be"):
        memtools.holder_of([bytearray(9)], steps=steps)


@pytest.mark.slow
def test_the_earlier_census_is_no_growth() -> None:
    memtools.census().diff(memtools.census())  # imports what it needs
    before = memtools.census()
    also = memtools.census()
    kept = [bytearray(9) for _ in range(3)]
    growth = memtools.census().diff(before)
    assert "Counter" not in str(growth)
    assert "_Counts" not in str(growth)
    assert (len(kept), also.types["list"] > 0) == (3, True)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What is counted changes by what the program makes alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
def test_what_a_look_is_made_of_has_no_holder(uncollected: None) -> None:
    """The tuples of a look are newer than what it saw: they neither grow, nor hold each other, nor
    hide what the program keeps."""
    shapes = [torch.empty(rows, 3) for rows in range(1, 80)]
    memtools.holder_of([shapes])  # imports what it needs
    earlier = memtools.census()
    kept = [(n, []) for n in range(40)]
    growth = memtools.census().diff(earlier)
    assert 40 <= {one.type: one.count for one in growth.types}["tuple"] < 60
    name = "list local 'kept' of test_what_a_look_is_made_of_has_no_holder()"
    assert growth.holders(TypeGrowth("tuple", 40))[0].path == name
    third = memtools.census()  # of somebody else
    assert not [one for one in growth.holders(TypeGrowth("tuple", 40)) if "Census" in one.path]
    assert (len(shapes), len(kept), len(third.groups) > 78) == (79, 40, True)


@pytest.mark.slow
@pytest.mark.parametrize("names", ["ABCD", "DCBA"])
def test_types_that_grew_alike_stand_in_the_order_of_their_names(names: str) -> None:
    before = memtools.census()
    kept = [type(name, (), {})() for name in names]
    growth = memtools.census().diff(before)
    short = [one.type.rpartition(".")[2] for one in growth.types]
    assert [name for name in short if name in names] == list("ABCD")
    assert len(kept) == 4

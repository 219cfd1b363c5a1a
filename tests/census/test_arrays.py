"""Which tensor or array has a block of memory."""

from __future__ import annotations

import gc
import mmap
import types
from collections.abc import Callable
from typing import Any

import pytest

from memtools import _core
from memtools._census.arrays import Owner, extents, owner_of, owners_of

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
MIB = 2**20


class Replay:
    """What programs fill row by row."""

    def __init__(self) -> None:
        self.states = np.zeros((16, MIB), np.uint8)
        self.parts = [np.zeros(MIB, np.uint8), 5]
        self.tensor = torch.zeros(MIB)
        self.region = mmap.mmap(-1, MIB)


class Numbers:
    """What has no object but arrays and numbers, so that the collector lists no dict of it."""

    def __init__(self) -> None:
        self.states, self.position = np.zeros(MIB, np.uint8), 0
        self.columns = {"reward": np.zeros(MIB, np.uint8)}
        vars(self)


REPLAY, NUMBERS = Replay(), Numbers()


def extent(obj: Any) -> tuple[int, int]:
    if isinstance(obj, torch.Tensor):
        return obj.data_ptr(), obj.data_ptr() + obj.nbytes
    array = np.frombuffer(obj, np.uint8) if isinstance(obj, mmap.mmap) else obj
    first = array.__array_interface__["data"][0]
    return first, first + array.nbytes


@pytest.mark.parametrize(
    ("get", "name"),
    [
        (lambda: REPLAY.states, "Replay.states"),
        (lambda: REPLAY.states[3:5], "Replay.states"),
        (lambda: REPLAY.parts[0], "Replay.parts[0]"),
        (lambda: REPLAY.tensor, "Replay.tensor"),
        (lambda: REPLAY.region, "Replay.region"),
        (lambda: NUMBERS.states, "Numbers.states"),
        (lambda: NUMBERS.columns["reward"], "Numbers.columns['reward']"),
    ],
)
def test_the_owner_of_a_block_has_its_name_in_the_program(
    get: Callable[[], Any], name: str
) -> None:
    begin, end = extent(get())
    gc.collect()
    assert owner_of(begin, end).name == name
    assert owner_of(begin + (end - begin) // 2, end).name == name, "it need not be all of it"


def test_a_local_variable_and_its_views_are_one_owner() -> None:
    rows = np.ones(MIB, np.uint8)
    views = rows[4096:], torch.from_numpy(rows)
    assert owner_of(*extent(rows)).name.startswith("local 'rows' of test_a_local_variable_")
    assert owner_of(0, 4096) == Owner()
    del views


def test_arrays_beside_each_other_are_both_named() -> None:
    begin, end = extent(REPLAY.states)
    other = np.ones(17 * MIB, np.uint8)
    first, last = extent(other)
    names = owner_of(min(begin, first), max(end, last)).name
    assert "Replay.states" in names
    assert " and local 'other' of" in names or "and Replay.states" in names


class Storage:
    """What torchrl's LazyTensorStorage is: its rows lie in a container that is another object's as
    well."""

    def __init__(self) -> None:
        self.max_size, self._storage = 16, {"pixels": torch.zeros(16, MIB, dtype=torch.uint8)}
        self.view = types.SimpleNamespace(rows=self._storage)


class Rows:
    """What a replay buffer of stable-baselines3 is."""

    def __init__(self, buffer_size: int) -> None:
        self.buffer_size = buffer_size
        self.observations = np.zeros((buffer_size, MIB), np.uint8)
        self.next_observations = np.zeros((buffer_size, MIB), np.uint8)


def test_the_buffer_of_an_array_says_how_many_rows_it_takes() -> None:
    rows, storage = Rows(8), Storage()
    found = owners_of([extent(rows.observations), extent(rows.next_observations)])
    assert [one.name for one in found] == ["Rows.observations", "Rows.next_observations"]
    assert [one.bound for one in found] == ["buffer_size 8", ""], "it is said once"
    assert "test_arrays.py" in found[0].kept_at
    (of_storage,) = owners_of([extent(storage._storage["pixels"])])
    assert of_storage.bound == "max_size 16"
    assert "Storage" in of_storage.name
    sizes = dict(extents(8 * MIB))
    assert sizes[extent(rows.observations)[0]] == 8 * MIB


def test_what_holds_an_object_of_a_type_is_asked_even_if_the_collector_does_not_list_it() -> None:
    class Own(bytearray):
        pass

    alone = {"a": bytearray(9)}
    gc.collect()  # and a dict of what refers to nothing is not listed
    kept, held = [Own(3), alone["a"]], _core._held((bytearray,))
    assert all(any(one is other for other in held) for one in kept)
    assert len({id(one) for one in held}) == len(held)
    with pytest.raises(TypeError, match="types must be a tuple, not list"):
        _core._held([bytearray])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="item 1 is int"):
        _core._held((bytearray, 1))  # type: ignore[arg-type]

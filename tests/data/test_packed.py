"""PackedList: records come back as they were, and no process copies them."""

from __future__ import annotations

import copy
import errno
import multiprocessing
import os
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from memtools import KVPool
from memtools.data import PackedList, packed
from tests.data import packedcases
from tests.kit import refusedcalls
from tests.kit.children import in_child

RECORDS: list[Any] = [
    "text", "ünï \ud800", "", b"bytes", b"", 0, -5, 2**63 - 1, -(2**63), 2**63, 2**70,
    2.5, float("inf"), True, None,
    (1, "a", [2.0]), {"path": "a/b.png", "label": 3}, [], 3 + 4j, {"x": np.arange(3)}, slice(1, 2),
]  # fmt: skip


def test_records_come_back_as_they_were():
    made = PackedList(RECORDS)
    assert len(made) == len(RECORDS)
    for record, got in zip(RECORDS, made, strict=True):
        assert type(got) is type(record)
        assert repr(got) == repr(record)
    assert made[3] == b"bytes"
    assert made[3] is not made[3]


@pytest.mark.parametrize("array", [
    np.arange(12, dtype=np.float32).reshape(3, 4), np.zeros((0, 3)), np.array(5, np.int8),
    np.arange(6).reshape(2, 3).T, np.arange(10)[::-2], np.array([True, False]), np.array([1 + 2j]),
    np.arange(3, dtype=">i4"), np.array(["a", "bc"]), np.array([1, "x", None], object),
    np.array([(1, 2.0)], [("a", int), ("b", float)]), np.array(["2020-01-01"], "M8[D]"),
])  # fmt: skip
def test_arrays_come_back_as_copies(array):
    made = PackedList([array])
    got = made[0]
    assert got.dtype == array.dtype
    assert got.shape == array.shape
    assert (got == array).all()
    got.flags.writeable or pytest.fail("cannot be written to")
    if got.size and got.dtype.kind in "biuf":
        got[...] = 1
        assert (made[0] == array).all()


def test_tensors_are_records_too():
    made = PackedList([torch.arange(5), {"a": torch.ones(2, dtype=torch.bfloat16)}])
    assert made[0].tolist() == [0, 1, 2, 3, 4]
    assert made[1]["a"].dtype is torch.bfloat16


def test_it_is_a_sequence():
    made = PackedList(str(n) for n in range(100))
    assert (made[0], made[-1], made[np.int64(5)]) == ("0", "99", "5")
    assert list(reversed(made))[:2] == ["99", "98"]
    assert "55" in made
    assert (made.index("7"), made.count("8")) == (7, 1)
    for index in (100, -101, 2**70):
        with pytest.raises(
            IndexError, match=f"index {index} is out of range: there are 100 records"
        ):
            made[index]
    with pytest.raises(TypeError):
        made["x"]  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        made[0] = 5  # type: ignore[index]
    assert (len(PackedList([])), list(PackedList([])), bool(PackedList([]))) == (0, [], False)
    assert repr(made[:1]) == "PackedList(1 record, 1.1 KiB)"


def test_slices_share_the_buffer():
    made = PackedList(range(100))
    part = made[10:50:5]
    assert list(part) == list(range(10, 50, 5))
    assert (part[-1], part[1:3][0], len(part[5:1])) == (45, 15, 0)
    assert list(made[::-1])[:3] == [99, 98, 97]
    assert part.nbytes == made.nbytes
    del made
    assert part[0] == 10


def test_the_bytes_are_those_of_the_records_and_nine_for_each():
    made = PackedList(b"x" * 1000 for _ in range(1000))
    assert 1_000_000 + 9_000 <= made.nbytes <= 1_000_000 + 9_000 + 16
    assert PackedList([1, 2, 3]).nbytes < 100


def test_a_copy_is_itself():
    made = PackedList([1])
    assert copy.copy(made) is copy.deepcopy(made) is made


@pytest.mark.parametrize(("records", "error", "said"), [
    (5, TypeError, "an iterable of records, got int"),
    ("abc", TypeError, "an iterable of records, got str"),
    ([1, lambda: None], TypeError, "record 1 is a function and cannot be pickled"),
    ([1, 2, (3, open)], None, ""),
    ([iter([])] * 0 + [(n for n in "a")], TypeError, "record 0 is a generator and cannot"),
])  # fmt: skip
def test_what_cannot_be_packed_is_refused(records, error, said):
    before = len(os.listdir("/proc/self/fd"))
    if error is None:
        PackedList(records)
    else:
        with pytest.raises(error, match=said):
            PackedList(records)
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_iterable_that_raises_leaves_nothing():
    def records() -> Iterator[int]:
        yield 1
        raise LookupError("no more")

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(LookupError, match="no more"):
        PackedList(records())
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("call", range(4))
def test_no_memory_is_one_sentence_and_leaves_nothing(monkeypatch, call):
    """Each write fails once."""
    calls, write = [0], os.write

    def fail(descriptor: int, data: Any) -> int:
        calls[0] += 1
        if calls[0] == call + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(packed.os, "write", fail)
    with pytest.raises(MemoryError, match=r"no memory for .* of packed records .No space left"):
        PackedList([bytes(packed._CHUNK), b"x"])
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_addresses_are_no_memory_and_leave_nothing(monkeypatch):
    """As under RLIMIT_AS."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(packed, "map_file", fail)
    with pytest.raises(MemoryError, match=r"for 1\.0 MiB of packed records .Cannot allocate"):
        PackedList([bytes(packed._CHUNK)])
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (errno.EPERM, "allow it in the seccomp profile of the container or sandbox"),
        (errno.ENOSYS, "allow it in the seccomp profile of the container or sandbox"),
        (errno.EMFILE, "close files, or raise the limit by ulimit -n"),
    ],
)
def test_memory_that_the_kernel_refuses_is_one_sentence(error, remedy):
    """A KVPool's and a PackedList's memory has no name, and takes a memfd."""
    makers = {
        "PackedList": lambda: PackedList([1]),
        "KVPool": lambda: KVPool(1, 1, 8, max_tokens=64, max_sequences=2, dtype="float32"),
    }

    def work():
        refusedcalls.refuse("memfd_create", error)
        for name, make in makers.items():
            with pytest.raises(MemoryError) as caught:
                make()
            doing = "may not call" if error != errno.EMFILE else "has no descriptor left for"
            assert str(caught.value) == (
                f"{name}(): this process {doing} memfd_create ({os.strerror(error)}); {remedy}"
            )

    assert in_child(work) == 0


def test_writes_that_are_cut_short_go_on(monkeypatch):
    write = os.write
    monkeypatch.setattr(packed.os, "write", lambda fd, data: write(fd, data[:1000]))
    made = PackedList(bytes([n % 256]) * 3000 for n in range(500))
    assert all(record == bytes([n % 256]) * 3000 for n, record in enumerate(made))


def test_descriptors_go_with_the_list():
    before = len(os.listdir("/proc/self/fd"))
    made = PackedList([1])
    part = made[:]
    del made
    assert part[0] == 1
    del part
    assert len(os.listdir("/proc/self/fd")) == before


def test_nobody_can_change_it():
    made = PackedList([b"abc"])
    with pytest.raises(PermissionError):
        os.write(made._buffer.descriptor.get(), b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(made._buffer.descriptor.get(), 0)


def test_a_forked_child_reads_it():
    made = PackedList(range(1000))
    assert in_child(lambda: (sum(made) == 499500) or 1 / 0) == 0


class Records(Dataset[Any]):
    def __init__(self, records: Any) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Any:
        return self.records[index]


@pytest.mark.slow
def test_workers_of_a_data_loader_read_it():
    made = PackedList({"n": n, "text": str(n)} for n in range(64))[::2]
    loader = DataLoader(Records(made), batch_size=8, num_workers=2)
    for _ in range(2):
        assert [n for batch in loader for n in batch["n"].tolist()] == list(range(0, 64, 2))


@pytest.mark.slow
@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_processes_that_are_not_forked_get_its_descriptor(start):
    context = multiprocessing.get_context(start)
    made = PackedList({"n": n, "text": str(n)} for n in range(64))[::2]
    results = context.SimpleQueue()
    for _ in range(2):  # as in each epoch
        process = context.Process(target=packedcases.add_up, args=(made, results))
        process.start()
        assert results.get() == (32, sum(range(0, 64, 2)), "62")
        process.join()
        assert process.exitcode == 0


@pytest.mark.slow
@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_slices_of_one_buffer_go_to_another_process_together(start):
    """Such as those for training and for validation, both attributes of one data set."""
    context = multiprocessing.get_context(start)
    made = PackedList(range(10))
    results = context.SimpleQueue()
    process = context.Process(
        target=packedcases.read_all, args=((made[:8], made[8:], made), results)
    )
    process.start()
    assert results.get() == [list(range(8)), [8, 9], list(range(10))]
    process.join()
    assert process.exitcode == 0


def test_slices_that_are_pickled_together_share_their_buffer():
    made = PackedList(range(10))
    before = len(os.listdir("/proc/self/fd"))
    left, right = pickle.loads(pickle.dumps((made[:8], made[8:])))
    assert (list(left), list(right)) == (list(range(8)), [8, 9])
    assert left._buffer is right._buffer
    del left, right
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # multiprocessing's own, to send them


def test_a_pickled_one_is_small_and_needs_its_process():
    made = PackedList(bytes(1000) for _ in range(1000))
    data = pickle.dumps(made)
    assert len(data) < 1000
    assert list(pickle.loads(data)) == list(made)


def test_unpickling_without_its_process_is_one_sentence():
    class Ended:
        """What stands for a descriptor whose process has ended."""

        def detach(self) -> int:
            raise FileNotFoundError("no socket")

    with pytest.raises(pickle.UnpicklingError, match="unpickled once, while the process that"):
        packed._received(Ended())


def own_bytes(pid: int | str = "self") -> int:
    """This process's part of memory that is neither of files nor shared on purpose: half of a page
    that it has in common with its parent, and all of one that it has copied."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        (line,) = (line for line in file if line.startswith("Pss_Anon:"))
    return 1024 * int(line.split()[1])


@pytest.mark.slow
def test_a_worker_that_reads_all_of_it_copies_no_page():
    """A list of the same records is copied: the test would see it."""
    records = [("path/of/a/record", n, float(n)) for n in range(100_000)]
    made = PackedList(records)

    def grown(sequence: Any) -> int:
        results = multiprocessing.get_context("fork").SimpleQueue()

        def work() -> None:
            for record in sequence[:100]:
                hash(record)
            before = own_bytes()
            for record in sequence:
                hash(record)
            results.put(own_bytes() - before)

        assert in_child(work) == 0
        return int(results.get())

    assert grown(made) < made.nbytes // 20
    assert grown(records) > 2 << 20

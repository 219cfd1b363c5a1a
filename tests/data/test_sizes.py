"""size_of(): bytes that stay because of a value, against what is known of each kind."""

from __future__ import annotations

import collections
import dataclasses
import sys
from typing import Any

import numpy as np
import pytest
import torch

from memtools.data import ByteCache, size_of
from memtools.data import _sizes as sizes
from memtools.data._sizes import ENTRY_BYTES, MOST_VISITED

KIB = 1024


def about(size: int, most: int = 1024) -> object:
    """A size that is at most so many bytes of headers above what is named."""

    class About:
        def __eq__(self, other: object) -> bool:
            return isinstance(other, int) and size <= other <= size + most

        def __repr__(self) -> str:
            return f"{size} to {size + most}"

    return About()


@pytest.mark.parametrize(
    "value", [b"x" * 5000, "x" * 5000, bytearray(5000), 3, 2.5, None, True, 10**40]
)
def test_plain_values_are_as_python_says(value):
    assert size_of(value) == sys.getsizeof(value)


def test_an_array_counts_with_what_it_is_a_view_of():
    array = np.zeros((64, KIB), np.uint8)
    assert size_of(array) == sys.getsizeof(array) == about(64 * KIB)
    assert size_of(array[3, :10]) == about(64 * KIB)
    assert size_of(np.frombuffer(b"x" * 9000, np.uint8)) == about(9000)
    assert size_of(np.broadcast_to(np.zeros(KIB, np.uint8), (1000, KIB))) == about(KIB)
    assert size_of([array, array[1], array[2:]]) == about(64 * KIB)
    assert size_of(np.float32(1)) == sys.getsizeof(np.float32(1))


def test_a_masked_array_counts_its_mask():
    data = np.zeros(9000, np.uint8)
    assert size_of(np.ma.masked_equal(data, 0)) == about(2 * 9000, 2048)
    assert size_of(np.ma.array(data)) == about(9000, 2048)


def test_an_array_counts_the_buffer_or_tensor_that_it_is_a_view_of():
    """A frame that tensor.numpy() or a parser cut out of a clip keeps the clip."""
    clip = torch.zeros(64, KIB, dtype=torch.uint8)
    frame = clip[3].numpy()
    assert size_of(frame) == about(64 * KIB)
    assert size_of([frame, clip[4].numpy(), clip]) == about(64 * KIB)
    for buffer in (bytes(9000), bytearray(9000), memoryview(bytes(9000))):
        assert size_of(np.frombuffer(buffer, np.uint8, count=10, offset=20)) == about(9000)


def test_an_array_of_objects_counts_them():
    array = np.empty(3, object)
    array[:] = [b"x" * 5000, b"y" * 5000, None]
    assert size_of(array) == about(10000)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_tensor_counts_its_storage_once():
    tensor = torch.zeros(64, KIB, dtype=torch.uint8)
    assert size_of(tensor) == about(64 * KIB)
    assert size_of(tensor[3, :2]) == about(64 * KIB)
    assert size_of(
        {"all": tensor, "part": tensor[1], "other": torch.zeros(KIB, dtype=torch.uint8)}
    ) == about(65 * KIB)
    assert size_of(torch.nn.Parameter(torch.zeros(KIB))) == about(4 * KIB)
    assert size_of(torch.eye(100).to_sparse()) == about(100 * (8 + 8 + 4))
    assert size_of(torch.eye(1000).to_sparse_csr()) == about(1001 * 8 + 1000 * (16 + 4), 2048)
    assert size_of(torch.zeros(KIB, device="meta")) == about(4 * KIB)
    assert size_of(torch.zeros(KIB, KIB).to_mkldnn()) == about(4 * KIB * KIB)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_each_tensor_that_is_made_of_others_counts():
    """What they are made of are tensors that live for a moment, and may have the same ids."""
    parts = [torch.zeros(KIB), torch.zeros(2 * KIB)]
    for layout in (torch.jagged, torch.strided):
        assert size_of(torch.nested.nested_tensor(parts, layout=layout)) == about(12 * KIB)
    one = size_of(torch.eye(100).to_sparse())
    assert size_of([torch.eye(100).to_sparse() for _ in range(50)]) >= 50 * one


def test_an_image_counts_its_pixels():
    from PIL import Image

    for mode, of_pixel in (
        ("RGB", 4),
        ("RGBA", 4),
        ("L", 1),
        ("P", 1),
        ("1", 1),
        ("I;16", 2),
        ("F", 4),
        ("LA", 4),
    ):
        assert size_of(Image.new(mode, (100, 50))) == about(5000 * of_pixel)


def test_containers_and_objects_count_what_they_hold():
    @dataclasses.dataclass
    class Record:
        image: bytes
        label: int

    @dataclasses.dataclass(slots=True)
    class Slotted:
        image: bytes
        other: object

    named = collections.namedtuple("named", "image label")
    block = b"x" * 5000
    nested = (1, [2, {"deep": [block]}])
    for value in (Record(block, 1), Slotted(block, None), named(block, 1), [block], {"a": block},
                  {block: 1}, nested, {block}, collections.deque([block]), memoryview(block),
                  collections.UserDict(a=block), [block, block]):  # fmt: skip
        assert size_of(value) == about(5000), value


def test_a_slot_that_is_not_set_counts_nothing():
    class Slotted:
        __slots__ = ("a", "b")

    value = Slotted()
    value.a = b"x" * 5000
    assert size_of(value) == about(5000)


def test_a_value_that_contains_itself_is_counted_once():
    value: list[object] = [b"x" * 5000]
    value.append(value)
    assert size_of(value) == about(5000)


def test_a_nest_of_any_depth_is_measured():
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    assert sys.getsizeof([value]) * MOST_VISITED * 0.9 < size_of(value) < 16 * KIB * KIB


def test_a_chain_counts_all_that_it_holds():
    value: Any = None
    for _ in range(700):
        value = {"before": value, "state": np.zeros(5000, np.uint8)}
    assert size_of(value) == about(700 * 5000, 700 * 400)
    for _ in range(5000):
        value = {"before": value, "state": np.zeros(5000, np.uint8)}
    assert size_of(value) == about(950 * 5000, 150 * 5000)


def test_the_rest_of_a_long_list_is_estimated():
    value = [bytes(100) for _ in range(100_000)]
    truth = sys.getsizeof(value) + 100_000 * sys.getsizeof(bytes(100))
    assert size_of(value) == pytest.approx(truth, rel=0.001)
    assert len(value) > MOST_VISITED


def test_a_long_list_hides_nothing_that_lies_beside_it():
    image = np.zeros(8 << 20, np.uint8)
    tokens = list(range(1000, 20_000))
    alone = size_of(tokens)
    for sample in (
        (tokens, image),
        {"tokens": tokens, "image": image},
        [tokens, [tokens[:], image]],
    ):
        assert size_of(sample) == about(len(image) + alone, 2 * alone)
    image = image[: 1 << 20].copy()
    samples = [{"tokens": list(tokens[:500]), "image": image.copy()} for _ in range(200)]
    assert size_of(samples) == pytest.approx(200 * (len(image) + size_of(tokens[:500])), rel=0.01)
    assert size_of(dict(enumerate(samples))) == pytest.approx(size_of(samples), rel=0.01)
    records = [{"image": bytes(5000), "label": n} for n in range(4000)]
    assert size_of(records) == pytest.approx(4000 * 5250, rel=0.02)


def test_a_measurement_has_an_end_whatever_the_value_is():
    def nest(depth: int, kind: Any) -> Any:
        return kind((n, nest(depth - 1, kind)) for n in range(20)) if depth else object()

    for kind in (list, tuple, dict):
        walk = sizes._Walk()
        walk.bytes_of(nest(4, kind), 0, MOST_VISITED)
        assert walk.visited < 2 * MOST_VISITED


def test_a_list_that_grows_meanwhile():
    class Growing:
        def __sizeof__(self) -> int:
            value.append(Growing() if len(value) < 100 else 5)
            return 1000

    value: list[object] = [Growing()]
    assert size_of(value) == about(1000)


def test_code_is_not_gone_through():
    assert size_of([sys, KIB.__class__, about, len]) < 2 * KIB


def test_attributes_are_read_without_a_call():
    class Sly:
        def __getattr__(self, name: str) -> object:
            raise LookupError(name)

        @property
        def __dict__(self) -> dict[str, object]:  # type: ignore[override]
            raise LookupError("__dict__")

    assert size_of(Sly()) < KIB


def test_an_entry_counts_its_key_and_itself():
    cache = ByteCache("1 MiB")
    cache["key"] = b"x" * 5000
    assert cache.nbytes == sys.getsizeof("key") + sys.getsizeof(b"x" * 5000) + ENTRY_BYTES

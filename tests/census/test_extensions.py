"""Which entries lead to objects of an extension, whose memory in C a walk does not see."""

from __future__ import annotations

import ctypes
import sqlite3
import sys
import threading
import types
import zlib
from typing import Any

import numpy as np
import pytest
import torch

from memtools._census.extensions import extension_of
from memtools._census.growth import GrowthCensus
from memtools._census.holders import Holder

CONNECTION = sqlite3.connect(":memory:")


class Client:
    def __init__(self, out: Any) -> None:
        self.out, self.lock = out, threading.Lock()


class Slots:
    __slots__ = ("out",)

    def __init__(self, out: Any) -> None:
        self.out = out


class Estimator:
    def __init__(self, out: Any) -> None:
        vars(self).update({f"option_{i}": i / 2 or None for i in range(40)}, out=out)


class ClientError(Client, Exception):
    pass


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (zlib.compressobj, "zlib.Compress"),
        (lambda: sqlite3.connect(":memory:"), "sqlite3.Connection"),
        (lambda: (ctypes.c_char * 8)(), "c_char_Array_8"),
        (lambda: Client(zlib.compressobj()), "zlib.Compress"),
        (lambda: Slots(ClientError(zlib.compressobj())), "zlib.Compress"),
        (lambda: {"a": [1.5, zlib.compressobj()]}, "zlib.Compress"),
        (lambda: Estimator(zlib.compressobj()), "zlib.Compress"),  # among many attributes
        (lambda: Estimator(Estimator(Estimator(zlib.compressobj()))), "zlib.Compress"),
        (lambda: [[[[[zlib.compressobj()]]]]], ""),  # too deep
        (lambda: Estimator(Estimator(Estimator(Estimator(zlib.compressobj())))), ""),
        (lambda: Client(CONNECTION), ""),  # one for all of them
        (lambda: Client(CONNECTION.execute("select 1")), "sqlite3.Cursor"),
        (lambda: ClientError(np.zeros(9)), ""),
        (lambda: Client([torch.zeros(9, requires_grad=True) * 2]), ""),
        (lambda: bytearray(99), ""),
        (lambda: types.SimpleNamespace(text="a" * 99, size=3, where=sys.modules), ""),
        (lambda: type("Made", (Client,), {}), ""),
    ],
)
def test_an_extension_is_known_by_its_objects(make: Any, name: str) -> None:
    found = extension_of([make() for _ in range(8)])
    assert found.rpartition(".")[2] == name.rpartition(".")[2]


def test_a_type_whose_name_has_no_module_is_an_extensions() -> None:
    image = pytest.importorskip("PIL.Image")
    assert extension_of([image.new("L", (9, 9)) for _ in range(8)]).endswith("ImagingCore")
    assert extension_of([iter([i]) for i in range(8)]) == ""  # of the interpreter


def test_nothing_is_said_of_one_entry_or_of_entries_that_differ() -> None:
    assert extension_of([zlib.compressobj()]) == extension_of([]) == ""
    assert extension_of([zlib.compressobj(), 1, 2, 3]) == ""


def test_a_census_names_who_keeps_handles_though_they_are_small() -> None:
    kept: dict[int, Client] = {}
    texts: list[str] = []
    census = GrowthCensus(least_rate=1024.0)
    for step in (8, 16, 24, 32):
        while len(kept) < step:
            kept[len(kept)] = Client(zlib.compressobj())
            texts.append(f"{len(texts):0100}")
        census.look(step)
    found: list[Holder] = [one for one in census.holders() if "kept" in one.path]
    assert [(one.extension, one.new_objects) for one in found] == [("zlib.Compress", 24)]
    assert found[0].rate_bytes < 1024.0
    assert not any("texts" in one.path for one in census.holders())

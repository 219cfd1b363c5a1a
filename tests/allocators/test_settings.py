"""What is read of the allocators: torch's text against torch itself, glibc's against its arenas."""

from __future__ import annotations

import os
import re
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memtools import allocator_settings
from memtools._allocators.conf import VARIABLES, chosen, parse
from memtools._allocators.settings import CudaDevice, Setting
from memtools._base import malloc
from memtools._base import torch as bridge
from memtools._base.malloc import Heap
from memtools.types import AllocatorSettings
from tests.allocators.allocatorcases import MIB, FakeTorch, program

# --- torch's text ---------------------------------------------------------------------------------


def test_every_kind_of_value() -> None:
    assert parse(
        " max_split_size_mb : 128 , expandable_segments:True,garbage_collection_threshold:0.8,"
        "roundup_power2_divisions:[256:1,512:2,>:8],backend:cudaMallocAsync,mine:[1,2],"
    ) == {
        "max_split_size_mb": 128,
        "expandable_segments": True,
        "garbage_collection_threshold": 0.8,
        "roundup_power2_divisions": "[256:1,512:2,>:8]",
        "backend": "cudaMallocAsync",
        "mine": "[1,2]",
    }
    assert parse("max_split_size_mb:30,max_split_size_mb:40") == {"max_split_size_mb": 40}
    for nothing in ("", "  ", ",", "max_split_size_mb", ":3", "max_split_size_mb:"):
        assert parse(nothing) == {}


@pytest.mark.parametrize(
    "text", ["max_split_size_mb:5x", "expandable_segments:1", "[:],]:[", "a:["]
)
def test_what_torch_refuses_sets_nothing_and_raises_nothing(text: str) -> None:
    ask = "c = allocator_settings().cuda; "
    ask += "print(c.backend.value, c.expandable_segments.value, c.max_split_size_mb.value)"
    assert program(ask, PYTORCH_ALLOC_CONF=text) == "None None None\n"


@pytest.mark.slow
@pytest.mark.parametrize("names", [0b001, 0b010, 0b100, 0b011, 0b110, 0b101, 0b111, 0b000])
def test_the_variable_that_torch_itself_reads(names: int) -> None:
    variables = {
        name: f"max_split_size_mb:{30 + i}" for i, name in enumerate(VARIABLES) if names >> i & 1
    }
    found = program(
        """
import torch
s = allocator_settings()
print(s.cuda.text.value or "", s.cuda.text.source, s.cuda.max_split_size_mb.value)
print(torch._C._accelerator_getAllocatorSettings())
""",
        **variables,
    ).splitlines()
    mine = chosen(variables) or ("", "")
    number = mine[1].partition(":")[2] or "None"
    assert found == [f"{mine[1]} {mine[0]} {number}", mine[1]]


@pytest.mark.slow
def test_an_empty_variable_hides_the_others() -> None:
    text = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    both = {VARIABLES[0]: "", VARIABLES[2]: "max_split_size_mb:30"}
    assert program(text, **both) == "\n"
    assert chosen(both) == (VARIABLES[0], "")


@pytest.mark.slow
def test_reading_imports_no_torch_and_leaves_torch_to_read_later() -> None:
    program("""
allocator_settings().advice()
assert "torch" not in sys.modules
import torch
allocator_settings().advice()
os.environ["PYTORCH_ALLOC_CONF"] = "max_split_size_mb:33"
assert torch._C._accelerator_getAllocatorSettings() == "max_split_size_mb:33"
""")


# --- malloc ---------------------------------------------------------------------------------------

MAPS = """\
55d0-55d9 r-xp 00000000 08:01 12 /usr/bin/python3.11
7f00-7f10 r-xp 00000000 08:01 12 /usr/lib/x86_64-linux-gnu/libc.so.6
7f20-7f30 r-xp 00000000 08:01 12 /opt/my libs/libjemalloc.so.2
7f30-7f40 rw-p 00000000 00:00 0
7f40-7f50 r-xp 00000000 08:01 12 /lib/ld-musl-x86_64.so.1
7fff-8000 r-xp 00000000 00:00 0 [vdso]
"""


@pytest.mark.parametrize(
    ("address", "version", "name", "path", "others"),
    [
        (0x7F05, "2.36", "glibc", "/usr/lib/x86_64-linux-gnu/libc.so.6", 1),
        (0x7F2F, "2.36", "jemalloc", "/opt/my libs/libjemalloc.so.2", 0),
        (0x7F40, None, "musl", "/lib/ld-musl-x86_64.so.1", 1),
        (0x55D0, "2.36", "python3.11", "/usr/bin/python3.11", 1),
        (0x7F30, "2.36", "glibc", None, 1),
        (0x9000, None, "unknown", None, 1),
    ],
)
def test_whose_malloc_it_is(
    address: int, version: str | None, name: str, path: str | None, others: int
) -> None:
    found = malloc.serving(MAPS, [address], version)
    assert (found.name, found.path, len(found.others)) == (name, path, others)
    assert found.version == (version if name == "glibc" else None)


@pytest.mark.parametrize(
    ("addresses", "name"),
    [
        ([0x55D0, 0x7F05, 0x7F06, 0x55D4], "glibc"),  # Debian's Python
        ([0x55D0, 0x55D1, 0x7F21, 0x55D4], "jemalloc"),
        ([0x7F21, 0x7F05, 0x7F06, 0x55D4], "jemalloc"),  # what malloc itself says goes first
        ([0x55D0, 0x55D1, 0x55D2, 0x55D3], "python3.11"),  # it has an allocator in it
    ],
)
def test_a_program_may_have_addresses_of_its_own_for_functions_of_a_library(
    addresses: list[int], name: str
) -> None:
    assert malloc.serving(MAPS, addresses, "2.36", "/usr/bin/python3.11").name == name


@pytest.mark.parametrize(
    ("file", "name"),
    [("libtcmalloc_minimal.so.4", "tcmalloc"), ("libmimalloc-secure.so.2.1", "mimalloc"),
     ("libc-2.31.so", "glibc"), ("libcrypt.so.1", None), ("libasan.so.8.0.0", "AddressSanitizer"),
     ("libc.musl-x86_64.so.1", "musl")],
)  # fmt: skip
def test_allocators_by_their_files(file: str, name: str | None) -> None:
    assert malloc.name_of(f"/usr/lib/{file}") == name


@pytest.mark.slow
def test_this_process_has_glibc_and_its_arenas_are_counted() -> None:
    found = program("""
assert arenas(5) == 6
host = allocator_settings().host
print(host.name, host.version == os.confstr("CS_GNU_LIBC_VERSION").split()[1], host.arenas)
blocks = take(900, 100_000)
before = allocator_settings().host.heap
give(blocks[:-1:2])
after = allocator_settings().host.heap
print(round((after.idle_bytes - before.idle_bytes) / 45e6, 1), before.arena_bytes > 90e6)
""")
    assert found == "glibc True 6\n1.0 True\n"


TAKEN = [
    ({}, {}, 13),
    ({"MALLOC_ARENA_MAX": "3"}, {"arena_max": (3, "MALLOC_ARENA_MAX")}, 3),
    ({"MALLOC_ARENA_MAX": " 0x3,"}, {"arena_max": (3, "MALLOC_ARENA_MAX")}, 3),
    ({"MALLOC_ARENA_MAX": "010"}, {"arena_max": (8, "MALLOC_ARENA_MAX")}, 8),
    ({"MALLOC_ARENA_MAX": "0"}, {}, 13),
    ({"MALLOC_ARENA_MAX": "many"}, {}, 13),
    ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=5:glibc.malloc.arena_max=2"},
     {"arena_max": (2, "GLIBC_TUNABLES")}, 2),
    ({"MALLOC_ARENA_MAX": "7", "GLIBC_TUNABLES": "glibc.malloc.arena_max=4"},
     {"arena_max": (4, "GLIBC_TUNABLES")}, 4),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("variables", "read", "arenas"), TAKEN)
def test_what_is_read_is_what_glibc_took(
    variables: dict[str, str], read: dict[str, Any], arenas: int
) -> None:
    assert malloc.from_environment(variables) == read
    told = program("""
assert not any("after the program began" in text for text in allocator_settings().advice())
values = allocator_settings().host.values
print({name: (s.value, s.source) for name, s in values.items()}, arenas(12))
""", **variables)  # fmt: skip
    assert told == f"{read} {arenas}\n"


def test_an_account_that_is_none() -> None:
    with pytest.raises(ValueError, match="reports no heap: '<x/>'"):
        malloc.read_heap("<x/>")


# --- advice ---------------------------------------------------------------------------------------


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> AllocatorSettings:
    """Settings of a glibc that nobody set, without a GPU."""
    for name in (*VARIABLES, "PYTORCH_NO_CUDA_MEMORY_CACHING"):
        monkeypatch.delenv(name, raising=False)
    now = allocator_settings()
    seen = replace(now.seen, rss=1000 * MIB, at_start={}, now={}, limit=None)
    heap = Heap(9, 300 * MIB, 10 * MIB, 8 * MIB, 0)
    blank: Setting[int] = Setting()
    host = replace(now.host, name="glibc", others=(), values={}, heap=heap, arena_max=blank,
                   trim_threshold=blank, mmap_threshold=blank, arena_limit=16)  # fmt: skip
    return replace(now, host=host, seen=seen)


def only(settings: AllocatorSettings) -> str:
    (advice,) = settings.advice()
    assert "\n" not in advice
    assert advice.endswith(".")
    assert f"  {advice}" in str(settings).splitlines()
    return advice


def test_nothing_to_set(quiet: AllocatorSettings) -> None:
    assert quiet.advice() == []
    assert str(quiet).endswith("advice\n  nothing to set")
    assert "arenas                        9 " in str(quiet)


def test_idle_memory_in_the_arenas(quiet: AllocatorSettings) -> None:
    host = replace(quiet.host, heap=Heap(9, 300 * MIB, 70 * MIB, 60 * MIB, 0))
    text = only(replace(quiet, host=host))
    assert "70.0 MiB idle of 1000.0 MiB resident" in text
    assert "MALLOC_MMAP_THRESHOLD_=1048576" in text
    assert "up to 32 MiB" in text
    set_already = replace(host, values={"mmap_threshold": Setting(MIB, "x")})
    assert "although the thresholds are set" in only(replace(quiet, host=set_already))
    far = replace(host, heap=Heap(9, 300 * MIB, 70 * MIB, 66 * MIB, 0))
    both = replace(quiet, host=far).advice()
    assert len(both) == 2
    assert "8 arenas other than the main one (at most 16" in both[1]
    large = replace(quiet, host=host, seen=replace(quiet.seen, rss=2000 * MIB))
    assert large.advice() == []  # 70 MiB are less than 5 %


def test_a_limit_against_which_freed_memory_counts(
    quiet: AllocatorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = replace(quiet, seen=replace(quiet.seen, limit=(900 * MIB, "RLIMIT_DATA")))
    text = only(limited)
    assert text.startswith("RLIMIT_DATA is 900.0 MiB, and what glibc keeps of freed memory counts")
    assert "MALLOC_MMAP_THRESHOLD_=1048576" in text
    is_set = replace(quiet.host, values={"mmap_threshold": Setting(MIB, "x")})
    assert replace(limited, host=is_set).advice() == []
    limits = {resource.RLIMIT_DATA: resource.RLIM_INFINITY, resource.RLIMIT_AS: 5 * MIB}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], -1))
    assert allocator_settings().seen.limit == (5 * MIB, "RLIMIT_AS")


VARIABLE_ADVICE = [
    ({"MALLOC_ARENA_MAX": "x"}, "=x: glibc ignores it; it must be a whole number of at least 1"),
    ({"MALLOC_ARENA_MAX": "3", "GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, "does not count"),
    ({"LD_PRELOAD": "/nowhere/libjemalloc.so.2"}, "is not mapped into this process"),
]  # fmt: skip


@pytest.mark.parametrize(("variables", "text"), VARIABLE_ADVICE)
def test_variables_that_do_nothing(
    quiet: AllocatorSettings, variables: dict[str, str], text: str
) -> None:
    seen = replace(quiet.seen, at_start=variables, now=variables)
    assert text in only(replace(quiet, seen=seen))


def test_other_things_about_malloc(quiet: AllocatorSettings) -> None:
    late = replace(quiet, seen=replace(quiet.seen, now={"MALLOC_ARENA_MAX": "2"}))
    assert "MALLOC_ARENA_MAX was changed after the program began" in only(late)
    half = replace(quiet.host, trim_threshold=Setting(MIB, "x"))
    assert "trim_threshold is set and mmap_threshold is not" in only(replace(quiet, host=half))
    idle = replace(quiet.host, others=("/lib/libjemalloc.so.2",))
    assert "is mapped, but malloc is glibc's" in only(replace(quiet, host=idle))
    other = replace(quiet.host, name="jemalloc", path="/lib/libjemalloc.so.2", heap=None)
    set_for_glibc = replace(quiet.seen, at_start={"MALLOC_ARENA_MAX": "2"})
    text = only(replace(quiet, host=other, seen=set_for_glibc))
    assert text == "MALLOC_ARENA_MAX: without effect, because malloc is jemalloc's."


TORCH_ADVICE = [
    ("backend:cudaMallocAsync,max_split_size_mb:64", "ignores max_split_size_mb: leave"),
    ("expandable_segments:True,max_split_size_mb:64", "leave one of them out"),
    ("garbage_collection_threshold:0.8", "set_per_process_memory_fraction() is called"),
    ("expandable_segments:True,per_process_memory_fraction:0.9,garbage_collection_threshold:0.8",
     "expandable segments never are"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "part"), TORCH_ADVICE)
def test_pairs_that_do_not_go_together(
    quiet: AllocatorSettings, monkeypatch: pytest.MonkeyPatch, text: str, part: str
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", text)
    assert part in only(replace(quiet, cuda=allocator_settings().cuda))


def test_two_variables_and_no_caching(quiet: AllocatorSettings) -> None:
    differ = {VARIABLES[0]: "", VARIABLES[2]: "expandable_segments:True"}
    two = replace(quiet, seen=replace(quiet.seen, now=differ))
    assert "torch reads PYTORCH_CUDA_ALLOC_CONF alone" in only(two)
    off = replace(quiet, seen=replace(quiet.seen, now={"PYTORCH_NO_CUDA_MEMORY_CACHING": "0"}))
    assert "is set (any value counts)" in only(off)


def test_holes_on_a_device(quiet: AllocatorSettings) -> None:
    def advised(**figures: int) -> list[str]:
        device = CudaDevice(
            0, 600 * MIB, 1000 * MIB, **{"inactive": 0, "retries": 0, **figures}, fraction=1.0
        )
        return replace(quiet, cuda=replace(quiet.cuda, devices=(device,), in_use=True)).advice()

    assert advised(inactive=249 * MIB) == []
    (holes,) = advised(inactive=250 * MIB)
    assert "250.0 MiB of 1000.0 MiB reserved in holes" in holes
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True before the program" in holes
    (retried,) = advised(retries=3)
    assert "cuda:0 had to free its cache 3 times" in retried


def test_a_torch_that_uses_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTorch(reserved=200 * MIB)
    fake.text, fake.inactive, fake.retries, fake.share = "max_split_size_mb:64", 5, 2, 0.5
    monkeypatch.setattr(bridge, "loaded", lambda: fake)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:99")
    now = allocator_settings()
    assert now.cuda.max_split_size_mb == Setting(64, "torch, at run time")
    assert now.cuda.devices == (CudaDevice(0, 100 * MIB, 200 * MIB, 5, 2, 0.5),)
    assert any("is not what torch uses" in text for text in now.advice())
    assert re.search(r"  cuda:0 +200.0 MiB +reserved, 100.0 MiB in tensors\n", str(now))


def test_the_environment_that_a_title_was_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"my title=1\0\0\0")
    assert malloc.environment_at_start() == dict(os.environ)

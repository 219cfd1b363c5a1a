"""Setting allocators: that each setting takes effect, what is refused, and that then nothing is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from memtools import allocator_settings
from memtools._base import malloc
from memtools._base import torch as bridge
from tests.allocators.allocatorcases import MIB, program

BAD = [
    ({}, ValueError, "pass at least one"),
    ({"arena_max": 0}, ValueError, "arena_max must be 1 to 2,147,483,647 arenas, got 0"),
    ({"arena_max": 2**31}, ValueError, "got 2,147,483,648"),
    ({"arena_max": "2"}, TypeError, "arena_max must be an int, got str"),
    ({"arena_max": True}, TypeError, "got bool"),
    ({"trim_threshold": -5}, ValueError, "trim_threshold must be at least 1 byte"),
    (
        {"trim_threshold": "3 GiB"},
        ValueError,
        "trim_threshold must be 1 to 2,147,483,647 bytes, got 3",
    ),
    ({"trim_threshold": 1.5}, TypeError, "trim_threshold must be an int"),
    ({"mmap_threshold": 4095}, ValueError, "4,096 to 33,554,432 bytes, got 4,095"),
    ({"mmap_threshold": "33 MiB"}, ValueError, "got 34,603,008"),
    ({"mmap_threshold": "a lot"}, ValueError, "number of bytes or like"),
]


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """No variables, and a mallopt that only notes; torch is not there."""
    calls: list[tuple[str, int]] = []

    def note(name: str, value: int) -> bool:
        calls.append((name, value))
        return True

    for name in list(os.environ):
        if name.startswith(("MALLOC_", "PYTORCH_", "GLIBC_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # so that it is put back after the test
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setattr(malloc, "mallopt", note)
    monkeypatch.setattr(malloc, "environment_at_start", dict)
    monkeypatch.setattr(bridge, "loaded", lambda: None)
    return calls


@pytest.mark.parametrize(("settings", "error", "text"), BAD)
def test_what_cannot_be_is_one_sentence(
    clean: list[Any], settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    before = dict(os.environ)
    good = {"arena_max": 3, "mmap_threshold": MIB}
    with pytest.raises(error, match=text) as raised:
        allocator_settings().set(**({**good, **settings} if settings else {}))
    assert "\n" not in str(raised.value)
    assert (clean, dict(os.environ)) == ([], before)


# --- malloc, in programs of their own -------------------------------------------------------------

FREED = """
def kept():
    "MiB that stay resident of 200 blocks of 1 MiB, behind each of which a small one lives on."
    give(take(1, 8 * MIB))  # from here on, glibc takes blocks up to so large from its heap
    before = rss()
    large, small = [], [0]
    for _ in range(200):
        large += take(1, MIB)
        while small[-1] < large[-1] < libc.sbrk(0):  # the interpreter may have left holes
            small += take(1, 2000)
    assert rss() - before > 190 * MIB
    give(large)
    return (rss() - before) // MIB
"""


@pytest.mark.slow
def test_blocks_above_the_mmap_threshold_are_given_back() -> None:
    assert program(FREED + "print(kept() > 190)") == "True\n"
    done, result = program(FREED + """
print(allocator_settings().set(mmap_threshold="512 KiB"))
print(kept() < 10, allocator_settings().host.mmap_threshold)
""").splitlines()  # fmt: skip
    assert done == (
        "['glibc: mmap_threshold 512.0 KiB (524,288 bytes) by mallopt, and no longer raises its "
        "thresholds automatically']"
    )
    assert result == "True Setting(value=524288, source='mallopt, by memtools')"


@pytest.mark.slow
@pytest.mark.parametrize("bytecode", ["kept", "made anew"])
def test_the_advice_follows_what_is_held(bytecode: str, tmp_path: Path) -> None:
    """Whatever holes the interpreter left in the heap: to compile modules leaves megabytes."""
    anew = {"PYTHONPYCACHEPREFIX": str(tmp_path)} if bytecode == "made anew" else {}
    told = program(FREED + """
assert allocator_settings().advice() == []
kept()
(advice,) = allocator_settings().advice()
print(advice)
""", **anew)  # fmt: skip
    assert "freeing large blocks has raised its thresholds" in told


def test_the_end_of_the_heap_is_given_back_at_the_trim_threshold() -> None:
    code = """
def kept(base):
    "MiB that stay resident of 30 MiB at the heap's end, once its thresholds have risen."
    give(take(1, 20 * MIB))
    give(take(480, 65536))
    return (rss() - base) // MIB

base = rss()
held = kept(base)
allocator_settings().set(trim_threshold="1 MiB")
print(held > 25, kept(base) < 10)
"""
    assert program(code) == "True True\n"


def test_blocks_below_the_mmap_threshold_are_not_mapped() -> None:
    told = program("""
def mapped(size):
    before = allocator_settings().host.heap.mapped_bytes
    take(1, size)
    return (allocator_settings().host.heap.mapped_bytes - before) // MIB

print(mapped(MIB), mapped(3 * MIB))
allocator_settings().set(mmap_threshold="2 MiB")
print(mapped(MIB), mapped(3 * MIB))
""")
    assert told == "1 3\n0 3\n"


def test_so_many_arenas_and_no_more() -> None:
    assert program("print(arenas(8))") == "9\n"
    told = program("print(allocator_settings().set(arena_max=2)); print(arenas(8))")
    assert told == "['glibc: at most 2 arenas, of which 1 exist']\n2\n"


def test_a_limit_of_arenas_that_cannot_be_kept_is_refused() -> None:
    program("""
assert arenas(4) == 5
refused("too late for arena_max=4: glibc already has 5 arenas", arena_max=4, mmap_threshold=MIB)
refused("put MALLOC_ARENA_MAX=4 before the program in the shell", arena_max=4)
assert allocator_settings().host.values == {}
allocator_settings().set(arena_max=6)
assert arenas(12) == 6
refused("keeps the first limit that it used, 6 by mallopt, by memtools", arena_max=7)
allocator_settings().set(arena_max=6)  # the same again
""")
    program("""
assert arenas(11) == 12
refused("with 12 arenas glibc has fixed its limit", arena_max=13)
""")
    program("""
assert arenas(3) == 1
refused("keeps the first limit that it used, 1 by MALLOC_ARENA_MAX", arena_max=3)
""", MALLOC_ARENA_MAX="1")  # fmt: skip


def test_a_limit_that_would_have_been_refused_is_not_kept_by_glibc() -> None:
    """The rules of too late are glibc's: where set() refuses, mallopt does nothing."""
    blind = "libc.mallopt(-8, {most})\nprint(arenas(16))"
    assert program("arenas(4)\n" + blind.format(most=4)) == "5\n"
    assert program("arenas(11)\n" + blind.format(most=13)) != "13\n"
    assert program("arenas(3)\n" + blind.format(most=3), MALLOC_ARENA_MAX="1") == "1\n"


def test_another_malloc_is_not_set(clean: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    other = malloc.Serving("jemalloc", None, "/lib/libjemalloc.so.2", ())
    monkeypatch.setattr(malloc, "find_serving", lambda: other)
    now = allocator_settings()
    assert (now.host.heap, now.host.arenas, now.host.dynamic) == (None, None, False)
    assert str(now).startswith("malloc: jemalloc (/lib/libjemalloc.so.2)\nCUDA")
    with pytest.raises(RuntimeError, match=r"malloc is jemalloc's \(/lib/libjemalloc.so.2\)"):
        now.set(arena_max=2)
    assert clean == []


def test_what_glibc_refuses_comes_first_and_alone(
    clean: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(malloc, "mallopt", lambda name, value: asked.append(name))
    with pytest.raises(RuntimeError, match="nothing: glibc refuses mmap_threshold=1,048,576"):
        allocator_settings().set(trim_threshold=MIB, mmap_threshold=MIB)
    assert asked == ["mmap_threshold"]

"""What `memtools doctor` says of the allocators."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from memtools._base import malloc
from memtools._cli import allocators
from tests.allocators.allocatorcases import OURS
from tests.kit.ownprocess import PROJECT


def doctor(*args: str, **variables: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    done = subprocess.run(
        [sys.executable, "-m", "memtools", "doctor", *args],
        capture_output=True, text=True, cwd=PROJECT, env=env | variables, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.slow
def test_what_is_set_and_by_which_variable() -> None:
    found: dict[str, Any] = json.loads(
        doctor(
            "--json",
            MALLOC_ARENA_MAX="3",
            GLIBC_TUNABLES="glibc.malloc.trim_threshold=4096",
            PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True,max_split_size_mb:64",
            PYTORCH_NO_CUDA_MEMORY_CACHING="0",
        )
    )
    section = found["allocators"]
    assert section["malloc"] == os.confstr("CS_GNU_LIBC_VERSION")
    assert 1 <= section["malloc_arenas"] <= 3
    assert section["malloc_settings"] == (
        "arena_max=3 (MALLOC_ARENA_MAX), trim_threshold=4096 (GLIBC_TUNABLES)"
    )
    assert section["cuda_settings"] == (
        "expandable_segments:True,max_split_size_mb:64 (PYTORCH_CUDA_ALLOC_CONF)"
    )
    assert section["cuda_caching"] is False
    assert section["advice"] == 3  # of mmap_threshold, the two that do not go together, no caching
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING is set" in found["notes"]["allocators.cuda_caching"]


@pytest.mark.slow
def test_nothing_is_set() -> None:
    lines = {line.strip().partition("  ")[0]: line for line in doctor().splitlines()}
    assert lines["advice"].endswith("  nothing to set")
    assert lines["cuda settings"].endswith("  none: torch's own")
    assert lines["malloc settings"].endswith("  none: glibc's own")
    assert ", at most " in lines["malloc arenas"]


def test_another_malloc_and_a_host_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    other = malloc.Serving("musl", None, "/lib/ld-musl-x86_64.so.1", ())
    monkeypatch.setattr(malloc, "find_serving", lambda: other)
    facts = allocators.allocator_facts()
    assert facts["malloc"].text == "musl (/lib/ld-musl-x86_64.so.1)"
    assert facts["malloc_arenas"].text == "unknown (musl does not say)"

    def fails() -> malloc.Serving:
        raise OSError("no such thing")

    monkeypatch.setattr(malloc, "find_serving", fails)
    facts = allocators.allocator_facts()
    assert {key: fact.text for key, fact in facts.items()} == {"malloc": "unknown (no such thing)"}

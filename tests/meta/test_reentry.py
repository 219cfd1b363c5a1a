"""Arguments that run code of the user's, into every callable: none may crash or hang."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest

from tests.kit.long import LONG
from tests.meta import reentry

TARGETS = reentry.targets()
MOST, SEED = (10**6, random.randrange(10**9)) if LONG else (12, 0)
SURROUNDED = 10**6 if LONG else 2
#: each call visits every object of the process, or draws
SLOW = (
    "Census",
    "Growth",
    "holder_of",
    "_core._census",
    "_core._referrers",
    "_core._fresh",
    "_core.GrowthTable._look",
    "MemoryMonitor.cleanup_memory",
)


def is_slow(label: str) -> bool:
    return not LONG and label.startswith(SLOW)


@pytest.fixture(scope="module", autouse=True)
def _files_of_good_values(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Good values that are files lie in a folder that goes."""
    with contextlib.chdir(tmp_path_factory.mktemp("reentry")):
        yield


@pytest.mark.slow
def test_every_callable_has_a_maker_and_every_parameter_a_value():
    missing = [
        label
        for label, target in TARGETS.items()
        if target.owner
        and target.owner not in reentry.MAKERS
        and target.name not in ("__new__", "__init__")
    ]
    for target in TARGETS.values():
        for parameter in target.parameters:
            try:
                reentry.good(target, parameter)
            except LookupError as error:
                missing.append(str(error))
    assert missing == []
    assert len(TARGETS) > 190


@pytest.mark.slow
@pytest.mark.parametrize("label", [label for label, target in TARGETS.items() if target.parameters])
def test_hostile_arguments_neither_crash_nor_hang(label):
    target = TARGETS[label]
    some = reentry.cases(target, SEED, 2 if is_slow(label) else MOST)
    assert some
    assert reentry.failures(target, some) == []


#: what the long search has found once: an object used after code of the program's had freed it
FOUND = (
    ("_core.Blocks.contents", "collections", "", "append"),
    ("_core._referrers", "standard functions", "gc.get_objects text", "append"),
    ("_core._traced", "standard functions", "_tracemalloc._get_traces stacks", "empty"),
)


@pytest.mark.slow
@pytest.mark.parametrize("found", FOUND, ids=lambda found: found[0])
def test_what_crashed_once_does_not_again(found):
    label, *case = found
    deep = 48 if "collections" in case else 3
    some = [(*case, skip) for skip in range(deep)]
    assert reentry.failures(TARGETS[label], some) == []


@pytest.mark.slow
@pytest.mark.parametrize("label", [x for x in TARGETS if LONG or x.startswith("_core.")])
def test_collections_and_replaced_functions_neither_crash_nor_hang(label):
    target, most = TARGETS[label], 1 if is_slow(label) else min(MOST, SURROUNDED)
    some = [
        *reentry.collections_of(target, SEED, most),
        *reentry.replaced_of(target, SEED, most),
    ]
    assert reentry.failures(target, some) == []


@pytest.mark.slow
@pytest.mark.parametrize("label", [label for label, target in TARGETS.items() if target.parameters])
def test_arguments_of_another_type_are_refused_in_words(label):
    most = 3 if is_slow(label) else len(reentry.MISFITS)
    assert reentry.misfit_failures(TARGETS[label], most) == []

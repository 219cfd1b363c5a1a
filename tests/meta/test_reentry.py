"""Arguments that run code of the user's, into every callable: none may crash or hang."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.meta import reentry

TARGETS = reentry.targets()
#: `make fuzz` runs other cases each time, and all of them
LONG = not settings.default.derandomize
MOST, SEED = (10**6, random.randrange(10**9)) if LONG else (16, 0)
#: each call visits every object of the process, or draws
SLOW = (
    "Census",
    "Growth",
    "holder_of",
    "_core._census",
    "_core._referrers",
    "_core._fresh",
    "_core.GrowthTable._look",
    "GateHistory.plot",
)


@pytest.fixture(scope="module", autouse=True)
def _few_objects_to_visit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Children collect garbage, and take a census: not of what pytest holds. Good values that are
    files lie in a folder that goes."""
    gc.collect()
    gc.freeze()
    with contextlib.chdir(tmp_path_factory.mktemp("reentry")):
        yield
    gc.unfreeze()


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
    some = reentry.cases(target, SEED, MOST if LONG or not label.startswith(SLOW) else 3)
    assert some
    assert reentry.failures(target, some) == []


@pytest.mark.slow
@pytest.mark.parametrize("label", [label for label, target in TARGETS.items() if target.parameters])
def test_arguments_of_another_type_are_refused_in_words(label):
    assert reentry.misfit_failures(TARGETS[label]) == []

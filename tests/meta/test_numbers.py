"""Numbers of any size, into every public callable: it works, or says in a sentence which argument
is wrong, and the object is as before."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import resource
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import memtools
from memtools import data
from tests.kit.long import LONG
from tests.meta import reentry
from tests.meta.reentry import Parameter, RefusalError, Target


class Index:
    """Gives a whole number to whoever asks."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


class Raises:
    """Raises when it is asked for its number."""

    def __index__(self) -> int:
        raise RefusalError("this is no number")

    __float__ = __index__  # type: ignore[assignment]


NUMBERS: dict[str, Callable[[], Any]] = {
    "2**31": lambda: 2**31,
    "2**63-1": lambda: 2**63 - 1,
    "2**63": lambda: 2**63,
    "2**64": lambda: 2**64,
    "-1": lambda: -1,
    "-2**63-1": lambda: -(2**63) - 1,
    "10**400": lambda: 10**400,
    "10**5000": lambda: 10**5000,  # which str() refuses
    "-10**400": lambda: -(10**400),
    "inf": lambda: math.inf,
    "-inf": lambda: -math.inf,
    "nan": lambda: math.nan,
    "1e308": lambda: 1e308,
    "5e-324": lambda: 5e-324,
    "True": lambda: True,
    "int8": lambda: np.int8(5),
    "uint64": lambda: np.uint64(2**64 - 1),
    "float32 nan": lambda: np.float32("nan"),
    "float64 1e308": lambda: np.float64(1e308),
    "index 2**64": lambda: Index(2**64),
    "index 10**5000": lambda: Index(-(10**5000)),
    "raises": Raises,
}


def drawn(draw: random.Random) -> Any:
    """Near a power of two, or a float of any bits."""
    if draw.random() < 0.3:
        return struct.unpack("d", draw.randbytes(8))[0]
    return draw.choice((-1, 1)) * ((1 << draw.randrange(80)) + draw.randrange(-2, 3))


if LONG:
    SEED = random.randrange(10**9)
    DRAW = random.Random(SEED)
    for number in (drawn(DRAW) for _ in range(40)):
        NUMBERS[f"{number} of seed {SEED}"] = lambda number=number: number
#: what `make test` tries of them
QUICK = ("2**63", "10**5000", "nan", "raises")
IS_NUMBER = re.compile(r"\b(int|float|SupportsIndex)\b")
#: what Python itself says of a number
PYTHONS = re.compile(
    r"Exceeds the limit|cannot fit|too large to|cannot be interpreted|between inst"
)
MOST_BYTES = 8 << 30  # of addresses that a child may take more than it has


#: programs get these objects from others, and do not make them
MADE_BY_MEMTOOLS = ("Handle.__init__", "report.Page.__new__")
#: words that say which argument it is, where its name is not among them
ALSO = {
    "_core.KVLease.layer.i": "layer",
    "_core.KVLease.update.counts": "count of",
    "_core.KVLease.reorder.index": "row",
    "_core.KVLease.select.rows": "row",
    "Budget.suballocate.limit": "suballocate('a') asks for",
    "GateHistory.__new__.max_entries": "these numbers make a size",
    "KVPool.__new__.num_kv_heads": "these numbers make a size",
    "KVPool.__new__.head_dim": "these numbers make a size",
    "LeakDetector.update.step": "heap must be",  # which has the same value here
    "KVPool.acquire.batch_size": "a lease of",
    "TrajectoryStore.epochs.lengths": "sample 0",
    "data.BudgetSampler.__init__.lengths": "sample 0",
    "data.H5Episodes.__init__.cache": "limit must be",
    "distributed.monitor_ranks.source": "takes an object with metrics()",
}
#: what torch documents of it
BY_TORCH = {"grad_norm.norm_type": RuntimeError, "clip_grad_norm_.norm_type": RuntimeError}


def is_public(target: Target) -> bool:
    """Whether a program calls it: also a method that a public class has from memtools._core."""
    if target.module != "_core":
        return target.label not in MADE_BY_MEMTOOLS
    owner = getattr(memtools, target.owner, None) or getattr(data, target.owner, None)
    return owner is not None and not target.name.startswith("_")


TARGETS = {label: one for label, one in reentry.targets().items() if is_public(one)}


class Place(NamedTuple):
    """A number in a good value, the keys that lead to it, and what puts another one there."""

    keys: tuple[str, ...]
    put: Callable[[Any], Any]


def places(value: Any) -> Iterator[Place]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield Place((), lambda number: number)
    elif type(value) in (list, tuple) and value:
        for place in places(value[0]):
            yield Place(place.keys, lambda n, put=place.put: type(value)([put(n), *value[1:]]))
    elif type(value) is dict:
        for key in value:
            for place in places(value[key]):
                yield Place(
                    (str(key), *place.keys),
                    lambda n, key=key, put=place.put: {**value, key: put(n)},
                )


def places_of(target: Target, parameter: Parameter) -> list[Place]:
    found = list(places(reentry.good(target, parameter)))
    if not found and IS_NUMBER.search(parameter.annotation.partition("Callable")[0]):
        found = [Place((), lambda number: number)]
    return found


def state(owner: Any) -> str:
    """What an object says of itself, without addresses and times."""
    if isinstance(owner, type) or type(owner).__module__ == "builtins":
        return ""
    found = [repr(owner)]
    for name in ("state_dict", "stats"):
        with contextlib.suppress(Exception):
            found.append(repr(getattr(owner, name)()))
    return re.sub(r"0x[0-9a-f]+", "", " ".join(found))


def fault_of(
    target: Target, parameter: Parameter, keys: tuple[str, ...], error: BaseException
) -> str:
    """What is wrong with a refusal; "" where nothing is."""
    text, label = str(error), f"{target.label}.{parameter.name}"
    if isinstance(error, (RefusalError, BY_TORCH.get(label, RefusalError))):
        return ""
    if not isinstance(error, (ValueError, TypeError, IndexError, MemoryError)):
        return "raises another exception"
    if not text.strip() or "\n" in text or len(text) > 500:
        return "is not one sentence"
    names = [parameter.name, *keys, ALSO.get(label, parameter.name)]
    if not any(name in text for name in names) or (
        PYTHONS.search(text) and target.name != "__getitem__"  # as those of lists say
    ):
        return "does not name the argument"
    return ""


def faults(target: Target, kinds: list[str], tell: int) -> Iterator[str]:
    for parameter in target.parameters:
        for place in places_of(target, parameter):
            for kind in kinds:
                case = f"{target.label}({parameter.name}={kind})"
                os.write(tell, (json.dumps([case]) + "\n").encode())
                signal.alarm(20)
                owner, values = reentry.owner_of(target), reentry.values_of(target)
                before = state(owner)
                values[parameter.name] = place.put(NUMBERS[kind]())
                try:
                    repr(reentry.call_target(target, owner, values))
                except Exception as error:
                    if what := fault_of(target, parameter, place.keys, error):
                        yield f"{case}: {what}: {type(error).__name__}: {str(error)[:300]}"
                    elif (after := state(owner)) != before:
                        yield f"{case}: changes the object: {before} and then {after}"
                with contextlib.suppress(Exception):
                    reentry.end_of(owner)


def failures(target: Target, kinds: list[str]) -> list[str]:
    """The faults, found in a forked child, which may take few addresses."""

    def look(tell: int) -> None:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MOST_BYTES,) * 2)
        for fault in faults(target, kinds, tell):
            os.write(tell, (json.dumps(fault) + "\n").encode())

    text, status = reentry.forked(look)
    said = [json.loads(line) for line in text.splitlines()]
    found = [one for one in said if isinstance(one, str)]
    if status != 0:
        found.append(f"{said[-1:]}: ends with status {status}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("label", [label for label, target in TARGETS.items() if target.parameters])
def test_a_number_of_any_size_works_or_is_refused_by_name(
    label: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kinds = list(NUMBERS) if LONG else list(QUICK)
    with contextlib.chdir(tmp_path_factory.mktemp("numbers")):
        assert failures(TARGETS[label], kinds) == []

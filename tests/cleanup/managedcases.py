"""Calls of memtools._core's Managed, good and bad, for test_leaks.py; and policies to test with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from memtools import _core, managed
from tests.cleanup.policyleaks import core_policy
from tests.kit.refusals import refused

Case = Callable[[], object]


def policy(act: Callable[[int, int], object] | None = None) -> _core.Policy:
    """One that acts at every update; by default it does nothing then."""
    made = core_policy(act or (lambda mask, clock: None), strict=True)
    made.set_rule(0, (1,), 0, False)
    return made


def fail(*args: object, **kwargs: object) -> None:
    raise LookupError("failed")


def stop(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


def survived(call: Case) -> None:
    with contextlib.suppress(LookupError, TypeError):  # of fail; of a holder, which is no function
        call()


POLICY = policy()
PASSING, FAILING = _core.Managed(dict, POLICY), _core.Managed(fail, POLICY)
CLEARING = _core.Managed(dict, POLICY, lambda args, kwargs: [args, kwargs])
NAMED = managed(POLICY)(survived)


def cycle() -> None:
    """A function that leads to its own wrapper, and the other way round."""

    def function() -> object:
        return wrapped

    wrapped = managed(policy())(function)


def chain(length: int) -> Callable[[], object]:
    made: Callable[[], object] = dict
    for _ in range(length):
        made = _core.Managed(made, POLICY)
    return made


def opened() -> None:
    gate = _core.Managed(dict, policy())
    number = gate._begin()
    refused(TypeError, lambda: gate._end("x"))  # type: ignore[arg-type]
    assert not gate._begin()
    assert gate._end(number)
    assert not gate._end(number)


def updated() -> None:
    PASSING._updated = True
    refused(TypeError, lambda: setattr(PASSING, "_updated", 1))
    refused(TypeError, lambda: delattr(PASSING, "_updated"))


def interrupted() -> None:
    with pytest.raises(KeyboardInterrupt):
        _core.Managed(fail, POLICY, stop)()


class Holder:
    passing, named = PASSING, NAMED


CASES: dict[str, list[Case]] = {
    "Managed": [
        lambda: _core.Managed(dict, None),
        lambda: chain(50),
        chain(50),
        lambda: refused(TypeError, lambda: _core.Managed(dict, 1)),  # type: ignore[arg-type]
        lambda: refused(TypeError, lambda: _core.Managed(1, None)),  # type: ignore[arg-type]
        lambda: refused(TypeError, lambda: _core.Managed(dict, None, 1)),  # type: ignore[arg-type]
        lambda: refused(TypeError, lambda: _core.Managed()),  # type: ignore[call-arg]
        cycle,
    ],
    "Managed.__new__": [lambda: _core.Managed(dict, POLICY, dict)],
    "Managed.__call__": [
        lambda: PASSING([(1, 2)], a=1),
        lambda: PASSING(a=1, b=[2]),
        lambda: CLEARING([(1, 2)], a=[1]),
        lambda: refused(LookupError, lambda: FAILING([1], a=[2])),
        lambda: refused(LookupError, lambda: FAILING(1)),
        lambda: refused(LookupError, _core.Managed(fail, POLICY, fail)),
        lambda: refused(LookupError, _core.Managed(dict, POLICY, fail)),
        lambda: refused(LookupError, _core.Managed(dict, policy(fail))),
        interrupted,
        lambda: NAMED(fail),
        lambda: _core.Managed.__call__(NAMED, fail),  # type: ignore[arg-type]
    ],
    "Managed.__get__": [
        lambda: NAMED.__get__(fail)(),
        lambda: NAMED.__get__(None, int),
        lambda: refused(AttributeError, lambda: PASSING.__get__([])),
        lambda: Holder().passing,
        lambda: Holder().named(),
        lambda: Holder.named,
    ],
    "Managed.__reduce__": [
        lambda: NAMED.__reduce__(),
        lambda: refused(AttributeError, PASSING.__reduce__),
    ],
    "Managed.__repr__": [lambda: repr(NAMED), lambda: repr(PASSING)],
    "Managed.__dict__": [
        lambda: vars(NAMED),
        lambda: setattr(_core.Managed(dict, None), "name", [1]),
    ],
    "Managed.__vectorcalloffset__": [lambda: _core.Managed.__vectorcalloffset__],  # type: ignore[attr-defined]
    "Managed._begin": [opened, lambda: _core.Managed(dict, None)._begin()],
    "Managed._end": [opened],
    "Managed._updated": [updated],
}

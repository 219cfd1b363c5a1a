"""assert_flat: a test that memory in use does not grow from step to step."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import closing

from memtools._base.devices import find_devices, seen_devices
from memtools._base.number import any_whole_number, shown, whole_number
from memtools._base.size import format_bytes, parse_bytes
from memtools.testing._growth import LEAST_STEPS, GrowthTest
from memtools.testing._trend import LEAST_READINGS

_A_STEP = re.compile(r"\s*/\s*step\s*$")


def assert_flat(
    step: Callable[[], object],
    steps: int = 200,
    growth: int | str = "1 KiB",
    *,
    warmup: int | None = None,
    device: object = None,
) -> None:
    """Call `step()` again and again, and fail if memory in use grows by more than `growth` a step.

        def test_training_is_flat():
            trainer = Trainer()
            memtools.testing.assert_flat(trainer.step)

    What counts is exact: bytes that malloc and Python have handed out, memory of child processes,
    shared memory, and tensors on devices; resident memory does not. Garbage that waits for the
    collector is no growth, nor is what is taken once, what is given back, or a cache that is full
    by the end. The message names who holds what grows, with its path, and what to do about it. Its
    own cost is at most 1 s beyond the steps, in a run that grows as much as looks at the heap take.
    docs/guides/testing.md says what it can tell apart.

    Args:
        step: what is called without arguments; what it returns is dropped. What it raises passes
            through.
        steps: how many calls, at least 20; 200 by default. A leak that comes every n-th step needs
            4 n of them.
        growth: bytes a step that are allowed, at least 1, as an int or like `"1 KiB"`, the default,
            or `"1 KiB/step"`.
        warmup: how many of the steps, the first ones, are not judged; at least 16 others have to
            be left. None, the default: one of eight, at least 4.
        device: "cpu", "cuda" or like "cuda:1". None, the default: the CUDA devices that are there,
            if the program has imported torch.

    Raises AssertionError if memory grows, TypeError or ValueError for arguments that are not as
    said here, DeviceError for a device that is not there, before the first call.
    """
    __tracebackhide__ = True  # pytest shows the caller's line and the message
    if not callable(step):
        raise TypeError(f"step is a function to call, got {type(step).__name__}")
    if inspect.iscoroutinefunction(step) or inspect.isgeneratorfunction(step):
        kind = "coroutine" if inspect.iscoroutinefunction(step) else "generator"
        raise TypeError(f"step is a {kind} function, whose call runs nothing; pass a function that "
                        "runs it to its end")  # fmt: skip
    check_steps(steps, warmup)
    allowed, told = parse_growth(growth)
    devices = seen_devices() if device is None else find_devices(device)
    test = GrowthTest(allowed, told, devices, steps=steps, warmup=warmup)
    with closing(test):
        call_again(step, steps, test.step)
        text = test.end()
    if text:
        raise AssertionError(text)


def call_again(step: Callable[[], object], steps: int, ended: Callable[[], object]) -> None:
    """Call `step()` so often, and after each call `ended()`."""
    __tracebackhide__ = True
    for _ in range(steps):
        step()
        ended()


# A census leaves out what functions of memtools hold. This one holds what the program gave it: it
# may be all that holds the objects of a test such as assert_flat(Trainer().step).
call_again.__code__ = call_again.__code__.replace(co_filename="<memtools.testing>")


def parse_growth(growth: object) -> tuple[int, str]:
    """The bytes a step that `growth` allows, and how that is told.

    Raises TypeError or ValueError with one sentence for what is not written like it.
    """
    __tracebackhide__ = True
    size = _A_STEP.sub("", growth) if isinstance(growth, str) else growth
    allowed = parse_bytes(size, "growth", "1 KiB/step")  # type: ignore[arg-type]  # says so itself
    return allowed, size.strip() if isinstance(size, str) else format_bytes(allowed)


def check_steps(steps: object, warmup: object = None) -> None:
    """Raises TypeError or ValueError where so many steps, with so many to warm up, say nothing."""
    __tracebackhide__ = True
    number = whole_number("steps", steps, LEAST_STEPS)
    least = 0 if warmup is None else any_whole_number("warmup", warmup)
    if not 0 <= least <= number - LEAST_READINGS:
        raise ValueError(
            f"warmup is from 0 to {number - LEAST_READINGS}, so that {LEAST_READINGS} of {number} "
            f"steps are left, got {shown(least)}"
        )

"""assert_flat: a test that memory in use does not grow from step to step."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

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

    The test reads exact figures: bytes that malloc and Python have handed out, memory of child
    processes, shared memory, and tensors on devices. Garbage that waits for the collector is not
    growth, nor is memory that is taken once, memory that is given back, or a cache that is full by
    the end. Of resident memory it reads what rises evenly without being in use: if a library has it
    from the system by itself, the test fails; if memory that was allocated before is written for
    the first time, such as a buffer that is filled row by row, it warns. The message names the
    holder of what grows, with its path, and says what to do about it. The test takes at most 1 s
    beyond the steps; where memory grows, looks at the heap come on top.

    Args:
        step: a function that is called without arguments. Its result is dropped, and its exceptions
            propagate unchanged.
        steps: the number of calls, at least 20; 200 by default. To find a leak that comes every
            n-th step takes 4 n calls.
        growth: the bytes a step that are allowed, at least 1, as an int or like `"1 KiB"`, the
            default, or `"1 KiB/step"`.
        warmup: the number of steps at the beginning that are not judged; at least 16 others must be
            left. None, the default: one of eight, at least 4.
        device: "cpu", "cuda" or like "cuda:1". None, the default: the CUDA devices of this machine,
            if the program has imported torch.

    Raises AssertionError if memory grows. Raises TypeError or ValueError for an invalid argument
    and DeviceError for a device that does not exist, before the first call.
    """
    __tracebackhide__ = True  # pytest shows the caller's line and the message
    if not callable(step):
        raise TypeError(f"step must be a function, got {type(step).__name__}")
    if inspect.iscoroutinefunction(step) or inspect.isgeneratorfunction(step):
        kind = "coroutine" if inspect.iscoroutinefunction(step) else "generator"
        raise TypeError(f"step is a {kind} function, whose call runs nothing; pass a function that "
                        "runs it to the end")  # fmt: skip
    check_steps(steps, warmup)
    allowed = parse_growth(growth)
    devices = seen_devices() if device is None else find_devices(device)
    test = GrowthTest(allowed.bytes, allowed.text, devices, steps=steps, warmup=warmup)
    with closing(test):
        call_again(step, steps, test.step)
        text = test.end()
    if text:
        raise AssertionError(text)


def call_again(step: Callable[[], object], steps: int, ended: Callable[[], object]) -> None:
    """Call `step()` `steps` times, and `ended()` after each call."""
    __tracebackhide__ = True
    for _ in range(steps):
        step()
        ended()


# A census leaves out what functions of memtools hold. This function holds an object of the program,
# and nothing else may hold it: in assert_flat(Trainer().step), for example.
call_again.__code__ = call_again.__code__.replace(co_filename="<memtools.testing>")


@dataclass(frozen=True)
class Allowed:
    """A number of bytes, and the text by which a message prints it."""

    bytes: int
    text: str


def parse_growth(growth: object) -> Allowed:
    """Read a number of bytes a step. Raises TypeError or ValueError if `growth` is not one."""
    __tracebackhide__ = True
    size = _A_STEP.sub("", growth) if isinstance(growth, str) else growth
    allowed = parse_bytes(size, "growth", "1 KiB/step")  # type: ignore[arg-type]  # checks the type
    return Allowed(allowed, size.strip() if isinstance(size, str) else format_bytes(allowed))


def check_steps(steps: object, warmup: object = None) -> None:
    """Raise TypeError or ValueError if the steps after the warm-up are too few to judge."""
    __tracebackhide__ = True
    number = whole_number("steps", steps, LEAST_STEPS)
    least = 0 if warmup is None else any_whole_number("warmup", warmup)
    if not 0 <= least <= number - LEAST_READINGS:
        raise ValueError(
            f"warmup must be from 0 to {number - LEAST_READINGS}, so that {LEAST_READINGS} of "
            f"{number} steps are left, got {shown(least)}"
        )

"""Find where one step of a training loop ends and the next one begins, by what acts in it.

    optimizer  A ── B ── A ── B ── A ── B        of a generator and a discriminator
    begins     1         2         3             A has acted in the step before: the next one begins

`who` is an optimizer or a model. An optimizer that dies is forgotten, so one that is created for
each step begins a step each time.
"""

from __future__ import annotations

import weakref
from types import FrameType

OPTIMIZERS = "torch.optim.optimizer"  # The module of register_optimizer_step_post_hook.
#: Frames between two steps of which one calls the other: the optimizer's own, and decorators.
FRAMES = 4


class Steps:
    """The optimizers and models that have acted in the current step."""

    def __init__(self) -> None:
        # By id; weak references, as an id is used again.
        self._acted: dict[int, weakref.ref[object]] = {}

    def begins(self, who: object) -> bool:
        """Note that `who` acts. Returns whether a step begins with it: this is the first action, or
        `who` has already acted in the step that ends by this."""
        acted, number = self._acted, id(who)
        if acted and number not in acted:
            is_first = False
        elif len(acted) == 1:  # the same one again: the usual case
            return True
        else:
            is_first = True
            acted.clear()
        acted[number] = weakref.ref(who, lambda _: acted.pop(number, None))
        return is_first

    def clear(self) -> None:
        """Let the next action begin a step."""
        self._acted.clear()

    def __len__(self) -> int:
        """How many have acted in this step."""
        return len(self._acted)


def is_of_another_step(hooked: FrameType) -> bool:
    """Whether an optimizer's step was called by another one's, as `super().step()` of a class whose
    base is in use too: it is not a step of its own.

    Args:
        hooked: of torch's function around a step, which calls the hooks.
    """
    frame = hooked.f_back
    for _ in range(FRAMES):
        if frame is None:
            return False
        if frame.f_code is hooked.f_code:
            return True
        frame = frame.f_back
    return False

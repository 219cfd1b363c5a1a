"""TracedSteps: traces two steps of a run, to find what makes their peak smaller.

    step 3             4                5
    recorded  │ begin ─────┤ look ────────── end │ ──► TracedPeak ──► the record
                 lives        who holds what
                              at the peak?

The first step shows what happens to storages that outlive it. Other steps cost nothing.
"""

from __future__ import annotations

import sys
import threading
import time

from memtools import _core
from memtools._base import torch as bridge
from memtools._base.libraries import PACKAGE
from memtools._base.limits import too_little
from memtools._base.peak import TracedPeak
from memtools._blocks.changes import changes_of
from memtools._blocks.invain import held_in_vain
from memtools._blocks.kept import kept
from memtools._blocks.lifetimes import Tracer

MOST_OPERATORS = 100_000  # A trace of two steps has at most so many,
LONGEST_S = 60.0  # and takes at most so long, or five times as long as the step before it.
#: Bytes that an operator takes while it is traced and replayed. All together may take this share of
#: the memory left: a later step may need the rest, and Python keeps a part of what it frees.
OF_AN_OPERATOR, SHARE = 1536, 0.125
LEAST_OPERATORS = 4096  # Where there is memory for fewer, nothing is traced.


class TracedSteps:
    """Two traced steps, from `begin` on. All methods are called on one thread, but for `close`.

    Args:
        blocks: the reports of torch's host allocator.
        room: the bytes that are left until the nearest limit at the highest point of a step. None,
            the default: there is no limit.
    """

    def __init__(self, blocks: _core.Blocks, room: int | None = None) -> None:
        self._tracer: Tracer | None = None
        self._blocks, self._room = blocks, room
        fitting = MOST_OPERATORS if room is None else int(SHARE * room) // OF_AN_OPERATOR
        self._most = min(MOST_OPERATORS, fitting)
        self._thread, self._steps = 0, 0

    def why_not(self) -> str:
        """Why steps cannot be traced, in words; "" if they can."""
        if self._room is not None and self._most < LEAST_OPERATORS:
            return too_little(self._room, int(LEAST_OPERATORS * OF_AN_OPERATOR / SHARE))
        torch = bridge.loaded()
        if torch is None or not hasattr(torch.optim.Optimizer, "profile_hook_step"):
            return "this torch is not known"
        if bridge.profiler_runs():
            return "a profiler of torch is on"
        if torch.utils._python_dispatch._get_current_dispatch_mode_stack():
            return "the program has a dispatch mode of torch on"
        utils = sys.modules.get("torch._dynamo.utils")
        if utils is not None and getattr(utils, "counters", {}).get("frames"):
            return "it uses torch.compile, whose code is one operator"
        return ""

    def begin(self, longest_s: float) -> None:
        """Begin. It is given up after `longest_s` seconds."""
        self._tracer = Tracer(
            (PACKAGE,), blocks=self._blocks, most=self._most,
            until=time.monotonic() + max(longest_s, LONGEST_S),
        )  # fmt: skip
        self._thread = threading.get_ident()
        self._tracer.begin()

    def step_ended(self) -> TracedPeak | None:
        """End a step. Returns None after the first one, and what was found after the second."""
        tracer = self._tracer
        if tracer is None:
            return TracedPeak()
        self._steps += 1
        if tracer.is_over:
            self.close()
            fit = "" if self._most == MOST_OPERATORS else " (more would not fit into memory)"
            return TracedPeak(
                why=f"two steps have more than {self._most:,} operators{fit} or take long"
            )
        if threading.get_ident() != self._thread:
            self.close()
            return TracedPeak(why="its steps end on several threads")
        if self._steps == 1:
            tracer.step_ended(look=True)
            return None
        self.close()
        trace = tracer.trace()
        del tracer  # what it has noted is in the trace
        found, deaths = held_in_vain(trace)
        return found._replace(
            changes=tuple(changes_of(trace, found, deaths)), kept=kept(trace, deaths)
        )

    def close(self) -> None:
        """End the trace. May be called twice."""
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.end()

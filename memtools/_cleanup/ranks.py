"""Cleanups at the same step on every rank: what one rank asks for, all of them do.

rank 0  asks for gc          --.  one all_reduce (OR) of 24 bytes of host memory
rank 1  asks for nothing     --+--> gc, on each of them, at this step
rank 2  records a CUDA graph --'    then no rank does anything: gc is due again later

A rank that stops for 100 ms lets all the others wait in their next collective, so that cleanups
at different steps cost the sum of them and cleanups at the same step cost one. And where cleanups
themselves meet (they synchronise devices, users' callbacks may use collectives), a rank that
decides alone is a rank that waits for ever.
"""

from __future__ import annotations

import weakref
from array import array
from typing import TYPE_CHECKING

from memtools._base import torch as bridge
from memtools._base.ranks import host_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CANNOT = 1 << 62  # A bit above every action's, below the sign.


class Agreement:
    """The agreement of a group's ranks, to be made on all of them at the same point.

    Called with the actions that this rank asks for, as bits: those that all ranks do now. About
    130 us between two processes of one machine, most of it gloo's.

    Communicates on the CPU: by the group itself where it can (gloo). Where it cannot (nccl) and it
    is the group of all ranks, a gloo group of them is made here, once: a collective, of some
    milliseconds.

    Args:
        group: None for all ranks.

    Raises:
        RuntimeError: there is no process group, or torch was built without torch.distributed.
        ValueError: this rank is not in the group; or it is a group of some ranks that has no
            CPU backend.
    """

    __slots__ = ("_dist", "_group", "_tensor", "_words", "_world")

    def __init__(self, group: ProcessGroup | None = None) -> None:
        dist = bridge.process_group()
        if dist is None:
            raise RuntimeError(
                "the ranks cannot agree: torch.distributed has no process group; call "
                "torch.distributed.init_process_group() first, or leave ranks=None"
            )
        world = dist.group.WORLD
        chosen = world if group is None else group
        if dist.get_rank(chosen) < 0:
            raise ValueError("this rank is not in the policy's group; give it another policy")
        host = host_group(dist, chosen, "memtools cleanup policy")
        if host is None:
            raise ValueError(
                "the group's ranks cannot agree on the CPU: its backend is "
                f"{dist.get_backend(chosen)}. Make a group for it on all ranks of the job, "
                'dist.new_group(ranks, backend="gloo"), and pass that'
            )
        torch = bridge.connect().torch
        self._dist = dist
        # Weak references, so that destroy_process_group() can end the threads of the groups.
        self._world, self._group = weakref.ref(world), weakref.ref(host)
        self._words = array("q", (0, 0, 0))
        self._tensor = torch.frombuffer(self._words, dtype=torch.int64)

    def __call__(self, mask: int, can: bool = True, step: int = 0) -> int:
        """What any rank asks for; 0 where a rank cannot act now.

        A collective: every rank calls it, at the same step, whether it asks for anything or not.
        Where a rank has died, the others wait for the group's timeout and get torch's error.

        Args:
            mask: bit i for action i.
            can: False if this rank must not act now, as in a CUDA graph capture: then no rank acts,
                and the actions stay due.
            step: the number of this step on this rank, which must be the same on all ranks.

        Raises:
            RuntimeError: the process group has been destroyed; or, on every rank alike, the
                ranks are at different steps.
        """
        group, world = self._group(), self._dist.group.WORLD
        if group is None or world is None or world is not self._world():
            raise RuntimeError(
                "the ranks cannot agree: their process group was destroyed; stop the policy "
                "before destroy_process_group(), and start it again after init_process_group()"
            )
        words = self._words
        words[0] = mask if can else mask | _CANNOT
        words[1] = step
        words[
            2
        ] = ~step  # If the steps differ, their OR and the OR of their complements share a bit.
        self._dist.all_reduce(self._tensor, op=self._dist.ReduceOp.BOR, group=group)
        if words[1] & words[2]:
            raise RuntimeError(
                f"the ranks are at different steps: this one is at {step:,}, another is not; give "
                "every rank the same CleanupPolicy, and start and step it at the same points"
            )
        return 0 if words[0] & _CANNOT else words[0]

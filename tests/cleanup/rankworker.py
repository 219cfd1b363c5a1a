"""One rank of a small job whose cleanups are agreed: runs a case and writes down what it got.

python -m tests.cleanup.rankworker CASE RANK WORLD RENDEZVOUS OUT
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from memtools import CleanupPolicy
from memtools._cleanup import actions, engine
from memtools._cleanup.actions import FIRST_CALLBACK
from memtools._cleanup.ranks import Agreement
from tests.kit.ranks import fork_ranks, meet


def says(call: Callable[[], Any]) -> str:
    """What the call raises, in words."""
    try:
        return str(call())
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def alone(rank: int) -> Any:
    """Agreement() itself: every rank's answers."""
    agreed = Agreement()
    asked = 1 << rank
    return {
        "or": agreed(asked, step=10),
        "none": agreed(0, step=20),
        "highest": agreed(asked << 13, step=30),
        "one cannot": agreed(asked, can=rank != 1, step=40),
        "again": agreed(asked, step=50),
        "other steps": says(lambda: agreed(asked, step=60 + rank)),
        "goes on": agreed(asked, step=70),
    }


def modes(rank: int) -> Any:
    """Made and asked where tensors are made otherwise than usual."""
    with torch.inference_mode(), torch.device("meta"):
        agreed = Agreement()
        inside = agreed(1 << rank)
    return [inside, agreed(2 << rank)]


def one_collective(rank: int) -> Any:
    """What an agreement sends: (bytes, device) of every collective."""
    agreed, calls = Agreement(), []
    reduce = dist.all_reduce

    def counted(tensor: Any, *arguments: Any, **options: Any) -> Any:
        calls.append([tensor.nbytes, tensor.device.type])
        return reduce(tensor, *arguments, **options)

    with mock.patch.object(dist, "all_reduce", counted):
        agreed(1)
    return calls


def no_cpu(rank: int) -> Any:
    """A default group that takes CUDA tensors only, as nccl does: one gloo group is made for it."""
    made = len(dist.distributed_c10d._world.pg_map)
    agreed = Agreement()
    answers = [agreed(1 << rank), agreed(0), len(dist.distributed_c10d._world.pg_map) - made]
    some = dist.new_group([0, 1], backend="cuda:gloo")
    return [*answers, says(lambda: Agreement(some))]


def subset(rank: int) -> Any:
    """Of three ranks the last two agree; the first is told that it is none of them."""
    group = dist.new_group([1, 2])
    return says(lambda: Agreement(group)(1 << rank, step=5))


def destroyed(rank: int) -> Any:
    agreed = Agreement()
    answers = [agreed(1 << rank)]
    meet()
    dist.destroy_process_group()
    return [*answers, says(lambda: agreed(1)), says(Agreement)]


def dead(rank: int) -> Any:
    """Rank 1 ends without a word; rank 0 gets torch's error."""
    agreed = Agreement()
    agreed(0)
    meet()
    if rank == 1:
        os._exit(0)
    return says(lambda: agreed(1))


# --- of a CleanupPolicy: at which updates its callback was called, by the rank's own count ---


def updates(policy: CleanupPolicy, many: int, *, add: bool = True, **how: Any) -> list[int]:
    """Runs that many, and says at which the policy acted."""
    seen: list[int] = []
    if add:
        policy.add("noted", lambda call: seen.append(policy._core.ticks(0)), **how)
    for _ in range(many):
        policy.step()
    return seen


def quiet(**settings: Any) -> CleanupPolicy:
    return CleanupPolicy(None, at_epoch=False, ranks=True, **settings)


def pressure(rank: int) -> Any:
    """Rank 1 may use 1 MiB, rank 0 what there is."""
    policy = quiet(limit="1 MiB") if rank else quiet()
    seen = updates(policy, 200, pressure=True)
    return [seen, bool(policy._core.look())]


def costs(rank: int) -> Any:
    """What frees nothing is dear on rank 1, so that its budget allows it seldom. It costs what is
    said here: by a real clock, a rank that waits for the processor would find it dear as well."""
    policy, seen, ns = quiet(), list[int](), 0

    def perf_counter_ns() -> int:
        nonlocal ns
        ns += 100  # so much a look at the clock takes
        return ns

    def work() -> None:
        nonlocal ns
        seen.append(policy._core.ticks(0))
        ns += 4_000_000 * rank

    policy.add("work", work, 10)
    told = SimpleNamespace(perf_counter_ns=perf_counter_ns, monotonic_ns=time.monotonic_ns)
    with (
        mock.patch.object(engine, "time", told),
        mock.patch.object(actions, "time", told),
    ):
        updates(policy, 2_000, add=False)
    _, skipped, backoff = policy._core.figures(FIRST_CALLBACK)
    return [seen, skipped, backoff]


def capture(rank: int) -> Any:
    """Rank 1 records a CUDA graph in the updates 15 to 44."""
    policy = quiet(strict=True)

    def capturing() -> bool:
        return rank == 1 and 15 <= policy._core.ticks(0) < 45

    with mock.patch.object(engine, "capturing", capturing):
        return updates(policy, 80, every=20)


def unlike(rank: int) -> Any:
    """Policies that agree at other steps are told, both."""
    policy = CleanupPolicy(5 if rank else 10, ranks=True)
    return says(lambda: updates(policy, 20))


def alone_warns(rank: int) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for policy in (CleanupPolicy(), CleanupPolicy(ranks=False)):
            with policy:
                updates(policy, 10)
    return [str(warning.message) for warning in caught]


def healthy(rank: int) -> Any:
    """One after the other: a process that imports torch takes seconds. The last ends the group."""
    cases = [alone, modes, one_collective, pressure, costs, capture, unlike, alone_warns, subset]
    return {case.__name__: case(rank) for case in [*cases, destroyed]}


CASES: dict[str, Callable[[int], Any]] = {case.__name__: case for case in (healthy, no_cpu, dead)}


if __name__ == "__main__":
    fork_ranks(CASES, backends={"no_cpu": "cuda:gloo"})

"""What an append and its statistics take, in turns with what people write."""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gate.common import (
    MEMCPY,
    MEMCPY_PAGE,
    OURS,
    OURS_BARE,
    SLOTS,
    SMALL,
    gates_like,
    memcpy_ring,
    shimless,
    with_threads,
)
from benchmarks.kit.harness import Json, Runner, Samples, interleave, statement
from memtools import GateHistory

# --- (a) recording alone -------------------------------------------------------------------------


def recorders(gates: Tensor, slots: int) -> dict[str, Runner]:
    """Every way of keeping the newest gates, or in the case of a list all of them."""
    g = gates
    ours, bare = (GateHistory(statistics=False).append for _ in range(2))
    kept = "kept.append(g.detach().%s())"
    return {
        MEMCPY: memcpy_ring(g, slots),
        MEMCPY_PAGE: memcpy_ring(g, slots, 0),
        OURS: statement("append(g)", append=ours, g=g),
        OURS_BARE: shimless(statement("append(g)", append=bare, g=g)),
        "list, alias": statement(kept % "cpu", "kept = []", g=g),
        "list, clone": statement(kept % "clone", "kept = []", g=g),
        "deque, alias": statement(kept % "cpu", kept=deque[Tensor](maxlen=slots), g=g),
        "deque, clone": statement(kept % "clone", kept=deque[Tensor](maxlen=slots), g=g),
    }


def record(shape: tuple[int, int], cached: bool, seconds: float) -> Json:
    """Short turns that go on where they stopped: a slot comes round after all rings have passed
    through the caches, as it does in training, where a thousand updates lie between.

    With `cached`, whole laps, and before each an untimed one that brings the ring into the last
    cache, where it fits: a loop that does nothing else.
    """
    slots = SLOTS[shape]
    calls, warm = (slots, slots) if cached else (200, 20) if shape == SMALL else (8, 1)
    runners = recorders(gates_like(shape), slots)
    if cached:
        runners = {name: runners[name] for name in (MEMCPY, MEMCPY_PAGE, OURS, OURS_BARE)}
    samples = interleave(runners, calls, seconds=seconds, warm=warm, first=2 * slots)
    return {"turns": samples.turns}


# --- (b) statistics ------------------------------------------------------------------------------


class Compared(NamedTuple):
    """One kind of gates: appended with and without statistics, and what torch takes for them."""

    gates: Tensor
    top_k: int = 1


def torch_statistics(compared: Compared) -> Runner:
    g, experts = compared.gates, compared.gates.shape[-1]
    names: Json = {"g": g, "experts": experts, "k": compared.top_k}
    if compared.top_k == 1:
        code = "g.sum(0); bincount(g.argmax(-1), minlength=experts)"
    else:
        code = "g.sum(0); one_hot(g.topk(k).indices, experts).sum((0, 1))"
    return statement(code, bincount=torch.bincount, one_hot=functional.one_hot, **names)


def compared_kinds(shape: tuple[int, int]) -> dict[str, Compared]:
    g = gates_like(shape, grad=False)
    equal = torch.full(shape, 1.0 / shape[1])  # what a router of zeros makes
    return {
        "default": Compared(g),
        "top_k=2": Compared(g, top_k=2),
        "bfloat16": Compared(g.bfloat16()),
        "all gates equal": Compared(equal),
    }


def added(shape: tuple[int, int], seconds: float) -> Json:
    """Each kind of gates by itself, in short turns: both sides of a difference see the same."""
    turns: dict[str, dict[str, list[float]]] = {}
    small = shape == SMALL
    for kind, compared in compared_kinds(shape).items():
        k, g = compared.top_k, compared.gates
        histories = {
            "record": GateHistory(top_k=k, statistics=False),
            "statistics": GateHistory(top_k=k),
        }
        runners = {}
        for name, history in histories.items():
            history.extend([g] * 2 * SLOTS[shape])  # every page of the arena is touched
            runners[name] = statement("append(g)", append=history.append, g=g)
        runners["torch"] = torch_statistics(compared)
        calls = {name: (20 if name == "torch" else 200) if small else 2 for name in runners}
        warm = 20 if small else 1
        turns[kind] = interleave(runners, calls, seconds=seconds / 5, warm=warm).turns
    for kind, compared in compared_kinds(shape).items():
        two = {"torch, 2 threads": with_threads(torch_statistics(compared), 2)}
        turns[kind] |= interleave(two, 20 if small else 4, seconds=seconds / 20).turns
    return {"turns": turns}


def added_summary(kind: str, samples: Samples) -> Json:
    """What statistics add to an append, turn by turn, and what torch takes for them."""
    plain, full, torch1, torch2 = samples.turns  # the last with turns of its own
    differences = samples.differences(full, plain)
    least, median = samples.least(full) - samples.least(plain), statistics.median(differences)
    return {
        "name": kind,
        "turns": len(differences),
        "record_min_ns": samples.least(plain),
        "record_median_ns": samples.median(plain),
        "append_min_ns": samples.least(full),
        "append_median_ns": samples.median(full),
        "added_min_ns": least,
        "added_median_ns": median,
        "torch_min_ns": samples.least(torch1),
        "torch_median_ns": samples.median(torch1),
        "torch_2_threads_min_ns": samples.least(torch2),
        "torch_2_threads_median_ns": samples.median(torch2),
        "times_faster_min": samples.least(torch1) / least,
        "times_faster_median": samples.median(torch1) / median,
        "whole_append_times_faster_min": samples.least(torch1) / samples.least(full),
        "whole_append_times_faster_median": samples.median(torch1) / samples.median(full),
    }

"""What an append and its statistics take, in turns with what people write."""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gate.common import MEMCPY, OURS, SLOTS, SMALL, gates_like, memcpy_ring
from benchmarks.kit.harness import Json, Runner, Samples, interleave, statement
from memtools import GateHistory


def record(seconds: float) -> Json:
    """Every way of keeping the newest gates, or in the case of a list all of them.

    Short turns continue where they stopped: all rings have passed through the caches before a slot
    is written again, as in training, where a thousand updates lie between.
    """
    g, slots = gates_like(SMALL), SLOTS[SMALL]
    kept = "kept.append(g.detach().%s())"
    runners = {
        MEMCPY: memcpy_ring(g, slots),
        OURS: statement("append(g)", append=GateHistory(statistics=False).append, g=g),
        "list, clone": statement(kept % "clone", "kept = []", g=g),
        "deque, alias": statement(kept % "cpu", kept=deque[Tensor](maxlen=slots), g=g),
        "deque, clone": statement(kept % "clone", kept=deque[Tensor](maxlen=slots), g=g),
    }
    return {"turns": interleave(runners, 200, seconds=seconds, warm=20, first=2 * slots).turns}


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
    if shape == SMALL:
        return {"default": Compared(g)}
    return {
        "default": Compared(g),
        "top_k=2": Compared(g, top_k=2),
        "bfloat16": Compared(g.bfloat16()),
        "all gates equal": Compared(torch.full(shape, 1.0 / shape[1])),  # as a router of zeros
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
        turns[kind] = interleave(runners, calls, seconds=seconds / 4, warm=warm).turns
    return {"turns": turns}


def added_summary(kind: str, samples: Samples) -> Json:
    """What statistics add to an append, turn by turn, and what torch takes for them."""
    plain, full, torch1 = samples.turns
    differences = samples.differences(full, plain)
    least, median = samples.least(full) - samples.least(plain), statistics.median(differences)
    return {
        "name": kind,
        "turns": len(differences),
        "added_min_ns": least,
        "added_median_ns": median,
        "torch_min_ns": samples.least(torch1),
        "torch_median_ns": samples.median(torch1),
        "times_faster_min": samples.least(torch1) / least,
        "times_faster_median": samples.median(torch1) / median,
    }

"""The loss of a language model in chunks of rows: changes of a trace.

    hidden ──► logits ──► log_softmax ──► loss ──► ... ──► gradients of both, and of the head
                 [rows, classes] each               with k chunks: [rows / k, classes] each

Logits and what a loss makes of them are known by their shape, which is that of the result of a
log_softmax over many classes.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import NamedTuple

from memtools._base.peak import BACKWARD, FORWARD, OPTIMIZER, PARAMETERS
from memtools._blocks.lifetimes import MARKED, Life, Trace
from memtools._blocks.replay import Change

CLASSES = 256  # Logits of fewer classes are small beside what leads to them.


def logits_of(trace: Trace) -> set[int]:
    """The ids of the storages that are as large as logits. Shifted by a row they are smaller."""
    lives = {life.id: life for life in trace.lives}
    sizes = {
        (life.shape[-1], math.prod(life.shape))
        for op in trace.ops
        if "log_softmax" in op.name and op.phase != BACKWARD and op.reads
        if (life := lives.get(op.reads[-1])) is not None
        if life.shape and life.shape[-1] >= CLASSES
    }
    return {
        life.id
        for life in trace.lives
        if life.category not in MARKED and life.phase != OPTIMIZER and life.birth >= 0
        if any(
            classes == life.shape[-1] and 0.75 * size < math.prod(life.shape) < 1.5 * size
            for classes, size in sizes
            if life.shape
        )
    }


class Head(NamedTuple):
    """The module that makes logits, and the one that makes the hidden states for it, as expressions
    such as "model.lm_head" and "model.transformer". "" is what is not known."""

    head: str = ""
    body: str = ""


def head_of(trace: Trace) -> Head:
    """Who makes the logits of the last step. A body is a module that has a list of blocks,
    beside the head in the same model."""
    logits, lives = logits_of(trace), {life.id: life for life in trace.lives}
    for number in sorted(logits, reverse=True):
        op = trace.ops[lives[number].birth]
        given = [lives[one] for one in op.reads if one in lives and one not in logits]
        if op.phase != FORWARD or not any(one.category == PARAMETERS for one in given):
            continue
        if not _is_path(op.module):
            break
        above = op.module.rpartition(".")[0]
        inside = f"{above}." if above else ""
        hidden = _made_in(trace, lives, given, above)
        body = inside + hidden.removeprefix(inside).partition(".")[0]
        blocks = re.compile(rf"{re.escape(body)}\.(?![0-9]).*?\b[0-9]+\b")
        has_blocks = any(blocks.match(one.module) for one in trace.ops)
        is_beside = hidden.startswith(inside) and _is_path(body) and has_blocks
        return Head(_expression(op.module), _expression(body) if is_beside else "")
    return Head()


def _made_in(trace: Trace, lives: dict[int, Life], given: list[Life], outer: str) -> str:
    """The path of the module that has made the largest of these that is not a parameter. What
    the outer one has made of it, such as a part or a product, is traced back."""
    for _ in range(8):
        given = [one for one in given if one.category != PARAMETERS and one.birth >= 0]
        if not given:
            break
        position = max(given, key=lambda one: one.bytes).birth
        op = trace.ops[position]
        if _is_path(op.module) and op.module != outer:
            return op.module
        given = [lives[one] for one in op.reads if one in lives and lives[one].birth < position]
    return ""


def _is_path(module: str) -> bool:
    """Whether this is a path from a model; the model itself has the name of its class."""
    return bool(module) and not module[0].isupper()


def _expression(path: str) -> str:
    """ "model.layers[0].head" of "layers.0.head"."""
    return "model" + "".join(f"[{one}]" if one.isdigit() else f".{one}" for one in path.split("."))


def in_chunks(parts: int) -> Change:
    """So many chunks, each of which is computed again for its backward pass. The gradients of the
    hidden states and of the head then exist from the first chunk on, and each chunk makes one that
    is added to that of the head: to a new sum, as it is a view."""

    def change(trace: Trace) -> Trace:
        logits, lives = logits_of(trace), {life.id: life for life in trace.lives}
        heads, hidden = _made_in_backward(trace, logits)
        ops, found = list(trace.ops), list[Life]()
        for life in trace.lives:
            if life.id in logits:
                size = math.ceil(life.bytes / parts)
                life = life._replace(bytes=size, death=life.last_use + 1)
            elif life.id in heads:
                of_chunk = logits & set(ops[life.birth].reads)
                added = min(1 + max(lives[one].last_use for one in of_chunk), len(ops) - 1)
                ops[added] = ops[added]._replace(scratch=2 * life.bytes)
                life = life._replace(birth=heads[life.id])
            elif life.id in hidden:
                life = life._replace(birth=hidden[life.id])
            found.append(life)
        return replace(trace, lives=tuple(found), ops=tuple(ops))

    return change


def by_linear_cross_entropy(trace: Trace) -> Trace:
    """torch's function of this name: it makes the gradient of the head and of its input in the
    forward pass, with fewer logits than hidden states. Its backward pass begins with zeros of the
    same sizes. What is added to the gradient of the head is so in place."""
    logits, lives = logits_of(trace), {life.id: life for life in trace.lives}
    heads, hidden = _made_in_backward(trace, logits)
    ops, found = list(trace.ops), list[Life]()
    losses = [
        position
        for position, op in enumerate(ops)
        if op.phase == FORWARD and "log_softmax" in op.name and not logits.isdisjoint(op.reads)
    ]
    made = heads | hidden
    for begin in set(made.values()):
        zeros = sum(lives[one].bytes for one, at in made.items() if at == begin)
        ops[begin] = ops[begin]._replace(scratch=zeros)
    sums = {
        number: position
        for position, op in enumerate(ops)
        if op.phase == BACKWARD and op.name.startswith("aten.add.")
        for number in heads.keys() & op.reads
    }
    for life in trace.lives:
        before = [at for at in losses if at < life.birth]
        if life.id in made and before:
            life = life._replace(birth=before[-1], death=sums.get(life.id, life.death))
        if life.id not in logits:
            found.append(life)
    return replace(trace, lives=tuple(found), ops=tuple(ops))


def is_cross_entropy(trace: Trace) -> bool:
    """Whether a cross entropy of class indices takes such logits."""
    logits = logits_of(trace)
    return any(
        op.name.startswith("aten.nll_loss_forward") and not logits.isdisjoint(op.reads)
        for op in trace.ops
    )


def _made_in_backward(trace: Trace, logits: set[int]) -> tuple[dict[int, int], dict[int, int]]:
    """What backward passes make of logits: gradients of the head, and those of the hidden states,
    by ids; with the position at which the backward pass of these logits begins. That of a head is
    as large as the weight; it is only a part of a gradient if an embedding has this weight too."""
    lives = {life.id: life for life in trace.lives}
    weights = {
        lives[number].bytes
        for one in logits
        for number in trace.ops[lives[one].birth].reads
        if number in lives and lives[number].category == PARAMETERS
    }
    heads, hidden, begin = dict[int, int](), dict[int, int](), -1
    made: dict[int, list[Life]] = {}
    for life in trace.lives:
        if life.phase == BACKWARD and life.id not in logits:
            made.setdefault(life.birth, []).append(life)
    for position, op in enumerate(trace.ops):
        if op.phase == FORWARD:
            begin = -1
        elif op.phase == BACKWARD and not logits.isdisjoint(op.reads):
            begin = position if begin < 0 else begin
            for life in made.get(position, ()):
                (heads if life.bytes in weights else hidden)[life.id] = begin
    return heads, hidden

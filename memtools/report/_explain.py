"""What happened, as plain text: what `memtools explain` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtools.report._advice import advise
from memtools.report._facts import headline, is_bytes
from memtools.report._words import count, duration, percent, shown, size

if TYPE_CHECKING:
    from memtools.report._facts import Facts, Said, Tier, Used

PHASES, SAID = 10, 8
NOT_USED = ("limit", "_total", "available", "_free")  # what is left or allowed has no peak


def explain(facts: Facts) -> str:
    """The whole text, a few dozen lines."""
    parts = [
        [sentence(headline(facts))],
        _about(facts),
        _section("Memory", _memory(facts)),
        _section("Growth", _growth(facts)),
        _section("Phases by peak", _phases(facts)),
        _section("Cleanups", _cleanups(facts)),
        _section("What to do next", [f"- {line}" for line in advise(facts)]),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _section(title: str, lines: list[str]) -> list[str]:
    return [title, *(f"  {line}" for line in lines)] if lines else []


def _about(facts: Facts) -> list[str]:
    run = f"{facts.path}: {facts.command or 'no command recorded'}, process {facts.pid}"
    length = f"{duration(facts.seconds)}, {count(facts.samples, 'sample')}"
    if facts.steps:
        length += f", {count(facts.steps, 'step')}"
    if facts.unreadable:
        length += f"; {count(facts.unreadable, 'row')} in flight or damaged, left out"
    return [run, length]


def _memory(facts: Facts) -> list[str]:
    lines = [] if facts.used is None else [_used(facts.used)]
    shown_tiers = [tier for tier in facts.tiers if is_bytes(tier.unit) and tier.peak > 0]
    shown_tiers = [tier for tier in shown_tiers if not tier.name.endswith(NOT_USED)]
    if shown_tiers:
        lines.append(f"{'':22} {'first':>10} {'peak':>10} {'last':>10}   peak at")
    return lines + [_tier(tier) for tier in shown_tiers]


def _used(used: Used) -> str:
    peak = size(used.peak_bytes)
    if used.limit_bytes is None:
        return f"peak of the {used.of}: {peak} at {duration(used.peak_seconds)}; no limit recorded"
    share = percent(used.peak_bytes, used.limit_bytes)
    limit = f"{size(used.limit_bytes)} ({used.source} limit)"
    return f"peak of the {used.of}: {peak}, {share} of {limit}, at {duration(used.peak_seconds)}"


def _tier(tier: Tier) -> str:
    sizes = " ".join(f"{size(n):>10}" for n in (tier.first, tier.peak, tier.last))
    return f"{tier.name:22} {sizes}   {duration(tier.peak_seconds)}"


def _growth(facts: Facts) -> list[str]:
    said = sorted(facts.leaks[-SAID:] + facts.holders[-SAID:], key=lambda one: one.seconds)
    lines = [_said(one) for one in said]
    if not facts.leaks:
        lines += [f"{growth} (judged from the record)" for growth in facts.growth]
        if not facts.growth:
            lines.append(facts.not_judged or "nothing grows")
    if facts.forecast:
        end = "at the end" if facts.ending.kind != "running" else "now"
        lines.append(f"forecast {end}: {facts.forecast}")
    return lines


def _said(said: Said) -> str:
    step = "" if said.step is None else f", step {said.step:,}"
    times = "" if said.count == 1 else f" (said {said.count:,} times)"
    return f"at {duration(said.seconds)}{step}: {said.text}{times}"


def _phases(facts: Facts) -> list[str]:
    lines = [
        f"{shown(phase.name):22} "
        f"{'' if phase.peak_bytes is None else size(phase.peak_bytes):>10}"
        f"   {phase.count:,} x, {duration(phase.seconds)}"
        for phase in facts.phases[:PHASES]
    ]
    more = len(facts.phases) - PHASES
    return lines + ([f"and {more:,} more"] if more > 0 else [])


def _cleanups(facts: Facts) -> list[str]:
    return [
        f"{one.what}: {one.count:,} x, {duration(one.seconds)}"
        + ("" if one.freed_bytes is None else f", freed {size(one.freed_bytes)}")
        for one in facts.cleanups
    ]

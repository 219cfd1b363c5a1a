"""Places: lines of a program, which of a stack is the user's, and how they are named.

frames of a stack, innermost first ──► place_of ──► the innermost line of the user's code
                                          │
                                          ├──► places_of: which lines explain which findings
                                          ▼
                                       name_of ──► train.py:47 in training_step
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from memtools._base.libraries import LIBRARY, MEMTOOLS, USER, is_torchs, owner_of
from memtools._base.place import Place as Place
from memtools._base.place import name_of as name_of
from memtools._base.trainers import is_entry
from memtools._leak.finding import Key, LeakFinding
from memtools._leak.judge import GRAPH

LEAST, MOST = 0.5, 1.5  # The lines that explain a finding make this share of its rate together.
#: The nodes of a graph take as much again as the tensors that they keep, and are not seen.
LEAST_OF_GRAPH = 0.25
ENOUGH = 0.9  # From this share of the rate on no further line is looked for.
ALIKE = 1.5  # Two rates that differ by at most this factor may be of the same growth.
SECOND = 0.2  # A second line is named if it makes this share of what the lines make together.


class Site(NamedTuple):
    """A place, and the bytes a step that stay of what is made there."""

    place: Place
    rate: float


Living = dict[Place, float]  # bytes by place, of what was made since a window began, and lives


def place_of(frames: Iterable[Place]) -> Place | None:
    """The place to be named of a stack, innermost frame first: the innermost of the user's code;
    where there is none, the innermost of a library, else of anything. None for what memtools has
    allocated for itself. The call of a trainer is no such line: inside of it, a library's code that
    is not torch's comes first."""
    library: Place | None = None
    other: Place | None = None
    beyond_torch: Place | None = None
    for place in frames:
        owner = owner_of(place.file)
        if is_entry(place.file, (place.function or "").rpartition(".")[2]):
            return beyond_torch or place
        if beyond_torch is None and owner == LIBRARY and not is_torchs(place.file):
            beyond_torch = place
        if owner == USER:
            return place
        if owner == MEMTOOLS:
            return library  # it has called the library
        if owner == LIBRARY:
            library = library or place
        other = other or place
    return library or other


def places_of(
    findings: Sequence[LeakFinding], sites: Sequence[Site]
) -> dict[Key, tuple[Place, ...]]:
    """Where each finding was made, the place of the most first; without those that no places
    explain.

    One finding is explained by the largest sites that together make 0.5 to 1.5 times its rate, or
    0.25 to 1.5 times that of a graph, whose nodes are not seen, unless one more site has its rate.
    Of several each gets the site of its rate, where no other site and no other finding has that
    rate; the largest gets the largest sites where no other is as large.

    Args:
        findings: that grow at the same time, and have no place yet.
        sites: what grows, the most first.
    """
    rated = sorted((one for one in findings if one.rate_bytes > 0), key=lambda f: -f.rate_bytes)
    found: dict[Key, tuple[Place, ...]] = {}
    for one in rated if len(rated) > 1 else ():
        alike = [site for site in sites if _is_alike(site.rate, one.rate_bytes)]
        if len(alike) == 1 and sum(_is_alike(alike[0].rate, f.rate_bytes) for f in rated) == 1:
            found[one.key] = (alike[0].place,)
    if not rated or rated[0].key in found:
        return found
    if len(rated) == 1 or not _is_alike(rated[0].rate_bytes, rated[1].rate_bytes):
        least = LEAST_OF_GRAPH if rated[0].kind == GRAPH else LEAST
        chosen = _explaining(sites, rated[0].rate_bytes, least)
        others = [site for site in sites if site not in chosen]
        if others and _is_alike(others[0].rate, rated[0].rate_bytes):
            return found  # It may be that line as well.
        places = _to_be_said(chosen)
        if places and not any(places[0] in known for known in found.values()):
            found[rated[0].key] = places
    return found


def _is_alike(a: float, b: float) -> bool:
    return max(a, b) <= ALIKE * min(a, b)


def _explaining(sites: Sequence[Site], rate: float, least: float) -> list[Site]:
    """The largest that together make the rate; empty where they do not."""
    found, total = list[Site](), 0.0
    for site in sites:
        if total + site.rate <= MOST * rate:
            found.append(site)
            total += site.rate
            if total >= ENOUGH * rate:
                break
    return found if total >= least * rate else []


def _to_be_said(sites: Sequence[Site]) -> tuple[Place, ...]:
    """The first, and the second where it makes much of it, too."""
    total = sum(site.rate for site in sites)
    return tuple(
        site.place for site in sites[:2] if site is sites[0] or site.rate >= SECOND * total
    )
